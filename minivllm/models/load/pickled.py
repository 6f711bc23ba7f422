"""A folder of PyTorch's pickled weights (.bin, .pt, .pth), converted to .safetensors by a process
with limits. Free of torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from minivllm.errors import BadInput
from minivllm.models.load.checkpoint import INDEX, Checkpoint, shard_name, share, write_index
from minivllm.platform.folders import new_folder
from minivllm.platform.processes.children import module_path
from minivllm.platform.untrusted import (
    MAX_TOKENIZER,
    MIB,
    open_file,
    parse_json,
    printable,
    read_bytes,
    read_object,
    size,
)

PATTERNS = ("*.bin", "*.pt", "*.pth")
_INDEX = "pytorch_model.bin.index.json"
_MAIN = "pytorch_model.bin"
# Files of training beside the weights.
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state).*\.(bin|pt|pth)")
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
_MOST_FILES = 10_000
# Bytes of memory beyond three times the file: its map, a copy on the way out, shared tensors.
_SPARE = 1 << 30


def weight_files(path: Path) -> tuple[Path, ...]:
    """The pickled files that hold a folder's weights, or the one that `path` names.

    Raises:
        BadInput: there are none, one that the index names is not there, or one is no regular file.
    """
    folder = path if path.is_dir() else path.parent
    index = folder / _INDEX
    if not path.is_dir():
        files = [path]
    elif index.exists():
        weight_map = read_object(index, str(index)).get("weight_map")
        names = (
            {*weight_map.values()}
            if isinstance(weight_map, dict) and _are_names(weight_map)
            else set()
        )
        if not names:
            raise BadInput(
                f"{index} has no weight_map of file names: download the checkpoint again"
            )
        files = [folder / name for name in sorted(names)]
    elif (folder / _MAIN).exists():
        files = [folder / _MAIN]
    else:
        files_by_pattern = {file for pattern in PATTERNS for file in folder.glob(pattern)}
        files = sorted(file for file in files_by_pattern if not _NO_WEIGHTS.fullmatch(file.name))
    if not 0 < len(files) <= _MOST_FILES:
        raise BadInput(f"{folder} has no pickled weights ({', '.join(PATTERNS)}) to convert")
    for file in files:
        open_file(file, str(file)).close()
    return tuple(files)


def _are_names(weight_map: dict[str, object]) -> bool:
    return all(isinstance(name, str) and Path(name).name == name for name in weight_map.values())


def convert(
    path: Path,
    output: Path,
    timeout_s: float,
    memory_gb: float | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Write a checkpoint of pickled weights as .safetensors, with its configuration and tokenizer
    beside them.

    The output is there whole or not at all.

    Args:
        path: the folder, or one file.
        output: the folder to make; it must not exist.
        timeout_s: longest time that one file may take.
        memory_gb: most memory that reading one file may take; None: three times the file, and 1
            GiB.
        report: gets a line for each file that is done.

    Returns:
        Number of tensors.

    Raises:
        BadInput: there is nothing to convert, a file is not of tensors alone, exceeds a limit, or
            cannot be written.
    """
    files = weight_files(path)
    folder = path if path.is_dir() else path.parent
    copied = _other_files(folder)
    config = parse_json(copied.get("config.json", b"{}"), f"{folder / 'config.json'}")
    tied = isinstance(config, dict) and config.get("tie_word_embeddings") is True
    needed = sum(file.stat().st_size for file in files)
    with new_folder(output, f"task.output={output}", needed) as made:
        for name, content in copied.items():
            (made / name).write_bytes(content)
        count = _convert_files(files, made, tied, timeout_s, memory_gb, report)
        Checkpoint.open(made)
    return count


def _other_files(folder: Path) -> dict[str, bytes]:
    """Configuration and tokenizer of a checkpoint: content by file name."""
    files = {file for pattern in _COPIED for file in folder.glob(pattern)}
    kept = sorted(file for file in files if file.name not in (_INDEX, INDEX))
    return {file.name: read_bytes(file, MAX_TOKENIZER, str(file)) for file in kept}


def _convert_files(
    files: Sequence[Path],
    place: Path,
    tied: bool,
    timeout_s: float,
    memory_gb: float | None,
    report: Callable[[str], None],
) -> int:
    weight_map: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, start=1):
        name = shard_name(number, len(files))
        task = {
            "source": str(file.absolute()),
            "target": str(place / name),
            "tied": tied,
            "memory": int(memory_gb * 1e9)
            if memory_gb is not None
            else 3 * file.stat().st_size + _SPARE,
            "cpu_s": max(1, int(timeout_s)),
        }
        sizes = _ask(task, timeout_s)
        share(place / name)
        if again := sorted(sizes.keys() & weight_map):
            raise BadInput(
                f"{file.parent}: tensor {again[0]} is in two of its files: keep those of one "
                "checkpoint"
            )
        weight_map |= dict.fromkeys(sizes, name)
        total += sum(sizes.values())
        report(f"{file.name}: {len(sizes)} tensors, {size(sum(sizes.values()))}, to {name}")
    if len(files) > 1:
        write_index(place, weight_map, total)
    return len(weight_map)


def _ask(task: dict[str, object], timeout_s: float) -> dict[str, int]:
    """Let a child process convert one file."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": module_path()}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "minivllm.models.load.unpickle"],
            input=json.dumps(task).encode(),
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, **own},
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"{task['source']} is rejected: it takes more than {timeout_s:g} s to read"
        ) from None
    if done.returncode or len(done.stdout) > 64 * MIB:
        last = (
            done.stderr.decode(errors="replace").strip().splitlines()
            or [f"exit code {done.returncode}"]
        )[-1]
        raise BadInput(
            f"{task['source']} is rejected: reading it ended with {printable(last)[:200]}"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise BadInput(printable(answer["error"]))
    sizes: dict[str, int] = answer["tensors"]
    return sizes
