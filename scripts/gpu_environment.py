"""Say what this machine has for scripts/gpu_suite.sh: the packages of pyproject.toml and those of
the tests, each imported, and the GPU.

    python scripts/gpu_environment.py

The exit code is 1 where something is missing; the last lines say how it is installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("run", "serve", "gguf")
TESTING = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "transformers", "triton")
# Packages whose module has another name.
MODULES = {
    "hydra-core": "hydra",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "pytest-xdist": "xdist",
    "pyyaml": "yaml",
}


def packages(root: Path = ROOT) -> dict[str, str]:
    """The packages to import, each with its module."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for name in EXTRAS for text in extras[name])]
    names = dict.fromkeys([*(Requirement(text).name for text in texts), *TESTING])
    return {name: MODULES.get(name.lower(), name.replace("-", "_")) for name in names}


def imported(modules: dict[str, str]) -> tuple[list[str], list[str]]:
    """The packages with their versions, and those that cannot be imported with the reason."""
    found, missing = [], []
    for name, module in modules.items():
        try:
            importlib.import_module(module)
            found.append(f"{name} {importlib.metadata.version(name)}")
        except Exception as error:  # a library that does not load is as good as none
            missing.append(f"{name} ({type(error).__name__}: {error})")
    return found, missing


def gpu() -> str | None:
    """torch's GPU and the assembler of Triton's kernels; None where torch sees no GPU."""
    import torch
    import triton

    if not torch.cuda.is_available():
        return None
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    assembler = triton.knobs.nvidia.ptxas.version
    return f"{name}, compute capability {capability[0]}.{capability[1]}, ptxas {assembler}"


def smi() -> str:
    """What nvidia-smi says, or why it says nothing."""
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"
    return done.stdout or done.stderr


def main() -> int:
    """Entry point; see the module's docstring. Returns the exit code."""
    print(smi(), flush=True)
    found, missing = imported(packages())
    print(f"Python {sys.version.split()[0]}:", ", ".join(found))
    if missing:
        print("cannot be imported:", "; ".join(missing))
        print(f"with a network: {sys.executable} -m pip install '.[{','.join(EXTRAS)}]'")
        print("without one, on a machine that has one: python scripts/gpu_wheels.py")
        return 1
    device = gpu()
    print(device or "torch sees no GPU")
    return 0 if device else 1


if __name__ == "__main__":
    sys.exit(main())
