"""Rotary position embedding as config.json describes it, in every spelling. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.family_defaults import FAMILIES, Family
from minivllm.platform.values import Values

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
MOST_POSITIONS = 1 << 26  # several times the longest published context
_MOST_THETA, _MOST_FACTOR = 1e12, 1e6
_ORIGINAL = "original_max_position_embeddings"
_LISTS = ("short_factor", "long_factor")  # of longrope: one number for each pair of dimensions
_OF_LAYERS = ("full_attention", "sliding_attention")
_SECTIONS = "mrope_section"
_KEYS = (
    *("rope_type", "rope_theta", "partial_rotary_factor", "factor", _ORIGINAL, "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", *_LISTS, _SECTIONS),
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, Su et al. 2021) and its scaling to longer contexts."""

    theta: float = 10000.0
    kind: str = "default"  # "default" | "linear" | "dynamic" | "yarn" | "llama3" | "longrope"
    scaling: Mapping[str, Any] = field(default_factory=dict)  # parameters of `kind` beside theta
    partial_rotary_factor: float = 1.0  # share of a head's dimensions that are rotated
    # Of a model with M-RoPE: how many pairs of dimensions turn by a token's position in time, in
    # height and in width; and whether the three alternate.
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Number of a head's first dimensions that are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def parameters(self) -> dict[str, Any]:
        """As transformers 5 writes it: one value of `rope_parameters`."""
        known = {_ORIGINAL: int, "truncate": bool, "short_factor": list, "long_factor": list}
        scaling = {key: known.get(key, float)(value) for key, value in self.scaling.items()}
        if self.kind == "dynamic":
            del scaling[_ORIGINAL]
        partial = {"partial_rotary_factor": self.partial_rotary_factor}
        return {
            **{"rope_type": self.kind, "rope_theta": self.theta},
            **(partial if self.partial_rotary_factor != 1.0 else {}),
            **({_SECTIONS: list(self.sections)} if self.sections else {}),
            **scaling,
        }

    @property
    def restarts_at(self) -> int | None:
        """The length at which all tokens of a sequence change their rotation."""
        return int(self.scaling[_ORIGINAL]) + 1 if self.kind == "longrope" else None

    def table_bytes(self, positions: int, head_dim: int, itemsize: int) -> int:
        """Bytes of the precomputed cosines and sines of so many positions."""
        return 0 if self.depends_on_length else positions * 2 * self.rotary_dim(head_dim) * itemsize

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation depends on the length of its sequence, and not on its position
        alone."""
        return self.kind in ("dynamic", "longrope")


def read_rope(
    values: Values, architecture: str, head_dim: int
) -> tuple[RopeConfig, RopeConfig | None, int]:
    """Read old spellings (rope_theta beside rope_scaling) and new ones (rope_parameters).

    Where a file has both, as one to which a user added a scaling, `rope_scaling` replaces all of
    `rope_parameters` but theta, the share that is rotated and the sections of M-RoPE.

    Args:
        values: config.json, with the family's defaults.
        architecture: its name.
        head_dim: width of a head.

    Returns:
        The rope of all layers, or of those with full attention; that of windowed layers, where they
        have one of their own (Gemma 3), else None; and the longest sequence that the model is made
        for.

    Raises:
        BadInput: an unknown kind, a value that the kind needs is missing, or one is out of its
            range.
    """
    theta = values.number("rope_theta", 10000.0, above=1.0, high=_MOST_THETA)
    local_theta = values.number("rope_local_base_freq", None, above=1.0, high=_MOST_THETA)
    limit = values.integer("max_position_embeddings", 2048, high=MOST_POSITIONS)
    parameters, local_parameters = _parameters(values)
    full = _read(parameters, theta, values, architecture, limit)
    local = None
    if local_parameters is not None:
        local = _read(local_parameters, local_theta or theta, values, architecture, limit)
    elif local_theta:
        local = RopeConfig(local_theta, partial_rotary_factor=full.partial_rotary_factor)
    for rope in (full, local):
        if rope is not None:
            _check_dimensions(rope, head_dim, values.where)
    # The limit in a file is often that before scaling; in Gemma 3 it is that after scaling.
    if local is None and full.kind in ("linear", "dynamic", "yarn"):
        limit = max(limit, int(full.scaling["factor"] * full.scaling.get(_ORIGINAL, limit)))
        if limit > MOST_POSITIONS:
            parameters.fail(
                "factor", f"makes a context of {limit:,} tokens; there can be {MOST_POSITIONS:,}"
            )
    return full, local, limit


def with_scaling(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose rope is scaled as the user says (`model.rope_scaling`).

    Raises:
        BadInput: it names no kind, or has a key that no kind has.
    """
    if not scaling.get("rope_type"):
        raise BadInput(f"model.rope_scaling lacks rope_type, which is one of {', '.join(KINDS)}")
    if unknown := [str(key) for key in scaling if key not in _KEYS]:
        raise BadInput(
            f"model.rope_scaling has no {unknown[0][:40]}; its keys are {', '.join(_KEYS)}"
        )
    original = {_ORIGINAL: scaling[_ORIGINAL]} if _ORIGINAL in scaling else {}
    return {**config, **original, "rope_scaling": dict(scaling)}


