"""The architecture of a GGUF file, as the config.json of the same model says it. Free of torch.

What llama.cpp decides by the family and not by a key (Gemma's scale of the scores, the normalised
weights of Qwen3's experts) is written here, as its `llama-model.cpp` has it."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.config import MOST
from minivllm.models.load.gguf.file import GGUFFile, StoredArray, shortest
from minivllm.models.load.gguf.vocabulary import read_ends
from minivllm.platform.untrusted import open_file
from minivllm.platform.values import Values

# By `general.architecture`. "llama" also stands for Mistral and Mixtral.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
# Layers of the models of these families whose scores are scaled by hidden_size / heads, and not by
# the width of a head: the 27B ones.
_WIDER_SCALE = {"gemma2": 46, "gemma3": 62}
_GEMMA3_PERIOD, _GEMMA3_LOCAL_THETA = 6, 10000.0
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
}
_MOST_FACTORS, _MOST_POSITIONS = 1 << 12, 1 << 31
ROPE_FREQS, LONG, SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all of Meta's


def read_family(file: GGUFFile) -> str:
    """`general.architecture`. Raises BadInput, naming those that are read, for another one."""
    name = file.values.text("general.architecture", "")
    if name not in ARCHITECTURES:
        raise BadInput(
            f"{file.path}: architecture {name[:40]!r} is not supported; of GGUF files, supported "
            f"are {', '.join(ARCHITECTURES)}"
        )
    return name


def config_of(path: Path) -> dict[str, Any]:
    """The keys of config.json of a file; see `GGUFFile.open` and `read_config`."""
    return read_config(GGUFFile.open(path))


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The keys of config.json.

    Raises:
        BadInput: the architecture is not supported, or a key is missing, out of its range or says
            what no model here does.
    """
    family, values = read_family(file), file.values
    if (version := values.integer("general.quantization_version", 2, low=0)) != 2:
        raise BadInput(
            f"{file.path} is quantised in version {version} of ggml's blocks, and read is 2: "
            "convert the model again"
        )
    config: dict[str, Any] = {
        name: values.integer(f"{family}.{key}", None, high=MOST.get(name, _MOST_POSITIONS))
        for key, name in _SIZES.items()
    }
    heads = _of_all_layers(file, f"{family}.attention.head_count")
    config["num_attention_heads"] = heads
    kv_heads = _of_all_layers(file, f"{family}.attention.head_count_kv")
    config["num_key_value_heads"] = kv_heads or heads
    config["intermediate_size"] = _of_all_layers(file, f"{family}.feed_forward_length")
    config["vocab_size"] = _vocabulary(file)
    config["rms_norm_eps"] = values.number(
        f"{family}.attention.layer_norm_rms_epsilon", None, high=1.0
    )
    config["head_dim"] = _head_dim(values, family, config["hidden_size"], heads)
    missing = [name for name, value in config.items() if value is None]
    if missing:
        raise BadInput(f"{file.path} has no metadata of {family} for {', '.join(missing)}")
    config["architectures"] = [ARCHITECTURES[family]]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    config["eos_token_id"] = read_ends(file)
    config |= _own(file, values, family, config)
    return config | _rope(file, values, family, config)


