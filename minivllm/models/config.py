"""A model's architecture, read from its config.json. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.family_defaults import BY_MODEL_TYPE, FAMILIES, FLAGS, OWN_KEYS, SCALES, Family
from minivllm.models.rope_config import RopeConfig, read_rope
from minivllm.platform.values import Values

FULL, SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Several times the sizes of the largest published model: a greater number is a mistake, or an
# attempt to take all memory.
MOST = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
}
_NEVER_SLIDE = ("LlamaForCausalLM", "GemmaForCausalLM")  # unless the file has layer_types
# modules: experts of all layers
_MOST_HEAD_DIM, _MOST_EXPERTS, _MOST_MODULES = 1 << 12, 1 << 12, 1 << 17


@dataclass(frozen=True)
class ModelConfig:
    """The properties of a checkpoint that the model code needs."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # longest sequence, with rope scaling
    rms_norm_eps: float
    activation: str  # "silu" | "gelu_tanh"
    rope: RopeConfig
    local_rope: RopeConfig | None  # rope of windowed layers, if it is another one
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    layer_types: tuple[str, ...]  # FULL or SLIDING, one a layer
    sliding_window: int | None  # positions that a SLIDING layer sees, the token's own included
    attention_scale: float  # factor of the scores
    attention_soft_cap: float | None
    final_soft_cap: float | None  # of the logits
    num_experts: int  # 0 = dense
    num_experts_per_token: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...]  # layers with a plain MLP in a model with experts
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # of the checkpoint; quant sets the compute dtype
    # `quantization_config`: how the checkpoint's layers are quantised
    quantization: Mapping[str, Any] | None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Every rope of the model, the one of windowed layers last."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for full attention."""
        short = (
            self.sliding_window is not None and self.sliding_window < self.max_position_embeddings
        )
        return tuple(
            self.sliding_window if short and kind == SLIDING else None for kind in self.layer_types
        )

    def context(self, max_model_len: int | None) -> int:
        """Tokens of the longest sequence: `max_model_len`, or the model's limit if it is None.

        Raises:
            BadInput: it asks for more.
        """
        limit = self.max_position_embeddings
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise BadInput(
                f"model.max_model_len={max_model_len} must be between 1 and the model's {limit}, "
                "or null"
            )
        return max_model_len or limit

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a config.json dict in the old or the transformers 5 spelling.

        Args:
            config: the parsed file.
            where: the name of the file in messages.

        Raises:
            BadInput: a key is missing, its value has another type or lies out of its range, or asks
                for something that is not built; names the key.
        """
        architecture = read_architecture(config, where)
        values = _family_values(config, architecture, where)
        vocab, hidden, inner, layers, heads = _sizes(values, where)
        if values.flag("use_bidirectional_attention", False):
            values.fail(
                "use_bidirectional_attention", "is not supported: it is no language model's"
            )
        kv_heads, head_dim = _head_sizes(values, where, hidden, heads)
        rope, local_rope, longest = read_rope(values, architecture, head_dim)
        layer_types, window = _windows(values, architecture, layers)
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=inner,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=values.number("rms_norm_eps", 1e-6, high=1.0, required=True),
            activation=_activation(values, architecture),
            rope=rope,
            local_rope=local_rope,
            tie_word_embeddings=values.flag("tie_word_embeddings", False),
            attention_bias=values.flag("attention_bias", False),
            mlp_bias=values.flag("mlp_bias", False),
            layer_types=layer_types,
            sliding_window=window,
            attention_scale=values.number("query_pre_attn_scalar", float(head_dim)) ** -0.5,
            attention_soft_cap=values.number("attn_logit_softcapping", None),
            final_soft_cap=values.number("final_logit_softcapping", None),
            **_experts(values, layers, inner),
            eos_token_ids=read_eos(values),
            dtype=values.text("dtype", None) or values.text("torch_dtype", None),
            quantization=values.mapping("quantization_config") or None,
        )


def _sizes(values: Values, where: str) -> list[int]:
    """The sizes that every config.json names, in the order of `MOST`. Raises BadInput if it lacks
    one."""
    sizes = {key: values.integer(key, None, high=most) for key, most in MOST.items()}
    missing = [key for key, size in sizes.items() if size is None]
    if missing:
        raise BadInput(
            f"{where} lacks {', '.join(missing)}: is it a causal language model's config.json?"
        )
    return [size or 0 for size in sizes.values()]


def _head_sizes(values: Values, where: str, hidden: int, heads: int) -> tuple[int, int]:
    """Number of key-value heads, and width of a head. Raises BadInput if they do not divide the
    heads or the hidden size evenly."""
    kv_heads = values.integer("num_key_value_heads", heads, high=heads)
    if heads % kv_heads:
        raise BadInput(
            f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = values.integer("head_dim", hidden // heads, high=_MOST_HEAD_DIM)
    if not values.has("head_dim") and hidden % heads:
        raise BadInput(
            f"{where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}"
        )
    return kv_heads, head_dim


def require_experts(moe: str, experts: int) -> None:
    """Raises BadInput if `moe` (runtime.moe) requires grouped experts, and there are none."""
    if moe == "grouped" and not experts:
        raise BadInput(
            "runtime.moe=grouped: the model has no experts to group; use runtime.moe=auto, or a "
            "model that has them, as model=qwen3_30b_a3b or model=mixtral_8x7b"
        )


def read_architecture(config: Mapping[str, Any], where: str = "config.json") -> str:
    """The architecture that a config.json names; if the name is that of a base model or missing,
    that of its model type.

    Raises:
        BadInput: it names none, or not in a list of strings.
    """
    values = Values(config, where)
    name = next(iter(values.texts("architectures") or ()), "")
    if not name or (name.endswith("Model") and not name.endswith("LMHeadModel")):
        name = BY_MODEL_TYPE.get(values.text("model_type", ""), name)
    if not name:
        raise BadInput(
            f"{where} names no architectures: add e.g. architectures: [LlamaForCausalLM]"
        )
    return name


def _family_values(config: Mapping[str, Any], architecture: str, where: str) -> Values:
    """The keys of the family, with its defaults.

    A model with images has the keys of its text model in a dictionary of their own.

    Raises:
        BadInput: a key that only other families have holds what means nothing in those, either.
    """
    family = FAMILIES.get(architecture, Family(OWN_KEYS))
    text = Values(config, where).mapping("text_config") or {}
    merged = {**family.defaults, **text, **config}
    everything = Values(merged, where)
    for key in FLAGS:
        everything.flag(key, False)
    for key in SCALES:
        everything.number(key, None)
    return Values({k: v for k, v in merged.items() if k not in OWN_KEYS or k in family.keys}, where)


def read_eos(values: Values) -> tuple[int, ...]:
    """End-of-sequence ids: one, several or none.

    Raises:
        BadInput: the value is neither an id nor a list of them.
    """
    if values.is_list("eos_token_id"):
        return values.integers("eos_token_id") or ()
    token_id = values.integer("eos_token_id", None, low=0)
    return () if token_id is None else (token_id,)


def _experts(values: Values, layers: int, inner: int) -> dict[str, Any]:
    """The fields of ModelConfig that a mixture of experts sets."""
    key = "num_local_experts" if values.has("num_local_experts") else "num_experts"
    experts = values.integer(key, 0, low=0, high=_MOST_EXPERTS)
    if experts * layers > _MOST_MODULES:
        values.fail(
            key,
            f"in each of {layers} layers are more experts than the {_MOST_MODULES:,} there can be",
        )
    active = values.integer("num_experts_per_tok", 0, low=0) if experts else 0
    if experts and not 1 <= active <= experts:
        values.fail("num_experts_per_tok", f"must be between 1 and {experts} experts")
    step, dense = values.integer("decoder_sparse_step", 1), values.integers("mlp_only_layers") or ()
    return {
        "num_experts": experts,
        "num_experts_per_token": active,
        "moe_intermediate_size": values.integer(
            "moe_intermediate_size", inner, high=MOST["intermediate_size"]
        ),
        "norm_topk_prob": values.flag("norm_topk_prob", False),
        "dense_layers": tuple(i for i in range(layers) if i in dense or (i + 1) % step),
    }


def _activation(values: Values, architecture: str) -> str:
    """The activation of the MLP. In Gemma's first configs gelu means its tanh form."""
    key = "hidden_activation" if values.has("hidden_activation") else "hidden_act"
    name = values.text(key, "silu")
    if name == "gelu" and architecture == "GemmaForCausalLM":
        name = "gelu_pytorch_tanh"
    if name not in _ACTIVATIONS:
        values.fail(key, f"is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windows(values: Values, architecture: str, layers: int) -> tuple[tuple[str, ...], int | None]:
    """The kind of each layer, from the file or by the family's rule; and the window of windowed
    layers."""
    given = values.texts("layer_types") or ()
    in_use = values.flag("use_sliding_window", True) and (
        bool(given) or architecture not in _NEVER_SLIDE
    )
    window = values.integer("sliding_window", None) if in_use else None
    if given:
        if len(given) != layers or not {FULL, SLIDING}.issuperset(given):
            values.fail(
                "layer_types", f"must give {FULL} or {SLIDING} for each of the {layers} layers"
            )
        if SLIDING in given and not window:
            raise BadInput(
                f"{values.where}: layer_types has {SLIDING}, but no sliding_window is in use"
            )
        return given, window
    match architecture:
        case (
            "MistralForCausalLM" | "MixtralForCausalLM" | "Phi3ForCausalLM" | "Qwen3MoeForCausalLM"
        ):
            slides = [window is not None] * layers
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM" | "Qwen2_5_VLForConditionalGeneration":
            first = values.integer("max_window_layers", 0, low=0)
            slides = [window is not None and i >= first for i in range(layers)]
        case "Gemma2ForCausalLM":
            slides = [i % 2 == 0 for i in range(layers)]
        case "Gemma3ForCausalLM" | "Gemma3ForConditionalGeneration":
            key = "sliding_window_pattern"
            period = values.integer(key, values.integer(f"_{key}", 6))
            slides = [(i + 1) % period != 0 for i in range(layers)]
        case _:
            slides = [False] * layers
    return tuple(SLIDING if slide else FULL for slide in slides), window
