"""A model's architecture, read from its config.json. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.rope_config import RopeConfig, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# What a published config.json may leave out because it is the family's default in transformers.
_QWEN = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_GEMMA = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN | {"head_dim": 128},
    "Qwen3MoeForCausalLM": _QWEN
    | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "MistralForCausalLM": _MISTRAL | {"sliding_window": 4096},
    "MixtralForCausalLM": _MISTRAL
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
}


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
    max_position_embeddings: int  # longest sequence, with what the rope scaling adds
    rms_norm_eps: float
    activation: str  # "silu" | "gelu_tanh"
    rope: RopeConfig
    local_rope: RopeConfig | None  # of windowed layers, where they have one of their own
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    layer_types: tuple[str, ...]  # FULL or SLIDING, one a layer
    sliding_window: int | None  # positions that a SLIDING layer sees, the token's own included
    attention_scale: float  # of the scores
    attention_soft_cap: float | None
    final_soft_cap: float | None  # of the logits
    num_experts: int  # 0 = dense
    num_experts_per_token: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...]  # layers of a mixture of experts that have a plain MLP
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # the checkpoint's own; the compute dtype is the quantisation's choice
    quantization: Mapping[str, Any] | None  # `quantization_config`: how the checkpoint's layers are quantised

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None where it sees everything."""
        short = self.sliding_window is not None and self.sliding_window < self.max_position_embeddings
        return tuple(self.sliding_window if short and kind == SLIDING else None for kind in self.layer_types)

    def context(self, max_model_len: int | None) -> int:
        """Tokens of the longest sequence, where `max_model_len` asks for fewer than there can be.

        Raises:
            BadInput: it asks for more.
        """
        limit = self.max_position_embeddings
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise BadInput(
                f"model.max_model_len={max_model_len} must be between 1 and the model's {limit}, or null"
            )
        return max_model_len or limit

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a config.json dict in the old or the transformers 5 spelling.

        Args:
            config: the parsed file.
            where: what to call it in messages.

        Raises:
            BadInput: a key is missing, or a value asks for something that is not built.
        """
        architecture = _architecture(config, where)
        # A model that sees images, too, has its text model's keys in a dictionary of their own.
        config = _DEFAULTS.get(architecture, {}) | dict(config.get("text_config") or {}) | dict(config)
        missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
        if missing:
            raise BadInput(
                f"{where} lacks {', '.join(missing)}: is it a causal language model's config.json?"
            )
        _check_supported(config, where)
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise BadInput(
                f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        rope, local_rope, longest = read_rope(config, head_dim, where)
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        active = config.get("num_experts_per_tok") or 0
        if experts and not 1 <= active <= experts:
            raise BadInput(f"{where}: num_experts_per_tok={active} must be between 1 and {experts} experts")
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        eos = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=_activation(config, where),
            rope=rope,
            local_rope=local_rope,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            layer_types=_layer_types(config, window, where),
            sliding_window=window,
            attention_scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
            attention_soft_cap=config.get("attn_logit_softcapping"),
            final_soft_cap=config.get("final_logit_softcapping"),
            num_experts=experts,
            num_experts_per_token=active,
            moe_intermediate_size=config.get("moe_intermediate_size") or config["intermediate_size"],
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
            dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
            dtype=config.get("dtype") or config.get("torch_dtype"),
            quantization=config.get("quantization_config") or None,
        )


def require_experts(wanted: str, experts: int) -> None:
    """Raises BadInput if `wanted`, which is `runtime.moe`, insists on grouping experts, and there are none."""
    if wanted == "grouped" and not experts:
        raise BadInput(
            "runtime.moe=grouped: the model has no experts to group; use runtime.moe=auto, or a model that has them, "
            "as model=qwen3_30b_a3b or model=mixtral_8x7b"
        )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    architectures = config.get("architectures")
    if not architectures:
        raise BadInput(f"{where} names no architectures: add e.g. architectures: [LlamaForCausalLM]")
    return str(architectures[0])


def _check_supported(config: Mapping[str, Any], where: str) -> None:
    """Refuse what would otherwise be computed wrongly without a word."""
    if config.get("use_bidirectional_attention"):
        raise BadInput(f"{where}: use_bidirectional_attention is not supported: it is no language model's")


def _activation(config: Mapping[str, Any], where: str) -> str:
    """Of the MLP. Gemma's first configs say gelu and mean its tanh form."""
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name == "gelu" and config["architectures"][0] == "GemmaForCausalLM":
        name = "gelu_pytorch_tanh"
    if name not in _ACTIVATIONS:
        raise BadInput(f"{where}: hidden_act={name} is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layer_types(config: Mapping[str, Any], window: int | None, where: str) -> tuple[str, ...]:
    """Which layers see a window only: as the file says, or by the family's rule."""
    layers: int = config["num_hidden_layers"]
    given = config.get("layer_types")
    if given:
        kinds = tuple(str(kind) for kind in given)
        if len(kinds) != layers or not {FULL, SLIDING}.issuperset(kinds):
            raise BadInput(
                f"{where}: layer_types must give {FULL} or {SLIDING} for each of the {layers} layers"
            )
        if SLIDING in kinds and not window:
            raise BadInput(f"{where}: layer_types has {SLIDING}, but no sliding_window is in use")
        return kinds
    match config["architectures"][0]:
        case "MistralForCausalLM" | "MixtralForCausalLM" | "Phi3ForCausalLM" | "Qwen3MoeForCausalLM":
            slides = [window is not None] * layers
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM":
            first = config["max_window_layers"]
            slides = [window is not None and i >= first for i in range(layers)]
        case "Gemma2ForCausalLM":
            slides = [i % 2 == 0 for i in range(layers)]
        case "Gemma3ForCausalLM" | "Gemma3ForConditionalGeneration":
            period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
            slides = [(i + 1) % period != 0 for i in range(layers)]
        case _:
            slides = [False] * layers
    return tuple(SLIDING if slide else FULL for slide in slides)
