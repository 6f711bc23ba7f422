"""The reference of quality figures, computed once in a process of its own and shared by all cells
of all sweeps.

`<runs>/quality/<id>/` has `logprobs.npy`, and `reference.json`, which is written last: it exists
only when the other file is whole. A process of its own, and before the engine under test is built,
so that two models never lie in memory together and nothing of the reference is left in the process
that measures. It may be deleted at any time.

`python -m minivllm.bench.quality_reference JOB.json PARENT_PID`
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, get_type_hints

import numpy as np

from minivllm.bench.options import QualityOptions
from minivllm.bench.quality import (
    LOG_PROBS,
    Reference,
    distributions,
    greedy,
    negative_log_likelihood,
    num_predicted,
)
from minivllm.bench.records.identity import code_hash, digest, engine_id, environment_hash
from minivllm.bench.records.lock import HolderLock
from minivllm.bench.records.schema import checker
from minivllm.config.compose import OPTIONS, compose
from minivllm.config.groups import Config
from minivllm.engines.base import LogitsEngine
from minivllm.errors import BadInput, classify
from minivllm.models.load.source import EMBEDDED, resolve
from minivllm.platform import files, untrusted
from minivllm.platform.folders import TemporaryFolder
from minivllm.platform.untrusted import MAX_TEXT, place, read_object

FOLDER = "quality"
REFERENCE = "reference.json"
ERROR = "error.json"
WINDOW = 1024  # tokens, unless the context is shorter


def text_path(knobs: QualityOptions) -> Path:
    """The text to judge by. Raises BadInput if there is no such file."""
    path = (
        EMBEDDED / "heldout.txt"
        if knobs.text is None
        else place(knobs.text, f"quality.text={knobs.text}")
    )
    if not path.is_file():
        raise BadInput(f"quality.text={path} is no file: give a text file, UTF-8")
    return path


def read_text(knobs: QualityOptions) -> str:
    """The text to judge by. Raises BadInput if there is none, or it is not UTF-8."""
    path = text_path(knobs)
    return untrusted.read_text(path, MAX_TEXT, f"quality.text={path}")


def window_and_stride(knobs: QualityOptions, max_model_len: int) -> tuple[int, int]:
    """Tokens of a window and from one to the next.

    Raises:
        BadInput: a window, or a prompt with its continuation, is longer than the context.
    """
    window = knobs.window or min(WINDOW, max_model_len)
    if window > max_model_len:
        raise BadInput(
            f"quality.window={window} is longer than the context of {max_model_len} tokens"
        )
    if (length := knobs.prompt_len + knobs.output_len) > max_model_len:
        raise BadInput(
            f"quality.prompt_len and quality.output_len are {length} tokens together, and the "
            f"context is {max_model_len}"
        )
    return window, min(knobs.stride or max(1, window // 2), window)


def reference_id(config: dict[str, Any]) -> str:
    """Content address of the reference that a configuration is compared with, 12 hexadecimal
    digits."""
    view = Config.of(config)
    knobs, device = view.quality, view.runtime.device
    checkpoint: list[Any] = [config["model"]]
    if view.target("model") in OPTIONS:
        source = resolve(config["model"], allow_random=True)[1]
        tokenizer = source.folder and source.folder / "tokenizer.json"
        words = files.sha256(tokenizer) if tokenizer and tokenizer.is_file() else None
        checkpoint = [source.fingerprint, words, view.model.max_model_len]
    text = files.sha256(text_path(knobs))
    engine = engine_id({**_usual(knobs), "model": checkpoint})
    where = code_hash(), environment_hash(device), device
    return digest([engine, {**config["quality"], "text": text}, *where])


def _usual(knobs: QualityOptions) -> dict[str, Any]:
    """The configuration of default options, in the reference's precision and with a place for each
    prompt."""
    return compose([f"quant={knobs.reference}", f"batching.max_num_seqs={knobs.prompts}"])


def load(folder: Path) -> Reference | None:
    """What `compute` wrote; None where it is not there or is damaged, and so is to be computed
    again."""
    types = {name: kind for name, kind in get_type_hints(Reference).items() if name != "folder"}
    try:
        content = read_object(folder / REFERENCE, REFERENCE, limit=MAX_TEXT)
        if content.keys() != types.keys() or any(
            checker(types[key])(content[key]) for key in types
        ):
            return None
        rows = len(np.load(folder / LOG_PROBS, mmap_mode="r"))
    except (OSError, ValueError, EOFError, TypeError):
        return None
    reference = Reference(**content, folder=folder)
    predicted = num_predicted(len(reference.token_ids), reference.window, reference.stride)
    whole = (
        len(reference.top1) == predicted and rows == reference.kl_tokens and reference.continuations
    )
    return reference if whole else None


def ensure(
    config: dict[str, Any], root: Path, announce: Callable[[], None] = lambda: None
) -> Reference:
    """The reference that a configuration is compared with, computed if it is not there.

    Args:
        config: the resolved configuration of a cell.
        root: the folder of all records (`runs_dir`).
        announce: called if it is not there yet.

    Raises:
        BadInput: the text or the model cannot be used.
        MemoryError: the reference does not fit.
        RuntimeError: it could not be computed.
    """
    folder = root / FOLDER / reference_id(config)
    if (reference := load(folder)) is not None:
        return reference
    announce()
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    lock = HolderLock(root / FOLDER / ".lock", "quality")
    lock.acquire(wait=True)
    try:
        if (reference := load(folder)) is None:  # nor has another process made it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            _remove_unfinished(root / FOLDER)
            _compute_apart(config, folder)
            reference = load(folder)
    finally:
        lock.release()
    if reference is None:
        raise RuntimeError(f"{folder} cannot be read back, though it was just written")
    return reference


def _remove_unfinished(root: Path) -> None:
    """Remove what killed processes left; the caller has the lock, so no process writes it."""
    for folder in root.iterdir():
        if folder.is_dir() and not (folder / REFERENCE).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _compute_apart(config: dict[str, Any], folder: Path) -> None:
    """Run `compute` in a process of its own; what it prints goes where this process's output
    goes."""
    with TemporaryFolder("minivllm-reference-") as scratch:
        job = Path(scratch) / "job.json"
        job.write_text(json.dumps({"config": config, "folder": str(folder)}, default=str))
        command = [
            sys.executable,
            "-m",
            "minivllm.bench.quality_reference",
            str(job),
            str(os.getpid()),
        ]
        code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        if code == 0:
            return
        problem = {"status": "error", "message": f"its process ended with exit code {code}"}
        with suppress(OSError, ValueError):
            problem = json.loads((Path(scratch) / ERROR).read_text())
    if problem["status"] == "invalid":
        raise BadInput(problem["message"])
    precision = Config.of(config).quality.reference
    message = f"quality.reference={precision} could not be computed: {problem['message']}"
    raise MemoryError(message) if problem["status"] == "oom" else RuntimeError(message)


def compute(config: dict[str, Any], folder: Path) -> None:
    """Build the model in the reference precision, otherwise with default options, and write what it
    says.

    Args:
        config: the resolved configuration of a cell; its model, device, threads and `quality`
            settings are used.
        folder: where to write; its name becomes the reference's id.

    Raises:
        BadInput: random weights, no tokenizer, or a text that is too short.
        OSError: the disk is full; nothing that looks like a reference is left then.
    """
    from minivllm.engines.minivllm.engine import MinivllmEngine  # imports torch, so only here

    knobs = Config.of(config).quality
    usual = _usual(knobs)
    given = Config.of(config).runtime
    runtime = {**usual["runtime"], "device": given.device, "threads": given.threads}
    engine = MinivllmEngine({**usual, "model": config["model"], "runtime": runtime})
    require_trained_weights(engine.info.weights)
    window, stride = window_and_stride(knobs, engine.info.max_model_len)
    token_ids, num_bytes = _tokens(engine, knobs)
    prompts = _prompts(token_ids, knobs)
    row_bytes = 2 * engine.info.vocab_size
    fitting = knobs.max_reference_gb * 1e9 // row_bytes
    kl_tokens = int(min(num_predicted(len(token_ids), window, stride), fitting))
    if not kl_tokens:
        raise BadInput(
            f"quality.max_reference_gb={knobs.max_reference_gb:g} holds not one token: raise it"
        )
    nll, top1 = _write_log_probs(
        folder / LOG_PROBS,
        kl_tokens,
        engine.info.vocab_size,
        distributions(engine, token_ids, window, stride),
    )
    if not math.isfinite(nll):
        raise RuntimeError(f"its logits are not finite; choose a wider one than {knobs.reference}")
    continuations = greedy(engine, prompts, knobs.output_len)
    reference = Reference(
        folder.name,
        knobs.reference,
        token_ids,
        num_bytes,
        window,
        stride,
        math.exp(nll / len(top1)),
        top1,
        kl_tokens,
        prompts,
        continuations,
        folder,
    )
    content = {key: value for key, value in asdict(reference).items() if key != "folder"}
    files.write_json(folder / REFERENCE, content)


def _write_log_probs(
    path: Path, kl_tokens: int, vocab_size: int, batches: Iterable[tuple[np.ndarray, np.ndarray]]
) -> tuple[float, list[int]]:
    """Write the first `kl_tokens` rows of log-probabilities, as float16.

    Returns:
        The negative log-likelihood of all targets, and the likeliest token at each.
    """
    nll, top1 = 0.0, list[int]()

    def write(path: Path) -> None:
        nonlocal nll
        with path.open("wb") as file:
            _header(file, kl_tokens, vocab_size)
            for targets, log_probs in batches:
                if (room := kl_tokens - len(top1)) > 0:
                    # Beyond float16's range only probabilities that are zero in float32 too.
                    file.write(np.maximum(log_probs[:room], -6e4).astype(np.float16).tobytes())
                nll += negative_log_likelihood(targets, log_probs)
                top1.extend(log_probs.argmax(1).tolist())

    files.atomically(path, write)
    return nll, top1


def require_trained_weights(weights: str | None) -> None:
    """Raise BadInput for random weights, whose text is noise in any precision."""
    if weights == "random":
        raise BadInput(
            "quality needs trained weights, and these are random: give model.path=FOLDER with a "
            "checkpoint, or leave quality out (task=bench measure.quality=false)"
        )


def _tokens(engine: LogitsEngine, knobs: QualityOptions) -> tuple[list[int], int | None]:
    """Token ids of the text, and the bytes that they cover where decoding gives the text back."""
    text = read_text(knobs)
    token_ids = engine.encode(text)[: knobs.max_tokens]
    covered = (engine.text(token_ids) or "").rstrip("\ufffd")  # the last character may be cut
    return token_ids, len(covered.encode()) if covered and text.startswith(covered) else None


def _prompts(token_ids: list[int], knobs: QualityOptions) -> list[list[int]]:
    """Pieces of the text, evenly spread over it."""
    length, count = knobs.prompt_len, knobs.prompts
    room = len(token_ids) - length
    if len(token_ids) < 2 or room < 0:
        raise BadInput(
            f"the text of quality.text has {len(token_ids)} tokens, and prompts of "
            f"quality.prompt_len={length} are cut from it: give a longer one, or shorter prompts"
        )
    return [
        token_ids[start : start + length] for start in (i * room // count for i in range(count))
    ]


def _header(file: IO[bytes], rows: int, columns: int) -> None:
    """NumPy's own, so that rows can follow as they are computed and the whole can be mapped."""
    header = {"descr": "<f2", "fortran_order": False, "shape": (rows, columns)}
    np.lib.format.write_array_header_1_0(file, header)


def main(arguments: Sequence[str]) -> int:
    """Entry point; see the module's docstring. Failures are left beside JOB.json, for the parent to
    raise."""
    from minivllm.platform.processes.children import die_with

    job = Path(arguments[0])
    die_with(int(arguments[1]))
    content = json.loads(job.read_text())
    try:
        compute(content["config"], Path(content["folder"]))
    except Exception as error:
        status = classify(error)
        if status != "invalid":
            traceback.print_exc()
        message = str(error) or type(error).__name__
        (job.parent / ERROR).write_text(json.dumps({"status": status, "message": message}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
