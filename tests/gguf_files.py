"""GGUF files, as the `gguf` package writes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from minivllm.models.load.gguf.formats import BY_NAME
from minivllm.quant.iq4_nl import LEVELS
from tests.scripts.load import load_script

LLAMA = {
    "llama.context_length": 64,
    "llama.embedding_length": 256,
    "llama.block_count": 1,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {
    "token_embd.weight": (96, 256),
    "output_norm.weight": (256,),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.ffn_norm.weight": (256,),
    "blk.0.attn_q.weight": (256, 256),
    "blk.0.attn_k.weight": (128, 256),
    "blk.0.attn_v.weight": (128, 256),
    "blk.0.attn_output.weight": (256, 256),
    "blk.0.ffn_gate.weight": (512, 256),
    "blk.0.ffn_up.weight": (512, 256),
    "blk.0.ffn_down.weight": (256, 512),
}
Stored = tuple[NDArray[Any], str]  # a tensor's bytes or floats, and its format


@cache
def script() -> ModuleType:
    """scripts/save_gguf.py."""
    return load_script("save_gguf")


def blocks(shape: tuple[int, ...], form: str, seed: int = 0) -> NDArray[np.uint8]:
    """Random blocks of a format, uint8 [..., bytes of a row], whose values are all finite: the
    largest exponent of a float is never there."""
    size = shape[-1] // BY_NAME[form].values * BY_NAME[form].bytes
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], size), np.uint8)
    raw[raw & 0x78 == 0x78] ^= 0x40  # of float16 and bfloat16, in the byte that has the sign
    return raw


def tensors(forms: dict[str, str] | None = None, form: str = "Q8_0") -> dict[str, Stored]:
    """Tensors of the model of LLAMA: matrices of random blocks, norms of ones."""
    found: dict[str, Stored] = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        own = (forms or {}).get(name, form)
        found[name] = (
            (np.ones(shape, np.float32), "F32")
            if len(shape) == 1
            else (blocks(shape, own, number), own)
        )
    return found


def quantized(values: NDArray[np.float32], form: str) -> NDArray[np.uint8]:
    """The blocks of values in a format, uint8 [rows, bytes of a row]."""
    if form != "IQ4_NL":
        return gguf.quantize(values, gguf.GGMLQuantizationType[form])
    groups = values.reshape(*values.shape[:-1], -1, 32)
    scales = (np.abs(groups).max(-1, keepdims=True) / 113).astype(np.float16)
    codes = np.abs(groups[..., None] / scales[..., None] - np.array(LEVELS)).argmin(-1)
    pairs = (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8)
    return np.concatenate((scales.view(np.uint8), pairs), -1).reshape(*values.shape[:-1], -1)


def write(
    path: Path,
    values: dict[str, Any],
    stored: dict[str, Stored],
    family: str = "llama",
    in_each: int = 0,
) -> Path:
    """Write a file. A list among `values` becomes an array. With `in_each` it is the first of
    several files with so many tensors each."""
    writer = gguf.GGUFWriter(path, family, split_max_tensors=in_each)
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in values.items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for name, (data, form) in stored.items():
        kind = None if form == "F32" else gguf.GGMLQuantizationType[form]
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (
        path.with_name(f"{path.stem}-00001-of-{len(writer.tensors):05d}.gguf") if in_each else path
    )
