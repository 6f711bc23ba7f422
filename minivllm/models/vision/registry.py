"""The image processor and the tower of each architecture. Imports no torch until a tower is
requested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.models.registry import VISION, sees
from minivllm.models.vision.processor import ImageProcessor
from minivllm.platform.untrusted import MIB, named, read_object

if TYPE_CHECKING:
    from minivllm.models.vision.tower import VisionTower

NO_CHANGES: Mapping[str, Any] = {}
_MOST = 4 * MIB  # of preprocessor_config.json


@dataclass
class LoadedVision:
    """What a loaded model sees with."""

    tower: VisionTower
    config: Mapping[str, Any]  # config.json
    folder: Path | None  # of the checkpoint
    processor: ImageProcessor  # as the checkpoint describes it, or with changes


def stored_name(name: str, architecture: str) -> str:
    """What checkpoints of an architecture call the tensor that has this name in the model; see
    models/load/names.py."""
    if not sees(architecture):
        return name
    if name.startswith("vision."):
        return f"model.{name.removeprefix('vision.')}"
    inner = name.removeprefix("model.")
    return f"model.{VISION[architecture].text}.{inner}" if inner != name else name


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{__package__}.{module}"), name)


def image_processor(
    config: Mapping[str, Any], folder: Path | None, changes: Mapping[str, Any] = NO_CHANGES
) -> ImageProcessor:
    """The image processor of a model.

    Args:
        config: its config.json.
        folder: that may hold preprocessor_config.json, or processor_config.json as transformers 5
            writes it; what neither says is as the family has it.
        changes: settings that the user sets over those.

    Raises:
        BadInput: a file or a setting is wrong.
    """
    cls: type[ImageProcessor] = _class(VISION[config["architectures"][0]].processor)
    cls.check_names(list(changes))
    return cls(config, {**_settings(folder), **changes})


def _settings(folder: Path | None) -> dict[str, Any]:
    """What a checkpoint's folder says of its image processor."""
    if folder is None or not folder.is_dir():
        return {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if named(file := folder / name):
            settings = read_object(file, str(file), "save the processor again", limit=_MOST)
            inner = settings.get("image_processor")
            return dict(inner) if isinstance(inner, Mapping) else settings
    return {}


def vision_tower(config: Mapping[str, Any]) -> VisionTower | None:
    """The tower of a model, without weights; None where it takes no images."""
    architecture = config["architectures"][0]
    if not sees(architecture):
        return None
    tower: VisionTower = _class(VISION[architecture].tower)(config)
    return tower
