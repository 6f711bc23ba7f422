"""A model's architecture, read from its config.json. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import BadInput

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, Su et al. 2021)."""

    theta: float = 10000.0
    kind: str = "default"  # "default" | "llama3"
    scaling: Mapping[str, float] = field(default_factory=dict)  # what `kind` needs beside theta


@dataclass(frozen=True)
class ModelConfig:
    """What the model code needs to know of a checkpoint."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # the checkpoint's own; the compute dtype is the quantisation's choice

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a config.json dict in the old or the transformers 5 spelling.

        Args:
            config: the parsed file.
            where: what to call it in messages.

        Raises:
            BadInput: a key is missing, or a value asks for something that is not built.
        """
        missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
        if missing:
            raise BadInput(
                f"{where} lacks {', '.join(missing)}: is it a causal language model's config.json?"
            )
        _check_supported(config, where)
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise BadInput(
                f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        if head_dim % 2:
            raise BadInput(f"{where}: head_dim={head_dim} is odd; rotary embeddings need an even one")
        eos = config.get("eos_token_id")
        return cls(
            architecture=_architecture(config, where),
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config, where),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
            dtype=config.get("dtype") or config.get("torch_dtype"),
        )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    architectures = config.get("architectures")
    if not architectures:
        raise BadInput(f"{where} names no architectures: add e.g. architectures: [LlamaForCausalLM]")
    return str(architectures[0])


def _check_supported(config: Mapping[str, Any], where: str) -> None:
    """Refuse what would otherwise be computed wrongly without a word."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise BadInput(f"{where}: hidden_act={activation} is not supported, only silu")
    windowed = config.get("use_sliding_window", False) or any(
        kind != "full_attention" for kind in config.get("layer_types") or ()
    )
    if windowed:
        raise BadInput(f"{where}: sliding-window attention is not supported; use a model with full attention")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise BadInput(
            f"{where}: the checkpoint is already quantised ({method}); "
            "use the 16-bit checkpoint and choose a method with quant="
        )


def _rope(config: Mapping[str, Any], where: str) -> RopeConfig:
    """Old spelling: rope_theta beside rope_scaling {type or rope_type}; new: one rope_parameters."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    legacy = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or legacy or "default"
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise BadInput(f"{where}: partial_rotary_factor={partial} is not supported, only 1.0")
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise BadInput(f"{where}: rope type {kind!r} is not supported, only default and llama3")
    parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    missing = [key for key in _LLAMA3_KEYS if not isinstance(parameters.get(key), (int, float))]
    if missing:
        raise BadInput(f"{where}: rope type llama3 lacks {', '.join(missing)}")
    return RopeConfig(theta, kind, {key: float(parameters[key]) for key in _LLAMA3_KEYS})
