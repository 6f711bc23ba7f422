"""Sources of a model: a folder, a GGUF file, the hub's cache, the hub, or a random generator. Free
of torch.

What reads GGUF is imported for a file alone, as what loads from the hub is for a hub id."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput, NotInstalled
from minivllm.models.config import ModelConfig, read_architecture, read_eos
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.generation import read_generation, with_ends
from minivllm.models.registry import check_architecture
from minivllm.models.rope_config import with_scaling
from minivllm.platform.untrusted import MIB, named, place, read_object

EMBEDDED = Path(__file__).parents[2] / "assets" / "tiny"
_MAX_CONFIG = 4 * MIB  # the longest published config.json has 30 KiB
HUB_TIMEOUT_S = 4.0  # for the hub's first answer, which is the whole wait without a network
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_RANDOM = "weights are random: speed and memory are the real model's, its text is noise"


@dataclass(frozen=True)
class Source:
    """A model that can be built."""

    folder: Path | None  # of the weights, or at least of the tokenizer; or a GGUF file with both
    weights: str  # "checkpoint" | "random"
    config: dict[str, Any]  # config.json, with all end tokens, see generation.py
    fingerprint: str  # of the checkpoint; for random weights of architecture and seed
    warnings: list[str]

    @property
    def weights_from(self) -> Path | None:
        """The folder or file that weights are read from; None for random ones."""
        return self.folder if self.weights == "checkpoint" else None

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are those of a GGUF file."""
        return self.folder is not None and self.folder.is_file()

    def reject_gguf(self, peer: str) -> None:
        """Raise BadInput if the model is a GGUF file, which an engine does not take."""
        if self.is_gguf:
            assert self.folder is not None
            raise BadInput(
                f"{peer} takes a folder of .safetensors files, not the GGUF file "
                f"{self.folder.name}: task=convert makes one of it"
            )


def resolve(node: dict[str, Any], allow_random: bool) -> tuple[dict[str, Any], Source]:
    """Find the weights of a model option, and check everything except the weights' values.

    Args:
        node: the resolved `model` group: path, weights, architecture, seed.
        allow_random: whether `weights: auto` may end in random weights (benchmarks only).

    Returns:
        The node, with `weights` settled to "random" where that is what they are, so that resolving
        again asks no hub; and the source.

    Raises:
        BadInput: nothing there, or not usable; one line that names the file and what to do.
    """
    weights = str(node.get("weights") or "auto")
    path = str(node.get("path") or "")
    if weights == "random":
        return _random(node, [_RANDOM])
    if weights not in ("auto", "hub"):
        return _checkpoint(node, _existing(weights, "model.weights"))
    if weights == "hub" and node.get("package"):
        raise BadInput(
            f"model.weights=hub and model.package={node['package']} are two places: set one of "
            "them to null"
        )
    if not path:
        raise BadInput("model.path is empty: give a folder or a hub id such as Qwen/Qwen3-0.6B")
    if weights == "auto" and (folder := local_place(node)):
        return _checkpoint(node, folder)
    folder, reason = _from_hub(path)
    if folder is not None:
        return _checkpoint(node, folder)
    if weights == "auto" and allow_random and node.get("architecture"):
        return _random(node, [f"{reason}; {_RANDOM}"])
    or_random = ", or model.weights=random for speed alone" if node.get("architecture") else ""
    raise BadInput(f"{reason}: give model.path=FOLDER with a checkpoint{or_random}")


def local_place(node: Mapping[str, Any]) -> Path | None:
    """The folder or the GGUF file that a model option means, or None if it can only be a hub id.

    Raises:
        BadInput: it is not there, or the package that brings it is not installed.
    """
    path = str(node.get("path") or "")
    if package := node.get("package"):
        from minivllm.models.load.packages import packaged_file

        return packaged_file(str(package), path)
    if path == "embedded":
        if not (EMBEDDED / "config.json").exists():
            raise BadInput(f"the embedded model is missing from {EMBEDDED}: install minivllm again")
        return EMBEDDED
    at_hand = os.path.exists(os.path.expanduser(path)) or path.endswith(".gguf")
    if at_hand or not _HUB_ID.fullmatch(path):
        return _existing(path, "model.path")
    return None


def _existing(path: str, knob: str) -> Path:
    folder = place(path, f"{knob}={path}")
    if not folder.exists():
        names = "auto, hub, random, " if knob == "model.weights" else ""
        raise BadInput(
            f"{knob}={folder} does not exist: give {names}a folder with config.json and "
            ".safetensors files, or a GGUF file"
        )
    if not folder.is_dir():
        from minivllm.models.load.gguf.file import is_gguf

        if not is_gguf(folder):
            raise BadInput(
                f"{knob}={folder} is neither a folder nor a GGUF file: give the folder that holds "
                "config.json"
            )
    # A file's name says where the further parts of a split model are, and that of a link's end may
    # be none, as in the hub's cache.
    return folder.resolve() if folder.is_dir() else folder.absolute()


