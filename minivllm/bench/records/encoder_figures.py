"""The part of a record about images."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EncoderFigures:
    """The images of a window, and what their towers did; definitions in docs/vision.md."""

    images_encoded: int = 0
    encoder_cache_hits: int = 0  # images of prompts whose embeddings were there
    hit_rate: float | None = None  # share of these among the images of prompts
    image_tokens: int = 0  # embeddings that prompts took
    encoder_ms: float = 0.0  # of all towers
    encoder_flops: float = 0.0
