"""Rotary position embedding as config.json describes it, in every spelling. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import BadInput

_ORIGINAL = "original_max_position_embeddings"
# kind -> numbers it must have beside theta
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "longrope": ("factor", _ORIGINAL),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}
_LISTS = ("short_factor", "long_factor")  # longrope's, one number for each pair of dimensions


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, Su et al. 2021) and its scaling to longer contexts."""

    theta: float = 10000.0
    kind: str = "default"  # "default" | "linear" | "dynamic" | "yarn" | "llama3" | "longrope"
    scaling: Mapping[str, Any] = field(default_factory=dict)  # what `kind` needs beside theta
    partial_rotary_factor: float = 1.0  # share of a head's dimensions that are rotated

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's first dimensions are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation depends on the length of its sequence, and not on its position alone."""
        return self.kind in ("dynamic", "longrope")


def read_rope(
    config: Mapping[str, Any], head_dim: int, where: str
) -> tuple[RopeConfig, RopeConfig | None, int]:
    """Read old spellings (rope_theta beside rope_scaling) and new ones (rope_parameters).

    Args:
        config: config.json, with the family's defaults.
        head_dim: width of a head.
        where: what to call the file in messages.

    Returns:
        The rope of all layers, or of those with full attention; that of windowed layers, where they have one of
        their own (Gemma 3), else None; and the longest sequence that the model is made for.

    Raises:
        BadInput: an unknown kind, or a value that the kind needs is missing.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or 10000.0
    local_theta = config.get("rope_local_base_freq")
    limit = int(config.get("max_position_embeddings") or 2048)
    if "full_attention" in parameters or "sliding_attention" in parameters:  # one dictionary for each kind
        full, local = (
            _read(parameters.get(kind) or {}, default, config, limit, where)
            for kind, default in (("full_attention", theta), ("sliding_attention", local_theta or theta))
        )
    else:
        full, local = _read(parameters, theta, config, limit, where), None
        if local_theta:
            local = RopeConfig(float(local_theta), partial_rotary_factor=full.partial_rotary_factor)
    for rope in (full, local):
        if rope is not None:
            _check_dimensions(rope, head_dim, where)
    # A file's limit is often that before scaling. Where layers differ (Gemma 3) it is that after it.
    if local is None and full.kind in ("linear", "dynamic", "yarn"):
        limit = max(limit, int(full.scaling["factor"] * full.scaling.get(_ORIGINAL, limit)))
    return full, local, limit


def _read(
    given: Mapping[str, Any], theta: float, config: Mapping[str, Any], limit: int, where: str
) -> RopeConfig:
    parameters = dict(given)
    theta = float(parameters.get("rope_theta") or theta)
    partial = float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if config["architectures"][0] == "Phi3ForCausalLM" and kind in ("su", "yarn"):
        kind = "longrope"  # its name in Phi-3's first configs
    if kind not in _REQUIRED:
        raise BadInput(f"{where}: rope type {kind!r} is not supported, only {', '.join(_REQUIRED)}")
    if kind == "dynamic":
        parameters[_ORIGINAL] = limit
    elif kind in ("yarn", "llama3", "longrope"):
        parameters[_ORIGINAL] = config.get(_ORIGINAL) or parameters.get(_ORIGINAL) or limit
    if kind in ("yarn", "longrope") and parameters.get("factor") is None:
        parameters["factor"] = limit / parameters[_ORIGINAL]
    missing = [key for key in _REQUIRED[kind] if not isinstance(parameters.get(key), (int, float))]
    missing += [key for key in _LISTS if kind == "longrope" and not isinstance(parameters.get(key), list)]
    if missing:
        raise BadInput(f"{where}: rope type {kind} lacks {', '.join(missing)}")
    scaling: dict[str, Any] = {key: float(parameters[key]) for key in _REQUIRED[kind]}
    scaling |= {k: float(parameters[k]) for k in _OPTIONAL.get(kind, ()) if parameters.get(k) is not None}
    if kind == "longrope":
        scaling |= {key: tuple(float(x) for x in parameters[key]) for key in _LISTS}
    return RopeConfig(theta, kind, scaling, partial)


def _check_dimensions(rope: RopeConfig, head_dim: int, where: str) -> None:
    dim = rope.rotary_dim(head_dim)
    if dim % 2 or not 0 < dim <= head_dim:
        raise BadInput(
            f"{where}: head_dim={head_dim} with partial_rotary_factor={rope.partial_rotary_factor} rotates "
            f"{dim} dimensions of a head; rotary embeddings need an even number, and no more than there are"
        )
    for key in _LISTS:
        if len(rope.scaling.get(key, ())) not in (0, dim // 2):
            raise BadInput(f"{where}: {key} of rope type longrope must have {dim // 2} numbers")
