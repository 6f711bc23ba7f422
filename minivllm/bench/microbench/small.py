"""The small steps between the products: norms, rotation, the write into the cache, the gated
activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from minivllm.bench.microbench.case import DTYPE, ITEM, MOST_COPIES, Case, Setting, Side
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, CacheLayout
from minivllm.models.cpu_layers import use_kernels
from minivllm.models.layers import MLP, HeadNorm, RMSNorm
from minivllm.models.rope import rotate

EPS = 1e-6
_SLOTS = 4096  # of the cache that keys and values are written to
Call = Callable[[int], Tensor]


def cases(setting: Setting) -> Iterator[Case]:
    """Each step for each number of rows."""
    for rows in setting.rows:
        yield _norm(setting, rows)
        if setting.model.head_dim % 32 == 0 or setting.triton:
            yield _norm_and_rotation(setting, rows)
        if setting.model.activation == "silu":
            yield _gated(setting, rows)
        if setting.triton:
            yield _write(setting, rows)


def _case(
    setting: Setting, kernel: str, width: str, rows: int, moved: float, sides: tuple[Call, Call]
) -> Case:
    return Case(
        kernel,
        width,
        rows,
        Side("Triton" if setting.triton else "C++", sides[0]),
        Side("torch", sides[1]),
        bytes=ITEM * moved,
        operations=0.0,
        copies=setting.copies(ITEM * moved),
    )


def _norm(setting: Setting, rows: int) -> Case:
    """The C++ kernel is the norm alone; Triton's takes the sum before it along."""
    size = setting.model.hidden_size
    numbers = (4 if setting.triton else 2) * rows * size
    copies = setting.copies(ITEM * numbers)
    x, delta = setting.random(copies, rows, size), setting.random(copies, rows, size)

    def layer() -> RMSNorm:
        norm = RMSNorm(size, EPS)
        norm.weight.data = setting.random(size)
        return norm

    plain = layer()
    if setting.triton:
        from minivllm.passes import fused_kernels

        def fused(i: int) -> Tensor:
            return fused_kernels.add_norm(
                x[i % copies], delta[i % copies], plain.weight, EPS, False
            )[1]

        def added(i: int) -> Tensor:
            out: Tensor = plain(x[i % copies] + delta[i % copies])
            return out

        return _case(setting, "sum + RMSNorm", str(size), rows, numbers, (fused, added))
    own = layer()
    use_kernels(own, setting.kernels)
    own.weight = plain.weight
    sides = (lambda i: own(x[i % copies]), lambda i: plain(x[i % copies]))
    return _case(setting, "RMSNorm", str(size), rows, numbers, sides)


def _heads(setting: Setting, rows: int, copies: int) -> tuple[Tensor, HeadNorm, Tensor, Tensor]:
    """Queries and keys [copies, rows, heads, head_dim], their norm, cosines and sines."""
    c = setting.model
    norm = HeadNorm(c.head_dim, {"q_norm": c.num_heads, "k_norm": c.num_kv_heads}, EPS)
    norm.weight.data = setting.random(*norm.weight.shape)
    angles = torch.rand(rows, 1, c.head_dim // 2, device=setting.device) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(DTYPE)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(DTYPE)
    return setting.random(copies, rows, c.num_heads + c.num_kv_heads, c.head_dim), norm, cos, sin


def _norm_and_rotation(setting: Setting, rows: int) -> Case:
    c = setting.model
    numbers = 2 * rows * (c.num_heads + c.num_kv_heads) * c.head_dim
    copies = setting.copies(ITEM * numbers)
    qk, norm, cos, sin = _heads(setting, rows, copies)

    def theirs(i: int) -> Tensor:
        return rotate(norm(qk[i % copies]), cos, sin)

    if setting.triton:
        from minivllm.attention.kernels import write

        def ours(i: int) -> Tensor:
            return write.rotate(qk[i % copies], cos, sin, (norm.weight, EPS, "plain"))

    else:
        kernels = setting.kernels
        assert kernels is not None
        turned, in_place = qk.clone(), kernels.norm_and_rotate_

        def ours(i: int) -> Tensor:
            x = turned[i % copies]
            in_place(x, norm.weight, EPS, cos, sin)
            return x

    part = f"{c.num_heads} + {c.num_kv_heads} heads of {c.head_dim}"
    return _case(setting, "norm + rotary", part, rows, numbers, (ours, theirs))


def _write(setting: Setting, rows: int) -> Case:
    """Norm, rotation and the write of keys and values, which are one kernel."""
    from minivllm.attention.kernels import write

    c = setting.model
    spec = AttentionSpec(c.num_heads, c.num_kv_heads, c.head_dim, c.attention_scale)
    numbers = 2 * rows * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    copies = setting.copies(ITEM * numbers)
    qk, norm, cos, sin = _heads(setting, rows, copies)
    v = setting.random(copies, rows, c.num_kv_heads, c.head_dim)
    layers = min(MOST_COPIES, copies)
    kv = KVCache([spec] * layers, CacheLayout(16, _SLOTS // 16), DTYPE, setting.device)
    slots = torch.randperm(_SLOTS, device=setting.device)[:rows]
    weight = (norm.weight, EPS, "plain")

    def written(i: int, queries: Tensor) -> Tensor:
        """What is checked: the queries, and the keys and values where they should be now."""
        parts = [part.flatten(0, 1)[slots].flatten(1) for part in kv.parts[i % layers]]
        return torch.cat((queries.flatten(1), *parts), 1)

    def ours(i: int) -> Tensor:
        return write.rotate_and_write(
            qk[i % copies], v[i % copies], c.num_heads, cos, sin, weight, kv, i % layers, slots
        )

    def theirs(i: int) -> Tensor:
        q, k = rotate(norm(qk[i % copies]), cos, sin).split((c.num_heads, c.num_kv_heads), 1)
        kv.write(i % layers, slots, k, v[i % copies])
        return q

    part = f"{c.num_heads} + 2 x {c.num_kv_heads} heads of {c.head_dim}"
    case = _case(setting, "norm + rotary + write", part, rows, numbers, (ours, theirs))
    return replace(case, seen=written)


def _gated(setting: Setting, rows: int) -> Case:
    c = setting.model
    inner = c.moe_intermediate_size if c.num_experts else c.intermediate_size
    numbers = 3 * rows * inner
    copies = setting.copies(ITEM * numbers)
    both = setting.random(copies, rows, 2 * inner)
    plain = MLP(c.hidden_size, inner, "silu")
    if setting.triton:
        from minivllm.passes import fused_kernels

        def ours(i: int) -> Tensor:
            return fused_kernels.gated(both[i % copies], "silu")

    else:
        own = MLP(c.hidden_size, inner, "silu")
        use_kernels(own, setting.kernels)

        def ours(i: int) -> Tensor:
            return own.gated(both[i % copies])

    return _case(
        setting,
        "SwiGLU",
        str(inner),
        rows,
        numbers,
        (ours, lambda i: plain.gated(both[i % copies])),
    )