def _config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, or what stands for it in a GGUF file."""
    if folder.is_file():
        from minivllm.models.load.gguf.config import config_of

        return config_of(folder)
    file = folder / "config.json"
    if not named(file) and (files := sorted(folder.glob("*.gguf"))):
        raise BadInput(f"{folder} has no config.json, but GGUF files: give model.path={files[0]}")
    config = read_object(
        file, str(file), "give a folder saved by save_pretrained", limit=_MAX_CONFIG
    )
    generation = read_generation(folder)
    if read_eos(generation):
        config["eos_token_id"] = generation["eos_token_id"]
    return config


def open_checkpoint(place: Path) -> Checkpoint:
    """The checkpoint that a folder or a GGUF file is; see `Checkpoint.open` of each."""
    if not place.is_file():
        return Checkpoint.open(place)
    from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint.open(place)


def _where(folder: Path) -> str:
    """The file that has the config, as messages name it."""
    return str(folder if folder.is_file() else folder / "config.json")


def _checked(config: dict[str, Any], where: str, node: dict[str, Any]) -> dict[str, Any]:
    """The config with `model.rope_scaling`, after a check that its architecture and all values are
    supported."""
    architecture = read_architecture(config, where)
    check_architecture(architecture, where)
    ModelConfig.from_dict(config, where)
    if config.get("architectures") != [architecture]:
        config = {**config, "architectures": [architecture]}
    if not (scaling := node.get("rope_scaling")):
        return config
    scaled = with_scaling(config, scaling)
    read = ModelConfig.from_dict(scaled, f"model.rope_scaling over {where}")
    del scaled["rope_scaling"]
    if isinstance(text := scaled.get("text_config"), dict):  # whose scaling would take precedence
        scaled["text_config"] = {key: value for key, value in text.items() if key != "rope_scaling"}
    parts = {"full_attention": read.rope, "sliding_attention": read.local_rope}
    both = {kind: rope.parameters for kind, rope in parts.items() if rope is not None}
    return {**scaled, "rope_parameters": both if len(both) > 1 else read.rope.parameters}


def _checkpoint(node: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Source]:
    config = _checked(_config(folder), _where(folder), node)
    checkpoint = open_checkpoint(folder)
    config, lost = with_ends(config, folder)
    warnings = [*checkpoint.warnings, *lost]
    return node, Source(folder, "checkpoint", config, checkpoint.fingerprint(), warnings)


def _random(node: dict[str, Any], warnings: list[str]) -> tuple[dict[str, Any], Source]:
    """Random weights in the option's architecture, or in that of a local folder."""
    path, architecture = str(node.get("path") or ""), node.get("architecture")
    folder = _place_of_tokenizer(node, path)
    if architecture:
        config = _checked(dict(architecture), "model.architecture", node)
    elif folder is not None:
        config = _checked(_config(folder), _where(folder), node)
    else:
        raise BadInput(
            f"model.weights=random needs model.architecture, or config.json in model.path={path}"
        )
    identity = json.dumps([config, node.get("seed") or 0], sort_keys=True)
    fingerprint = "random-" + hashlib.sha256(identity.encode()).hexdigest()
    # The fingerprint does not cover the tokenizer.
    config, lost = with_ends(config, folder)
    return node | {"weights": "random"}, Source(
        folder, "random", config, fingerprint, warnings + lost
    )


def _place_of_tokenizer(node: Mapping[str, Any], path: str) -> Path | None:
    """Where the tokenizer and the configuration beside random weights are read from, if the model
    is on this machine."""
    if node.get("package"):
        with contextlib.suppress(NotInstalled):
            return local_place(node)
        return None
    at_hand = path == "embedded" or not _HUB_ID.fullmatch(path) or os.path.exists(path)
    folder = local_place(node) if at_hand else None
    return _cached(path) if folder is None and path else folder


def _cached(path: str) -> Path | None:
    """The snapshot in the hub's cache, if it has a config. Uses no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _from_hub(path: str) -> tuple[Path | None, str]:
    """A snapshot from the cache or else the hub; or None and the reason.

    Raises:
        BadInput: the cache has some of the weights, but not all, and the hub does not give the
            rest.
    """
    if not _HUB_ID.fullmatch(path):
        return None, f"model.path={path} is no hub id"
    cached, broken = _cached(path), None
    if cached is not None and any(cached.glob("*.safetensors*")):
        try:
            Checkpoint.open(cached)
            return cached, ""
        except BadInput as problem:  # perhaps an incomplete download, which the hub completes
            broken = problem
    where = f"model.path={path} is no local folder, is not in the hub's cache"
    folder, reason = None, f"{where}, and HF_HUB_OFFLINE is set"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "TRUE", "YES", "ON"):
        folder, error = _download(path)
        reason = f"{where}, and the hub did not give it ({_line(error)})" if error else ""
    if folder is None and broken is not None:
        raise broken
    return folder, reason


def _download(path: str) -> tuple[Path | None, Exception | None]:
    """A complete snapshot, or the reason why there is none."""
    from huggingface_hub import HfApi, snapshot_download

    def check() -> None:
        files = [
            entry.rfilename
            for entry in HfApi().model_info(path, timeout=HUB_TIMEOUT_S).siblings or ()
        ]
        if files and not any(file.endswith(".safetensors") for file in files):
            raise ValueError(
                "it has no .safetensors file there; pickled weights are not loaded, but "
                "task=convert converts them"
            )

    # Looking up a host's name has no timeout, so the first request is made in a thread.
    if error := _ask(check, HUB_TIMEOUT_S + 1):
        return None, error
    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_FILES)), None
    except Exception as failure:  # network, disk or permission
        return None, failure


def _ask(question: Callable[[], object], timeout_s: float) -> Exception | None:
    """The error of a request to the hub, or None."""
    outcome: list[Exception | None] = []

    def run() -> None:
        try:
            question()
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0] if outcome else TimeoutError(f"no answer within {timeout_s:.0f} s")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
