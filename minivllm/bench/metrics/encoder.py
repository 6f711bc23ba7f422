"""What the images of a window did, from the engine's counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.bench.records.feature_figures import EncoderFigures


def encoder_figures(liveness: Mapping[str, Mapping[str, Any]]) -> EncoderFigures | None:
    """The record's `encoder`, from the counters of `vision`; None where prompts had no images."""
    counts = liveness.get("vision") or {}
    hits, encoded = (int(counts.get(k, 0)) for k in ("encoder_cache_hits", "images_encoded"))
    if not counts.get("image_tokens"):
        return None
    return EncoderFigures(
        images_encoded=encoded,
        encoder_cache_hits=hits,
        hit_rate=hits / (hits + encoded) if hits + encoded else None,
        image_tokens=int(counts["image_tokens"]),
        encoder_ms=float(counts["encoder_ms"]),
        encoder_flops=float(counts["encoder_flops"]),
    )