def _own(file: GGUFFile, values: Values, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The keys that only some families have."""
    own: dict[str, Any] = {}
    experts = values.integer(f"{family}.expert_count", 0, low=0)
    if experts:
        key = "num_local_experts" if family == "llama" else "num_experts"
        own = {
            key: experts,
            "num_experts_per_tok": values.integer(f"{family}.expert_used_count", 0),
            "norm_topk_prob": True,
        }
        inner = values.integer(f"{family}.expert_feed_forward_length", None)
        if family != "llama" and inner is not None:
            own["moe_intermediate_size"] = inner
    window = values.integer(f"{family}.attention.sliding_window", None, low=0)
    if family in ("llama", "phi3", "gemma2", "gemma3"):
        own["sliding_window"] = window or (4096 if family == "gemma2" else None)
    if family == "llama" and (experts or window):
        name = "MixtralForCausalLM" if experts else "MistralForCausalLM"
        own["architectures"] = [name]
    if family == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            own[name] = values.number(f"{family}.{name}", None)
    if family == "gemma3":
        own["final_logit_softcapping"] = (
            values.number("gemma3.final_logit_softcapping", None, least=0) or None
        )
        own["layer_types"] = _gemma3_layers(file, config["num_hidden_layers"], bool(window))
    if family in _WIDER_SCALE:
        wide = config["num_hidden_layers"] == _WIDER_SCALE[family]
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        own["query_pre_attn_scalar"] = hidden / heads if wide else config["head_dim"]
    return own


def _of_all_layers(file: GGUFFile, key: str) -> int | None:
    """A number, or the one that an array has for every layer."""
    if not isinstance(file.metadata.get(key), StoredArray):
        return file.values.integer(key, None)
    numbers = set(file.numbers(key) or ())
    if len(numbers) != 1:
        file.values.fail(key, "differs between layers, which is not supported")
    return Values({key: numbers.pop()}, str(file.path)).integer(key, None)


def _vocabulary(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadInput(f"{file.path} has no tensor token_embd.weight: it is no language model")
    return embedding.shape[0]


def _head_dim(values: Values, family: str, hidden: int | None, heads: int | None) -> int | None:
    """The width of a head, which keys and values must share."""
    if hidden is None or heads is None:
        return None
    default = hidden // heads
    key, value = (f"{family}.attention.{kind}_length" for kind in ("key", "value"))
    width = values.integer(key, default)
    if values.integer(value, width) != width:
        values.fail(value, f"must be {key}={width}")
    return width


def _gemma3_layers(file: GGUFFile, layers: int, has_window: bool) -> list[str]:
    """The kind of each layer: by a key of newer files, or each sixth with full attention; all
    without a window."""
    key = "gemma3.attention.sliding_window_pattern"
    if isinstance(file.metadata.get(key), StoredArray):
        slides = [bool(flag) for flag in file.numbers(key) or ()]
        if len(slides) != layers:
            file.values.fail(key, f"must have a flag for each of {layers} layers")
    else:
        period = file.values.integer(key, _GEMMA3_PERIOD)
        slides = [(i + 1) % period != 0 for i in range(layers)]
    return ["sliding_attention" if slide and has_window else "full_attention" for slide in slides]


def _rope(file: GGUFFile, values: Values, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, and the length before scaling."""
    head_dim, limit = config["head_dim"], config["max_position_embeddings"]
    theta = values.number(f"{family}.rope.freq_base", 10000.0, above=1.0, high=1e12)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rotated = values.integer(f"{family}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        if family == "llama" or rotated > head_dim:
            values.fail(f"{family}.rope.dimension_count", f"must be the head's {head_dim}")
        rope["partial_rotary_factor"] = _share(rotated, head_dim)
    further: dict[str, Any] = {}
    scaling = _scaling(values, family, limit)
    if SHORT in file.tensors or LONG in file.tensors:
        short, long = (_factors(file, name, rotated // 2) for name in (SHORT, LONG))
        original = values.integer(f"{family}.rope.scaling.original_context_length", limit)
        scaling = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": values.number(f"{family}.rope.scaling.attn_factor", 1.0),
        }
        further["original_max_position_embeddings"] = original
    elif ROPE_FREQS in file.tensors:
        if scaling:
            raise BadInput(f"{file.path}: {ROPE_FREQS} beside a scaling of rope is not supported")
        factors = _factors(file, ROPE_FREQS, rotated // 2)
        if not (scaling := _llama3(factors, theta, rotated, limit)):
            raise BadInput(f"{file.path}: {ROPE_FREQS} is not the rope scaling of Llama 3")
    rope |= scaling
    if family == "gemma3":
        key = "gemma3.rope.freq_base_swa"
        local = values.number(key, _GEMMA3_LOCAL_THETA, above=1.0, high=1e12)
        windowed = {"rope_type": "default", "rope_theta": local}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": windowed}}
    return {"rope_parameters": rope, **further}


def _scaling(values: Values, family: str, limit: int) -> dict[str, Any]:
    """The keys of rope.scaling."""
    prefix = f"{family}.rope.scaling"
    old = values.number(f"{family}.rope.scale_linear", 1.0, high=1e6)
    kind = values.text(f"{prefix}.type", "none" if old == 1.0 else "linear")
    if kind in ("none", "longrope"):
        return {}
    factor = values.number(f"{prefix}.factor", old, least=1.0, high=1e6)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        values.fail(f"{prefix}.type", "is not supported: none, linear, yarn and longrope are")
    original = values.integer(f"{prefix}.original_context_length", limit)
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    attention = values.number(f"{prefix}.attn_factor", None)
    if attention is not None:  # llama.cpp multiplies by yarn's own
        scaling["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    for name in ("beta_fast", "beta_slow"):
        if (beta := values.number(f"{prefix}.yarn_{name}", None)) is not None:
            scaling[name] = beta
    return scaling


def _share(rotated: int, head_dim: int) -> float:
    """The share of a head whose product with its width is `rotated`, rounding included."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1.0)


def _factors(file: GGUFFile, name: str, count: int) -> list[float]:
    """A tensor of float32 that belongs to rope, which is no weight."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.dtype != "F32" or tensor.shape != (count,):
        shown = f"is {tensor.dtype}{[*tensor.shape]}" if tensor else "is missing"
        raise BadInput(f"{file.path}: tensor {name} {shown}, and must be F32[{count}]")
    if count > _MOST_FACTORS:
        raise BadInput(f"{file.path}: tensor {name} has {count:,} values, more than any model")
    with open_file(tensor.file, str(tensor.file)) as stream:
        stream.seek(tensor.begin)
        content = stream.read(4 * count)
    if len(content) != 4 * count:
        raise BadInput(f"{tensor.file} changed while it was read")
    return [shortest(value) for value in struct.unpack(f"<{count}f", content)]


def _llama3(factors: list[float], theta: float, dim: int, limit: int) -> dict[str, Any]:
    """The parameters of Llama 3's scaling that these factors follow from; empty if there are none.

    A file has the divisor of each frequency only. Meta's models share the two bounds, and were
    trained with 8,192 tokens before."""
    largest = max(factors)
    if not (math.isfinite(largest) and largest > 1):
        return {}
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    for original in (8192, round(limit / largest)):
        expected = []
        for i in range(len(factors)):
            wave = 2 * math.pi * theta ** (2 * i / dim)
            smooth = min(1.0, max(0.0, (original / wave - low) / (high - low)))
            expected.append(1 / ((1 - smooth) / largest + smooth))
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            return {
                **{"rope_type": "llama3", "factor": largest, **_LLAMA3},
                "original_max_position_embeddings": original,
            }
    return {}
