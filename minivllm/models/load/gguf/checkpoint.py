"""The tensors of a GGUF file by the model's names. Free of torch.

llama.cpp's converter changes some: the rows of Llama's queries and keys are in another order, the
norms of Gemma have 1 added, and all experts of a layer are one tensor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from minivllm.errors import BadInput
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.gguf.config import LONG, ROPE_FREQS, SHORT, read_config
from minivllm.models.load.gguf.file import GGUFFile
from minivllm.models.load.gguf.formats import READ
from minivllm.models.load.names import StoredTensor
from minivllm.platform.untrusted import size

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_FAMILY = {"phi3": {"ffn_up": "mlp.gate_up_proj"}, "gemma2": _GEMMA, "gemma3": _GEMMA}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER = re.compile(r"blk\.(\d{1,9})\.([a-z_]+)\.(weight|bias)")
_NO_WEIGHTS = (ROPE_FREQS, LONG, SHORT)  # config.py reads them
# Formats whose every value a dtype holds, up to the 1 that is taken from Gemma's norms.
_HELD = {"float32": {*READ}, "float16": {"F16"}, "bfloat16": {"BF16"}}
_MOST_EXPERTS = 1 << 18  # most matrices of experts in one checkpoint


@dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """A tensor, and what was done to it when it was converted."""

    heads: int = 0  # whose rows alternate between the halves of a head; 0: none
    has_one: bool = False  # 1 was added to each value


@dataclass(frozen=True)
class GGUFCheckpoint(Checkpoint):
    """The tensors of one file, or of all parts of a split model. `folder` is the first file."""

    @classmethod
    def open(cls, folder: Path) -> GGUFCheckpoint:
        """Read the header; no weight.

        Raises:
            BadInput: as `GGUFFile.open` and `read_config`; or two tensors have the same place.
        """
        file = GGUFFile.open(folder)
        config = read_config(file)
        family = str(file.metadata["general.architecture"])
        heads = (
            {
                "attn_q": config["num_attention_heads"],
                "attn_k": config["num_key_value_heads"],
            }
            if family == "llama"
            else {}
        )
        tensors: dict[str, StoredTensor] = {}
        for stored in file.tensors.values():
            for name, tensor in _placed(stored, family, heads):
                if name in tensors:
                    raise BadInput(
                        f"{folder}: tensors {tensors[name].name} and {tensor.name} are both {name}"
                    )
                tensors[name] = tensor
                if len(tensors) > len(file.tensors) + _MOST_EXPERTS:
                    raise BadInput(
                        f"{folder}: tensor {tensor.name} has more experts than any model"
                    )
        return cls(folder, (folder, *(part.path for part in file.others)), tensors)

    def file_that_holds(self, name: str) -> Path | None:
        """None: all files are the model's."""
        return None

    def fingerprint(self) -> str:
        return GGUFFile.open(self.folder).fingerprint()

    def stored_bytes(self) -> dict[str, int]:
        """Bytes of the tensors in the file, by format, the largest first."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += tensor.end - tensor.begin
        return dict(sizes.most_common())

    def contents(self) -> str:
        """What the file stores, in words: "q.gguf stores Q8_0 (3 MiB), F32 (2 KiB)"."""
        sizes = [f"{form} ({size(count)})" for form, count in self.stored_bytes().items()]
        return f"{self.folder.name} stores {', '.join(sizes)}"

    def conversion(self, dtype: str, other: Container[str] = ()) -> str:
        """What becomes of the tensors that are not among `other`, in words: "converted to bfloat16
        and rounded"."""
        forms = {tensor.dtype for name, tensor in self.tensors.items() if name not in other}
        how = "without rounding" if forms <= _HELD[dtype] else "and rounded"
        return f"converted to {dtype} {how}"


def _placed(
    stored: StoredTensor, family: str, heads: dict[str, int]
) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor by the model's name, or the matrices of the experts in it. One without a place keeps
    its name."""
    if stored.name in _NO_WEIGHTS:
        return
    gemma = family.startswith("gemma")
    if stored.name in _WHOLE:
        yield _WHOLE[stored.name], _converted(stored, 0, gemma and "norm" in stored.name)
        return
    match = _LAYER.fullmatch(stored.name)
    part = match[2] if match else ""
    names = _OF_LAYER | _OF_FAMILY.get(family, {})
    if match and part in _EXPERTS and match[3] == "weight" and len(stored.shape) == 3:
        experts = f"model.layers.{match[1]}.mlp.experts"
        count, *shape = stored.shape
        each = (stored.end - stored.begin) // count
        for expert in range(count):
            begin = stored.begin + expert * each
            yield (
                f"{experts}.{expert}.{_EXPERTS[part]}.weight",
                replace(stored, shape=tuple(shape), begin=begin, end=begin + each),
            )
    elif match and part in names:
        converted = _converted(stored, heads.get(part, 0), gemma and "norm" in part)
        yield f"model.layers.{match[1]}.{names[part]}.{match[3]}", converted
    else:
        yield stored.name, stored


def _converted(stored: StoredTensor, heads: int, has_one: bool) -> GGUFTensor:
    return GGUFTensor(**vars(stored), heads=heads, has_one=has_one)