def _parameters(values: Values) -> tuple[Values, Values | None]:
    """Those of full attention, or of all layers; and those of windowed layers, where the file has
    them apart."""
    parameters, scaling = values.section("rope_parameters"), values.section("rope_scaling")
    if not parameters:
        parameters, scaling = scaling, parameters
    local = None
    if any(parameters.has(kind) for kind in _OF_LAYERS):
        parameters, local = (parameters.section(kind) for kind in _OF_LAYERS)
    if scaling:
        parameters = scaling.over(parameters, ("rope_theta", "partial_rotary_factor", _SECTIONS))
    return parameters, local


def _read(given: Values, theta: float, config: Values, architecture: str, limit: int) -> RopeConfig:
    """One rope. `theta` is its default, `limit` the sequence length without scaling."""
    key_of_kind = "rope_type" if given.has("rope_type") else "type"
    kind = given.text(key_of_kind, "default")
    if architecture == "Phi3ForCausalLM" and kind in ("su", "yarn"):
        kind = "longrope"  # its name in Phi-3's first configs
    family = FAMILIES.get(architecture, Family())
    if family.sections and kind == "mrope":
        kind = "default"  # its name in Qwen2-VL's first configs
    if kind not in KINDS:
        given.fail(key_of_kind, f"is not supported: rope types are {', '.join(KINDS)}")
    theta = given.number("rope_theta", theta, above=1.0, high=_MOST_THETA)
    key = "partial_rotary_factor"
    partial = given.number(key, config.number(key, 1.0, high=1.0), high=1.0)
    mrope = _sections(given, family), family.interleaved
    if kind == "default":
        return RopeConfig(theta, kind, {}, partial, *mrope)
    values: dict[str, Any] = {"factor": given.number("factor", None, least=1.0, high=_MOST_FACTOR)}
    if kind == "dynamic":
        values[_ORIGINAL] = float(limit)
    elif kind != "linear":
        original = config.integer(_ORIGINAL, 0, 2, MOST_POSITIONS)
        values[_ORIGINAL] = float(original or given.integer(_ORIGINAL, limit, 2, MOST_POSITIONS))
    if kind in ("yarn", "longrope"):
        values["factor"] = values["factor"] or limit / values[_ORIGINAL]
        values["attention_factor"] = given.number("attention_factor", None, high=1e3)
    if kind == "llama3":
        values |= {
            key: given.number(key, None, high=1e6)
            for key in ("low_freq_factor", "high_freq_factor")
        }
    if kind == "longrope":
        values |= {key: given.numbers(key, high=_MOST_FACTOR) for key in _LISTS}
    optional = {"attention_factor"}
    if missing := [key for key, value in values.items() if value is None and key not in optional]:
        raise BadInput(f"{config.where}: rope type {kind} lacks {', '.join(missing)}")
    if kind == "llama3" and not values["low_freq_factor"] < values["high_freq_factor"]:
        given.fail(
            "low_freq_factor", f"must be below high_freq_factor={values['high_freq_factor']:g}"
        )
    if kind == "yarn":
        values |= _yarn(given)
    scaling = {key: value for key, value in values.items() if value is not None}
    rope = RopeConfig(theta, kind, scaling, partial, *mrope)
    if rope.sections and rope.depends_on_length:
        given.fail(key_of_kind, "does not go with positions in time, height and width")
    return rope


def _sections(given: Values, family: Family) -> tuple[int, ...]:
    """The sections of M-RoPE; none in a family without it."""
    if not family.sections:
        return ()
    sections = given.integers(_SECTIONS)
    if sections is not None and len(sections) != len(family.sections):
        given.fail(_SECTIONS, "must have three numbers: time, height and width")
    return sections or family.sections


def _yarn(given: Values) -> dict[str, float | None]:
    """The parameters that only yarn has; None where the file lacks one."""
    fast, slow = (given.number(key, None, high=1e6) for key in ("beta_fast", "beta_slow"))
    if (fast or 32.0) < (slow or 1.0):
        given.fail("beta_fast", f"must not be below beta_slow={slow or 1.0:g}")
    scales = {
        key: given.number(key, None, least=0.0, high=1e3) for key in ("mscale", "mscale_all_dim")
    }
    truncate = float(given.flag("truncate", True)) if given.has("truncate") else None
    return {"beta_fast": fast, "beta_slow": slow, **scales, "truncate": truncate}


def _check_dimensions(rope: RopeConfig, head_dim: int, where: str) -> None:
    dim = rope.rotary_dim(head_dim)
    if dim % 2 or not 0 < dim <= head_dim:
        raise BadInput(
            f"{where}: head_dim={head_dim} with "
            f"partial_rotary_factor={rope.partial_rotary_factor} rotates {dim} dimensions of a "
            "head; rotary embeddings need an even number, and no more than there are"
        )
    if rope.sections and sum(rope.sections) != dim // 2:
        raise BadInput(
            f"{where}: {_SECTIONS}={list(rope.sections)} must sum to the {dim // 2} pairs of "
            "dimensions that a head rotates"
        )
    if rope.kind == "dynamic" and dim < 4:
        raise BadInput(
            f"{where}: rope type dynamic needs at least 4 rotated dimensions of a head, not {dim}"
        )
    for key in _LISTS:
        if len(rope.scaling.get(key, ())) not in (0, dim // 2):
            raise BadInput(f"{where}: {key} of rope type longrope must have {dim // 2} numbers")
