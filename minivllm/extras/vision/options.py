"""The knobs of `vision`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from minivllm.platform.options import Options, default_of, knob, option


@option("vision")
@dataclass(frozen=True)
class VisionOptions(Options):
    """Images, for models that take them."""

    group = "vision"
    processor: dict[str, Any] | None = knob(None, unasked=True)
    """Settings over those of the checkpoint's preprocessor_config.json, such as {size:
    {longest_edge: 512}}."""
    encoder_cache_tokens: int = knob(16384, at_least=0, unasked=True)
    """Embeddings kept for images that come again; 0: none longer than a prompt needs them."""
    processor_cache_mb: float = knob(256.0, at_least=0, at_most=1 << 20, unasked=True)
    """MiB of processed images that are kept for those that come again."""
    max_encoder_tokens: int | None = knob(None, at_least=1, unasked=True)
    """Embeddings that vision towers compute in a step, but for its first image; null:
    batching.max_num_batched_tokens."""
    max_images: int = knob(16, at_least=1, unasked=True)
    """Most images of one prompt."""
    max_image_mb: float = knob(32.0, above=0, at_most=4096, unasked=True)
    """MiB of a picture's file."""
    max_megapixels: float = knob(50.0, above=0, at_most=10_000, unasked=True)
    """Millions of pixels of a picture, checked before they are decoded."""
    folder: str | None = knob(None, unasked=True)
    """Folder of the pictures that requests to the server may name as file:// paths; null: none."""

    @property
    def is_set(self) -> bool:
        """Whether any knob is away from its default."""
        return self != VisionOptions()


def require_no_vision(options: VisionOptions) -> None:
    """Raise BadInput for a knob that is set for a model that takes no images."""
    for item in fields(options):
        if getattr(options, item.name) != default_of(item):
            raise options.bad(item.name, "is for models that take images, which this one does not")
