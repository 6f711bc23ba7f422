"""One kernel that writes new keys and values into the cache: norm of queries and keys, rotation,
compression and the write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.attention.kernels.storage import FORMATS, scale_of, shorten
from minivllm.cache.kv import KVCache
from minivllm.kernels.common import narrow

NORMS = {"none": 0, "plain": 1, "gemma": 2}
_GEMMA = tl.constexpr(NORMS["gemma"])


@triton.jit
def _normed(x, weight, eps, NORM: tl.constexpr, dtype: tl.constexpr, mean_square):
    """Norm of a head: one rounding after the norm and one after the weight, as RMSNorm and
    GemmaNorm of models/ round."""
    x = narrow(x * tl.rsqrt(mean_square + eps), dtype).to(tl.float32)
    if NORM == _GEMMA:
        return narrow(x + x * weight, dtype).to(tl.float32)
    else:
        return narrow(x * weight, dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write(
    qk,  # [T, HEADS + KV_HEADS, HEAD_DIM]
    v,  # [T, KV_HEADS, HEAD_DIM]
    weight,  # [HEADS + KV_HEADS, HEAD_DIM]
    cos,  # [T, ROTARY_DIM]
    sin,
    qk_out,  # [T, HEADS (+ KV_HEADS if not CACHED), HEAD_DIM]
    slots,  # int64 [T]
    keys,
    values,
    key_scales,
    value_scales,
    qk_stride,
    v_stride,
    cos_stride,
    out_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    CACHED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """A program computes one head of one token: queries first, then keys, then values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DIM)[None, :]
    inside = d < HEAD_DIM
    dtype: tl.constexpr = qk.dtype.element_ty
    is_value = head >= HEADS + KV_HEADS
    if is_value:
        x = tl.load(
            v + token * v_stride + (head - HEADS - KV_HEADS) * HEAD_DIM + d, mask=inside, other=0.0
        ).to(tl.float32)
    else:
        row = qk + token * qk_stride + head * HEAD_DIM
        x = tl.load(row + d, mask=inside, other=0.0).to(tl.float32)
        mean_square = tl.sum(x * x, 1)[:, None] / HEAD_DIM
        if NORM:
            factor = tl.load(weight + head * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
            x = _normed(x, factor, eps, NORM, dtype, mean_square)
        if ROTARY_DIM:
            turned = d < ROTARY_DIM
            partner = (d + ROTARY_DIM // 2) % ROTARY_DIM
            other = tl.load(row + partner, mask=turned, other=0.0).to(tl.float32)
            if NORM:
                factor = tl.load(weight + head * HEAD_DIM + partner, mask=turned, other=0.0).to(
                    tl.float32
                )
                other = _normed(other, factor, eps, NORM, dtype, mean_square)
            c = tl.load(cos + token * cos_stride + d, mask=turned, other=1.0).to(tl.float32)
            s = tl.load(sin + token * cos_stride + d, mask=turned, other=0.0).to(tl.float32)
            x = narrow(x * c, dtype).to(tl.float32) + other * s
    if CACHED and head >= HEADS:
        slot = tl.load(slots + token)
        if is_value:
            at = slot * KV_HEADS + head - HEADS - KV_HEADS
            target, scales = values, value_scales
        else:
            at = slot * KV_HEADS + head - HEADS
            target, scales = keys, key_scales
        if FORMAT:
            x = narrow(x, dtype).to(tl.float32)
            scale = scale_of(x, FORMAT)
            tl.store(scales + at + tl.arange(0, 1), scale)
            tl.store(
                target + at * HEAD_DIM + d,
                shorten(tl.div_rn(x, scale[:, None] + 0.0 * x), FORMAT),
                mask=inside,
            )
        else:
            tl.store(target + at * HEAD_DIM + d, narrow(x, dtype), mask=inside)
    else:
        tl.store(qk_out + token * out_stride + head * HEAD_DIM + d, narrow(x, dtype), mask=inside)


def write(kv: KVCache, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """KVCache.write as one kernel. slots: int64 [T]; k, v: [T, num_kv_heads, head_dim], rotated."""
    _launch(k, v, 0, None, None, None, None, slots, kv.parts[layer], FORMATS[kv.kv_dtype])


def rotate_and_write(
    qk: Tensor,
    v: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    norm: tuple[Tensor, float, str] | None,
    kv: KVCache,
    layer: int,
    slots: Tensor,
) -> Tensor:
    """Normalise and rotate queries and keys, and write keys and values into the cache.

    Args:
        qk: [T, num_heads + num_kv_heads, head_dim]; v: [T, num_kv_heads, head_dim]; both as
            projected.
        num_heads: number of query heads.
        cos, sin: [T, 1, rotated dimensions], as Rotary gives them.
        norm: weight [num_heads + num_kv_heads, head_dim], epsilon and "plain" or "gemma"; None: no
            norm.
        kv: the cache; layer: its index; slots: int64 [T].

    Returns:
        The queries [T, num_heads, head_dim].
    """
    out = torch.empty(qk.shape[0], num_heads, qk.shape[2], dtype=qk.dtype, device=qk.device)
    _launch(qk, v, num_heads, out, cos, sin, norm, slots, kv.parts[layer], FORMATS[kv.kv_dtype])
    return out


def rotate(qk: Tensor, cos: Tensor, sin: Tensor, norm: tuple[Tensor, float, str] | None) -> Tensor:
    """Normalise and rotate queries and keys alone: [T, heads, head_dim] to the same."""
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    _launch(qk, None, qk.shape[1], out, cos, sin, norm, None, (), 0)
    return out


def _launch(
    qk: Tensor,
    v: Tensor | None,
    num_heads: int,
    out: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    norm: tuple[Tensor, float, str] | None,
    slots: Tensor | None,
    parts: tuple[Tensor, ...],
    storage: int,
) -> None:
    """Launch the kernel. For a tensor that is None some other pointer is passed, which the kernel
    does not read."""
    tokens, heads, dim = qk.shape
    qk = qk if qk.stride()[1:] == (dim, 1) else qk.contiguous()
    if v is not None and v.stride()[1:] != (dim, 1):
        v = v.contiguous()
    weight, eps, kind = norm or (qk, 0.0, "none")
    keys, values, *scales = parts or (qk, qk)
    key_scales, value_scales = scales or (qk, qk)
    cached = slots is not None
    kv_heads = heads - num_heads
    _write[(tokens, heads + kv_heads)](
        qk,
        qk if v is None else v,
        weight,
        qk if cos is None else cos,
        qk if sin is None else sin,
        qk if out is None else out,
        qk if slots is None else slots,
        keys,
        values,
        key_scales,
        value_scales,
        qk.stride(0),
        0 if v is None else v.stride(0),
        0 if cos is None else cos.stride(0),
        0 if out is None else out.stride(0),
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        ROTARY_DIM=0 if cos is None else cos.shape[-1],
        DIM=triton.next_power_of_2(dim),
        NORM=NORMS[kind],
        CACHED=cached,
        FORMAT=storage,
        num_warps=1 if dim <= 128 else 2,
    )
