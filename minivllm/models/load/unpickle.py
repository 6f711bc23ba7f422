"""The process that reads one file of pickled weights and writes it as .safetensors: python -m
minivllm.models.load.unpickle

PyTorch's files are programs of the pickle machine. `torch.load(weights_only=True)` lets them build
tensors and nothing else; what they can still do, which is to take all memory or all time, the
limits of this process end. It gets a JSON object on standard input (the fields of `Task`)
and answers by one on standard output: {"tensors": {name: bytes}} or {"error": text}.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import BadInput, first_line
from minivllm.platform.untrusted import MIB, open_file, size

_MOST_PICKLE = 64 * MIB  # of the program inside a file; that of 100,000 tensors has some 10 MiB
# where training loops keep the weights
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"  # ends of their names


@dataclass(frozen=True)
class Task:
    """One file to convert, and the limits of the conversion.

    Attributes:
        source: a file that torch.save wrote.
        target: the .safetensors file to write.
        tied: whether the head is the embedding, so that it is left out where both are one tensor.
        memory: bytes that the process may take beyond what it has when it begins.
        cpu_s: seconds of processor time that it may take.
    """

    source: str
    target: str
    tied: bool
    memory: int
    cpu_s: int


def convert(task: Task) -> dict[str, int]:
    """Write the tensors of a file as .safetensors.

    Returns:
        Bytes of each tensor by name.

    Raises:
        BadInput: the file is none of torch's, holds something else than tensors, or tensors that
            are larger than it.
    """
    from safetensors.torch import save_file

    source = Path(task.source)
    tensors = _tensors(_load(source), source)
    _validate_stored_size(tensors, source)
    kept = _apart(tensors, task.tied)
    save_file(kept, task.target, metadata={"format": "pt"})
    return {name: tensor.numel() * tensor.element_size() for name, tensor in kept.items()}


def _apart(tensors: Mapping[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """The tensors with memory of their own. A head that is the embedding is left out if `tied`,
    others are copied."""
    embedding = next(
        (tensor for name, tensor in tensors.items() if name.endswith(_EMBEDDING)), None
    )
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tied and name.endswith(_HEAD) and embedding is not None and _is_one(tensor, embedding):
            continue
        storage = tensor.untyped_storage().data_ptr()
        own = (
            tensor.clone(memory_format=torch.contiguous_format)
            if storage in seen
            else tensor.contiguous()
        )
        seen.add(storage)
        kept[name] = own
    return kept


def _is_one(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and (one.shape, one.stride()) == (
        other.shape,
        other.stride(),
    )


def _load(source: Path) -> Any:
    with open_file(source, str(source)) as file:
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            _check_archive(file, source)
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        global_name = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = (
            f"it asks for {global_name[1]}, which tensors do not need"
            if global_name
            else first_line(error)[:200]
        )
        raise BadInput(f"{source} is rejected: {what}") from None


def _check_archive(file: Any, source: Path) -> None:
    """Reject an archive that unpacks to more than its size."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    total = source.stat().st_size
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise BadInput(f"{source} is rejected: it is compressed, as torch never writes it")
    if sum(entry.file_size for entry in entries) > total:
        raise BadInput(f"{source} is rejected: it unpacks to more than its {size(total)}")
    if any(
        entry.filename.endswith("data.pkl") and entry.file_size > _MOST_PICKLE for entry in entries
    ):
        raise BadInput(f"{source} is rejected: the pickle in it has more than {size(_MOST_PICKLE)}")


def _tensors(state: Any, source: Path) -> dict[str, Tensor]:
    """The tensors by name, out of what a training loop put around them."""
    for _ in _WRAPPERS:
        if isinstance(state, Mapping) and not any(
            isinstance(value, Tensor) for value in state.values()
        ):
            state = next(
                (state[key] for key in _WRAPPERS if isinstance(state.get(key), Mapping)), state
            )
    if not isinstance(state, Mapping) or not state:
        raise BadInput(f"{source} holds no tensors by name, but a {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise BadInput(f"{source}: {name!r:.100} is a {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise BadInput(
                f"{source}: tensor {name!r:.100} is of a kind that .safetensors does not have"
            )
    return {name: value.detach() for name, value in state.items()}


def _validate_stored_size(tensors: Mapping[str, Tensor], source: Path) -> None:
    """A few bytes can stand for any number of elements, and one storage for any number of
    tensors."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    stored = source.stat().st_size
    if sum(sizes.values()) > 2 * stored:
        name = max(sizes, key=lambda key: sizes[key])
        raise BadInput(
            f"{source} is rejected: its tensors take {size(sum(sizes.values()))}, the file "
            f"{size(stored)}; the largest is {name!r:.100}"
        )


def _limit(task: Task) -> None:
    """Limit the memory and time of the process, where the system supports it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        import psutil

        memory = psutil.Process().memory_info().vms + task.memory
        for kind, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, task.cpu_s),
            (resource.RLIMIT_AS, memory),
        ):
            resource.setrlimit(kind, (most, most))


def main() -> None:
    """Answer one task."""
    task = Task(**json.load(sys.stdin))
    import safetensors.torch  # noqa: F401  # before the limits: what it needs is no part of them

    _limit(task)
    answer: dict[str, Any]
    try:
        answer = {"tensors": convert(task)}
    except BadInput as error:
        answer = {"error": str(error)}
    except (MemoryError, RecursionError) as error:
        answer = {"error": f"{task.source} is rejected: {_out_of(task, error)}"}
    except Exception as error:  # an untrusted file may raise any exception in torch
        text = first_line(error)
        out = "allocate" in text or "mmap" in text
        answer = {
            "error": f"{task.source} is rejected: {_out_of(task, error) if out else text[:200]}"
        }
    json.dump(answer, sys.stdout)


def _out_of(task: Task, error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"it needs more than {size(task.memory)} of memory"


if __name__ == "__main__":
    main()
