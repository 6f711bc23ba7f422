"""What a process that answers clients reads of the served model."""

from __future__ import annotations

from typing import Any, NamedTuple

from minivllm.config.groups import Config
from minivllm.extras.vision.pictures import Pictures, fitting_processor
from minivllm.models.load.source import Source, resolve
from minivllm.models.load.tokenizer import Tokenizer


class ModelFiles(NamedTuple):
    """Where the model's files are, its tokenizer, and what puts images into its prompts; None: it
    takes none, or has no tokenizer."""

    source: Source
    tokenizer: Tokenizer | None
    pictures: Pictures | None


def read_model_files(config: dict[str, Any]) -> ModelFiles:
    """Read them.

    Args:
        config: the resolved configuration.

    Raises:
        BadInput: a file is missing or wrong.
    """
    source = resolve(config["model"], allow_random=False)[1]
    tokenizer = Tokenizer.load(source.folder)
    vision = Config.of(config).vision
    processor = fitting_processor(vision, source)
    pictures = None if processor is None else Pictures(processor, tokenizer, vision)
    return ModelFiles(source, tokenizer, pictures)
