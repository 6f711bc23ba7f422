"""The packed weights of one model: whether they are kept, found again, or packed again."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from minivllm.errors import BadInput, first_line
from minivllm.kernels.cpu.library import Kernels
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.load.filling import Filled
from minivllm.models.load.packed_cache.file import PackedFile, write_packed
from minivllm.models.load.packed_cache.folder import CacheFolder, entry_name
from minivllm.models.load.packed_cache.identity import identity, key_of
from minivllm.models.load.packed_cache.model import (
    CannotKeep,
    Parts,
    parts_of,
    put_parts,
)
from minivllm.models.load.source import Source
from minivllm.models.options import AUTO, OFF, ModelOptions
from minivllm.platform.files import cache_folder
from minivllm.platform.untrusted import place
from minivllm.quant.base import QuantMethod

KNOB = "model.packed_cache"


@dataclass
class PackedCache:
    """The entry of one model in the folder.

    Attributes:
        folder: None: weights are not kept.
        whole: identity of the entry.
        name: of the entry's file.
        kernels: that read the weights.
        smallest: weights of fewer bytes are not kept.
        outcome: "hit", "written", or "off" with the reason.
        warnings: for the log and the record.
        write_s: seconds of writing, of an entry that was written.
    """

    folder: CacheFolder | None = None
    whole: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    kernels: Kernels | None = None
    smallest: int = 0
    outcome: str = OFF
    warnings: list[str] = field(default_factory=list)
    write_s: float | None = None

    def restore(self, model: LlamaForCausalLM, linears: Collection[str]) -> Filled | None:
        """Give a model on the meta device its weights; None where they are not kept, or damaged."""
        path = None if self.folder is None else self.folder.find(self.name)
        if path is None:
            return None
        assert self.kernels is not None
        try:
            file = PackedFile.open(path)
            content = file.content
            if content["identity"] != self.whole:
                raise BadInput(f"{path} has the weights of another model")
            filled = Filled(**content["filled"])
            tensors = file.load(content["last"], self.kernels.use_huge_pages_)
            put_parts(model, Parts(tensors, **content["parts"]), linears, self.kernels)
        except (BadInput, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.warnings.append(f"{KNOB}: the weights are packed again: {first_line(error)}")
            return None
        self.outcome = "hit"
        return filled

    def keep(self, model: LlamaForCausalLM, linears: Collection[str], filled: Filled) -> None:
        """Write the weights of a loaded model; a failure is a warning."""
        if self.folder is None:
            return
        begin = time.perf_counter()
        try:
            parts = parts_of(model, linears)
        except CannotKeep as problem:
            self.outcome = f"{OFF}: {problem}"
            return
        total = sum(tensor.nbytes for tensor in parts.tensors.values())
        if total < self.smallest:
            self.outcome = f"{OFF}: the model is small"
            return
        content = {
            "identity": self.whole,
            "filled": asdict(filled),
            "parts": {"facts": parts.facts, "is_tied": parts.is_tied},
            "last": parts.looked_up,
        }
        write = partial(write_packed, content=content, tensors=parts.tensors, last=parts.looked_up)
        reason = self.folder.add(self.name, total, write)
        if reason is None:
            self.outcome, self.write_s = "written", time.perf_counter() - begin
        else:
            self.outcome = f"{OFF}: {reason}"
            self.warnings.append(f"{KNOB}: packed weights are not kept: {reason}")


def packed_cache(
    options: ModelOptions,
    source: Source,
    quant: QuantMethod,
    kernels: Kernels | None,
    off: str,
    smallest: int,
) -> PackedCache:
    """The entry of a model, or one that keeps nothing and says why.

    Args:
        options: the knobs of `model`.
        source: of the weights.
        quant: the quantisation method.
        kernels: that the model computes with.
        off: why its weights are not kept, an `outcome`; empty: they are.
        smallest: weights of fewer bytes are not kept.

    Raises:
        BadInput: the folder that the knob names cannot be written to.
    """
    is_named = options.packed_cache not in (OFF, AUTO)
    path = place(options.packed_cache, KNOB) if is_named else cache_folder() / "packed"
    folder = CacheFolder(path, int(options.packed_cache_gb * 1e9))
    if is_named:
        folder.require_usable(KNOB)
    if off:
        return PackedCache(outcome=off)
    assert kernels is not None
    whole = identity(source, quant, kernels.variant)
    label = f"{source.config['architectures'][0]}-{quant.name}"
    name = entry_name(label, key_of(whole))
    return PackedCache(folder, whole, name, kernels, smallest)
