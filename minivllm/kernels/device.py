"""The device of a process, its memory, and which kernels are used there: decided before any import
of Triton, which may be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from minivllm.errors import BadInput
from minivllm.kernels.cpu.library import Kernels
from minivllm.parallel.ranks import ONE_RANK, Ranks
from minivllm.platform.devices import devices_of_ranks


@dataclass(frozen=True)
class BuildContext:
    """Where an engine computes and with what, decided once for each engine.

    The constructor of a model, or of an attention backend, that takes an argument `context` gets
    this object."""

    device: torch.device
    kernels: Kernels | None = None  # C++ kernels of CPUs; None: not in use
    # Whether a request's results are to be independent of other requests in the batch.
    invariant: bool = False
    moe: str = "auto"  # how experts are multiplied: the knob runtime.moe
    ranks: Ranks = ONE_RANK  # the processes that each hold a part of the model


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def select_device(name: str, local_rank: int = 0, ranks: int = 1) -> torch.device:
    """The device `runtime.device` asks for, made torch's current one; "auto" takes a GPU if there
    is one.

    Args:
        name: the knob; with several ranks it may name a GPU for each.
        local_rank, ranks: the number of this rank, and how many share the machine.

    Raises:
        BadInput: torch knows no such device, or it is not there.
    """
    if name == "auto" and (ranks == 1 or not torch.cuda.is_available()):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = devices_of_ranks("cuda" if name == "auto" else name, ranks)[local_rank]
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"runtime.device={name!r} is no device; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"runtime.device={name}: torch sees no GPU here; use runtime.device=cpu")
    if device.type == "cuda" and device.index is not None:
        if device.index >= (count := torch.cuda.device_count()):
            raise BadInput(f"runtime.device={name}: torch sees {count} GPUs, the first is cuda:0")
        # Kernels, streams and memory statistics that name no device mean the current one.
        torch.cuda.set_device(device)
    return device


def thread_settings() -> Callable[[], None]:
    """A function that gives another thread the number of processor threads and the current GPU of
    this one."""
    threads = torch.get_num_threads()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def apply() -> None:
        torch.set_num_threads(threads)
        if gpu is not None:
            torch.cuda.set_device(gpu)

    return apply


def takes_triton(
    option: str,
    chosen: str,
    other: str,
    device: torch.device,
    below: tuple[int, int] | None = None,
) -> bool:
    """Whether a knob with the values auto, triton and `other` selects Triton on a device; auto is
    triton on GPUs that Triton supports.

    Args:
        option, chosen: the knob's name and value.
        other: its value without Triton.
        device: of the tensors.
        below: the first compute capability on which these kernels are not launched; None: none.

    Raises:
        BadInput: `chosen` is none of these, or triton where it cannot run; `option` is the knob's
            name.
    """
    if chosen not in ("auto", "triton", other):
        raise BadInput(f"{option}={chosen} must be auto, triton or {other}")
    if chosen == other or (chosen == "auto" and device.type != "cuda"):
        return False
    try:
        from minivllm.kernels.common import check_device

        check_device(f"{option}=triton", device, f"{option}={other}", below)
    except (ImportError, BadInput) as error:
        if chosen == "auto":
            return False
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            f"{option}=triton needs triton, which does not load ({error}): use {option}={other}"
        ) from None
    return True
