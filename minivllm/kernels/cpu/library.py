"""The C++ kernels for CPUs: torch's extension loader compiles them once for a machine.

This needs a C++ compiler and ninja once. Without them every layer uses torch's operations."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from minivllm.errors import BadInput, first_line
from minivllm.platform.devices import cpu_info
from minivllm.platform.files import cache_folder
from minivllm.platform.folders import TemporaryFolder

_FOLDER = Path(__file__).parent
_NAME = "minivllm_cpu"
# Hidden visibility allows inlining: visible functions are called through a table.
_FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fvisibility=hidden",
]


@dataclass(frozen=True)
class Kernels:
    """The operators of bindings.cpp, where their arguments are documented, and what is compiled of
    them."""

    has_linear: bool
    variant: str  # identifies sources, torch and instruction sets
    compile_s: float  # also of another process that this one waited for; 0: compiled before
    few_rows: Callable[..., int]
    pack: Callable[..., Any]
    use_huge_pages_: Callable[..., Any]
    linear: Callable[..., Any]
    embed: Callable[..., Any]
    paged_attention: Callable[..., Any]
    rms_norm: Callable[..., Any]
    norm_and_rotate_: Callable[..., Any]
    silu_and_multiply: Callable[..., Any]
    argmax: Callable[..., Any]
    draw: Callable[..., Any]
    decoder_layer: Callable[..., Any]  # the class of layer.h


def choose(option: str, device: torch.device) -> tuple[Kernels | None, str | None]:
    """The kernels for a device, and the reason why there are none although the option enables them.

    Args:
        option: "off"; "auto" uses the kernels where they compile; "on" requires them.
        device: where the model runs.

    Raises:
        BadInput: "on", and they cannot be had.
    """
    if option == "off" or (device.type != "cpu" and option == "auto"):
        return None, None
    try:
        if device.type != "cpu":
            raise RuntimeError(f"the device is {device.type}")
        return load(), None
    except (RuntimeError, OSError, ImportError) as error:
        reason = f"the C++ kernels for CPUs are not used: {first_line(error)}"
        if option == "on":
            raise BadInput(
                f"runtime.cpu_kernels=on: {reason}; use runtime.cpu_kernels=auto"
            ) from None
        return None, reason


@functools.cache
def load() -> Kernels:
    """Load the library; on the first call on this machine compile it.

    Raises:
        RuntimeError, OSError, ImportError: it cannot be compiled or loaded; the first line says
            why.
    """
    begin = time.perf_counter()
    path = _cached_path()
    is_new = not path.exists()
    if not (is_new and _compile(path)):
        torch.ops.load_library(str(path))
    operators = getattr(torch.ops, _NAME)
    apart = ("has_linear", "variant", "compile_s", "decoder_layer")
    names = [name for name in Kernels.__dataclass_fields__ if name not in apart]
    return Kernels(
        has_linear=operators.has_linear(),
        variant=path.stem,
        compile_s=time.perf_counter() - begin if is_new else 0.0,
        decoder_layer=getattr(torch.classes, _NAME).DecoderLayer,
        **{name: getattr(operators, name).default for name in names},
    )


def _cached_path() -> Path:
    """The path of the library for these sources, this torch and this processor."""
    digest = hashlib.sha256()
    for source in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(source.read_bytes())
    digest.update(f"{torch.__version__} {platform.machine()} {_FLAGS} {_processor()}".encode())
    return cache_folder() / f"{_NAME}-{digest.hexdigest()[:16]}.so"


def _processor() -> str:
    """The instruction sets that -march=native uses."""
    return cpu_info("flags|Features") or platform.processor()


def _compile(path: Path) -> bool:
    """Compile and load the library, unless another process has compiled it meanwhile; False then.
    One compiles, and the others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f"{_NAME}.lock")):
        if path.exists():
            return False
        print("compiling the C++ kernels for this processor, once", file=sys.stderr, flush=True)
        _build(path)
        return True


def _build(path: Path) -> None:
    from torch.utils import cpp_extension  # slow to import, and needed once

    # ninja may be in the folder of an interpreter that was started by its path.
    os.environ["PATH"] = os.pathsep.join(
        (os.environ.get("PATH", ""), str(Path(sys.executable).parent))
    )
    with TemporaryFolder(f".{_NAME}.", str(path.parent)) as folder:
        cpp_extension.load(
            _NAME,
            [str(source) for source in sorted(_FOLDER.glob("*.cpp"))],
            extra_cflags=_FLAGS,
            extra_ldflags=_openmp(),
            build_directory=folder,
            is_python_module=False,
            with_cuda=False,
        )
        os.replace(Path(folder) / f"{_NAME}.so", path)


def _openmp() -> list[str]:
    """The OpenMP library that torch has loaded: a second one would start threads of its own."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return ["-fopenmp"]
    library = re.search(r"/\S*/lib(gomp|omp|iomp5)[^/\s]*\.so\S*", mapped)
    return [library.group(0)] if library else ["-fopenmp"]
