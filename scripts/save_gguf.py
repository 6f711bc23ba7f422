#!/usr/bin/env python3
"""Save a checkpoint as a GGUF file, so that llama.cpp and the engine run the same weights.

    python scripts/save_gguf.py embedded tiny-q8_0.gguf --type q8_0
    python run.py model=hf model.path=tiny-q8_0.gguf

Matrices are stored in the type, unless their rows are no multiple of its blocks of 32 values: these
are stored as float16. Norms, biases and the router of a mixture of experts are float32. The file
is read back before the script ends, and removed where it does not say the same architecture: GGUF
has no place for some settings, such as a window of Qwen3's layers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from program import exit_code

from minivllm.errors import BadInput, install
from minivllm.models.config import ModelConfig
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.gguf.config import ARCHITECTURES, read_config
from minivllm.models.load.gguf.cuts import DIGIT, GPT2, RULES
from minivllm.models.load.gguf.file import GGUFFile, shortest
from minivllm.models.load.source import resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.weights import CheckpointWeights
from minivllm.models.rope_config import RopeConfig

try:
    import gguf
except ImportError:
    print(f"error: scripts/save_gguf.py needs the package gguf: {install('gguf')}", file=sys.stderr)
    sys.exit(2)

TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "f16", "bf16", "f32")
_FAMILIES = {name: family for family, name in ARCHITECTURES.items()} | {
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
}
_ORIGINAL = "original_max_position_embeddings"
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")
_BYTE_LEVEL = "a byte-level BPE whose rule for cutting text has a name in llama.cpp"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def main() -> int:
    """Save one file. Returns 0; raises BadInput."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", help="a folder, a hub id, or embedded")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--type", choices=TYPES, default="q8_0", help="of the matrices (q8_0)")
    options = parser.parse_args()
    save(options.checkpoint, options.out, options.type)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")
    return 0


def save(checkpoint: str, out: Path, kind: str) -> None:
    """Write a GGUF file.

    Args:
        checkpoint: as `model.path`.
        out: the file, which must not exist.
        kind: one of TYPES.

    Raises:
        BadInput: the checkpoint cannot be read, or GGUF has no place for what it says.
    """
    if out.exists():
        raise BadInput(f"{out} exists already: give another name")
    source = resolve({"path": checkpoint}, allow_random=False)[1]
    config = ModelConfig.from_dict(source.config)
    config = dataclasses.replace(config, rope=_with_attention_factor(config.rope))
    if source.folder is None or source.folder.is_file() or config.quantization is not None:
        raise BadInput(f"{checkpoint} must be a folder with a checkpoint in 16 or 32 bits")
    family = _FAMILIES.get(config.architecture)
    if family is None:
        raise BadInput(f"{config.architecture} is not saved; saved are {', '.join(_FAMILIES)}")
    partial = out.with_name(f"{out.name}.partial")
    writer = gguf.GGUFWriter(partial, family)
    try:
        _write_config(writer, config, family, source.folder.name)
        writer.add_file_type(gguf.LlamaFileType[_file_type(kind)])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if (tokenizer := Tokenizer.load(source.folder)) is not None:
            _write_tokenizer(writer, tokenizer, config)
        _write_tensors(writer, source.folder, config, family, kind)
        writer.close()
        _compare(config, partial)
        partial.rename(out)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _with_attention_factor(rope: RopeConfig) -> RopeConfig:
    """A longrope with its factor of the scores, which config.json may leave to a rule (Phi-3)."""
    if rope.kind != "longrope" or "attention_factor" in rope.scaling:
        return rope
    factor, original = (rope.scaling[key] for key in ("factor", _ORIGINAL))
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = shortest(float(np.float32(scale)))
    return dataclasses.replace(rope, scaling={**rope.scaling, "attention_factor": scale})


def _file_type(kind: str) -> str:
    names = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}
    return names.get(kind, f"MOSTLY_{kind.upper()}")


