"""Small random models of the Qwen families that take images, by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

IMAGE, START, END = 120, 121, 122  # tokens
_TEXT = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "video_token_id": 123,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Windows of 2 x 2 blocks of 8 pixels; learned positions of 7 x 7 patches.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}},
        "vision_config": _TOWER | {"window_size": 16, "fullatt_block_indexes": [1, 3]},
    },
    "qwen3_vl": {
        "text_config": _TEXT
        | {"head_dim": 16, "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}},
        "vision_config": _TOWER
        | {"num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
    },
}
SIZE = {"shortest_edge": 256, "longest_edge": 2048}  # pixels: 4 to 32 embeddings
# Width and height of pictures, none a multiple of a block.
SIZES = [(37, 61), (90, 20), (9, 9), (300, 210), (21, 23)]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    generator = np.random.default_rng((seed, width, height))
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def pictures(*sizes: tuple[int, int]) -> list[Image.Image]:
    """A picture of each size."""
    return [picture(*size, seed=index) for index, size in enumerate(sizes)]


def image_processor(**changes: Any) -> Any:
    """transformers' image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**{"patch_size": 4, "size": SIZE, **changes})


def settings() -> dict[str, Any]:
    """The image processor's file."""
    read: dict[str, Any] = json.loads(image_processor().to_json_string())
    return read


def make_checkpoint(folder: Path, family: str, original: bool = True, **changes: Any) -> Any:
    """Save a small model, all weights random, with its image processor.

    Args:
        folder: where to.
        family: one of FAMILIES.
        original: with the names of tensors as the family's authors have them.
        changes: of its config.

    Returns:
        The transformers model, in eval mode, with its plain attention.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(family, **{**FAMILIES[family], **_TOKENS, **changes})
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            is_norm = ("norm" in name or "ln_q" in name) and name.endswith("weight")
            parameter.copy_(
                torch.empty(parameter.shape).normal_(float(is_norm), 0.15, generator=generator)
            )
    model.save_pretrained(folder, save_original_format=original)
    image_processor().save_pretrained(folder)
    return model


def prompt(*parts: int | Sequence[int]) -> list[int]:
    """Token ids with the mark of an image between the parts."""
    ids: list[int] = []
    for index, part in enumerate(parts):
        if index:
            ids += [START, IMAGE, END]
        ids += [part] if isinstance(part, int) else part
    return ids


def model_inputs(token_ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Tensor]:
    """What a transformers model takes, for a prompt with all tokens of its images."""
    inputs = {
        "input_ids": torch.tensor([[*token_ids]]),
        "attention_mask": torch.ones(1, len(token_ids), dtype=torch.int64),
    }
    if not images:
        return inputs
    kinds = torch.tensor([[int(token == IMAGE) for token in token_ids]])
    pixels = image_processor()([*images], return_tensors="pt")
    return {**inputs, **pixels, "mm_token_type_ids": kinds}