def _write_config(writer: Any, config: ModelConfig, family: str, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(_unscaled_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_token)
        if family != "llama":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.attention_soft_cap is not None:
        writer.add_attn_logit_softcapping(config.attention_soft_cap)
    if config.final_soft_cap is not None:
        writer.add_final_logit_softcapping(config.final_soft_cap)
    _write_rope(writer, config)


def _unscaled_length(config: ModelConfig) -> int:
    """The context as config.json has it: the loader multiplies it by the factor of these ropes."""
    if config.local_rope is None and config.rope.kind in ("linear", "yarn"):
        return round(config.max_position_embeddings / config.rope.scaling["factor"])
    return config.max_position_embeddings


def _write_rope(writer: Any, config: ModelConfig) -> None:
    rope = config.rope
    writer.add_rope_freq_base(rope.theta)
    rotated = rope.rotary_dim(config.head_dim)
    writer.add_rope_dimension_count(rotated)
    scaling = rope.scaling
    if rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if rope.kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(int(scaling[_ORIGINAL]))
    if rope.kind == "yarn":
        for name in ("beta_fast", "beta_slow"):
            if name in scaling:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(scaling[name])
    if rope.kind == "longrope":
        writer.add_rope_scaling_attn_factors(scaling["attention_factor"])


def _rope_tensors(rope: RopeConfig, dim: int) -> dict[str, NDArray[np.float32]]:
    """What a file says of a rope in tensors: divisors of its frequencies."""
    scaling = rope.scaling
    if rope.kind == "longrope":
        kinds = ("long", "short")
        return {
            f"rope_factors_{kind}.weight": np.array(scaling[f"{kind}_factor"], np.float32)
            for kind in kinds
        }
    if rope.kind != "llama3":
        return {}
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling[_ORIGINAL], scaling["factor"]
    waves = [2 * math.pi * rope.theta ** (i / dim) for i in range(0, dim, 2)]
    smooth = [min(1.0, max(0.0, (original / wave - low) / (high - low))) for wave in waves]
    divisors = [1 / ((1 - s) / factor + s) for s in smooth]
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


def _write_tokenizer(writer: Any, tokenizer: Tokenizer, config: ModelConfig) -> None:
    content = json.loads(tokenizer.fast.to_str())
    model = content["model"]
    rule = _rule(content)
    if model["type"] != "BPE" or rule is None:
        raise BadInput(f"the tokenizer is not {_BYTE_LEVEL}, and no other is saved")
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {index: text for text, index in model["vocab"].items()}
    texts |= {index: token["content"] for index, token in added.items()}
    count = max(config.vocab_size, *(index + 1 for index in texts))
    types = [
        _UNUSED
        if index not in texts
        else _NORMAL
        if index not in added
        else _CONTROL
        if added[index]["special"]
        else _USER_DEFINED
        for index in range(count)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([texts.get(index, f"[PAD{index}]") for index in range(count)])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    bos = tokenizer.special_id("bos_token")
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_add_bos_token(bos is not None and tokenizer.encode("a")[:1] == [bos])
    for name, token in zip(("eos", "eot", "eom"), config.eos_token_ids, strict=False):
        getattr(writer, f"add_{name}_token_id")(token)
    if (padding := tokenizer.special_id("pad_token")) is not None:
        writer.add_pad_token_id(padding)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _rule(content: dict[str, Any]) -> str | None:
    """llama.cpp's name of how a tokenizer cuts text; None if it has none."""
    before = content["pre_tokenizer"] or {}
    parts = before.get("pretokenizers", [before])
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1]["add_prefix_space"]:
        return None
    cuts = (*map(_cut, parts[:-1]), *[GPT2] * parts[-1].get("use_regex", True))
    keeps_tokens = bool(content["model"].get("ignore_merges"))
    for name, rule in RULES.items():
        if cuts == rule.cuts and keeps_tokens == rule.keeps_tokens:
            return name
    return None


def _cut(part: dict[str, Any]) -> str | None:
    """The regular expression that one part of a tokenizer cuts by; None for another part."""
    if part["type"] == "Digits" and part["individual_digits"]:
        return DIGIT
    expression: str | None = part.get("pattern", {}).get("Regex")
    return expression


def _write_tensors(writer: Any, folder: Path, config: ModelConfig, family: str, kind: str) -> None:
    """The tensors' names and places, then their bytes, one at a time."""
    architecture = gguf.MODEL_ARCH_NAMES
    arch = next(number for number, name in architecture.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    reader = CheckpointWeights(Checkpoint.open(folder))
    ropes = _rope_tensors(config.rope, config.rope.rotary_dim(config.head_dim))
    plan: list[tuple[str, list[str], Any]] = []
    for own, parts in _grouped(reader, config):
        name = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise BadInput(f"GGUF has no name for tensor {own} of {family}")
        shape = reader.checkpoint.tensors[parts[0]].shape
        shape = (len(parts), *shape) if _EXPERT.fullmatch(parts[0]) else shape
        form = _form(name, shape, kind)
        size = math.prod(shape) // gguf.GGML_QUANT_SIZES[form][0] * gguf.GGML_QUANT_SIZES[form][1]
        # The writer takes the shape in bytes of what it knows as bytes.
        stored = (
            shape
            if form in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
            else (gguf.quant_shape_to_byte_shape(shape, form))
        )
        dtype = {0: np.dtype(np.float32), 1: np.dtype(np.float16)}.get(form, np.dtype(np.uint8))
        writer.add_tensor_info(name, stored, dtype, size, form)
        plan.append((name, parts, form))
    for name, values in ropes.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parts, form in plan:
        values = np.stack([_values(reader.read(part), name, config, family) for part in parts])
        values = values if _EXPERT.fullmatch(parts[0]) else values[0]
        writer.write_tensor_data(gguf.quantize(values, form))
    for values in ropes.values():
        writer.write_tensor_data(values)


def _grouped(reader: CheckpointWeights, config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Each tensor's name, and the names of its parts: those of all experts, else itself."""
    experts: dict[str, list[str]] = {}
    for name in reader.checkpoint.tensors:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", []).append(name)
        else:
            yield name, [name]
    for name, parts in experts.items():
        yield name, sorted(parts, key=lambda part: int(part.split(".")[5]))


def _form(name: str, shape: tuple[int, ...], kind: str) -> Any:
    """The type of a tensor."""
    form = gguf.GGMLQuantizationType[kind.upper()]
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return gguf.GGMLQuantizationType.F32
    if shape[-1] % gguf.GGML_QUANT_SIZES[form][0]:
        return gguf.GGMLQuantizationType.F16
    return form


def _values(tensor: Tensor, name: str, config: ModelConfig, family: str) -> NDArray[np.float32]:
    """A tensor as llama.cpp wants it."""
    values: NDArray[np.float32] = tensor.float().numpy()
    if family.startswith("gemma") and "norm" in name:
        return values + np.float32(1)
    if family == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_heads if ".attn_q." in name else config.num_kv_heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def _compare(config: ModelConfig, path: Path) -> None:
    """Raises BadInput if the file says another architecture than the checkpoint."""
    again = ModelConfig.from_dict(read_config(GGUFFile.open(path)), str(path))
    of_file = {"dtype", "quantization", "eos_token_ids"}
    lost = [
        field.name
        for field in dataclasses.fields(ModelConfig)
        if field.name not in of_file and getattr(config, field.name) != getattr(again, field.name)
    ]
    if lost:
        raise BadInput(
            f"GGUF has no place for {lost[0]}={getattr(config, lost[0])} of this checkpoint, which "
            f"would be read as {getattr(again, lost[0])}"
        )


if __name__ == "__main__":
    sys.exit(exit_code(main))
