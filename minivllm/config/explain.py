"""What Hydra and OmegaConf complain about; one line that names what to write instead."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from minivllm.config import option_files
from minivllm.config.groups import GROUPS, OPTIONS, TARGETLESS
from minivllm.config.overrides import hidden
from minivllm.errors import BadInput, meant, nearest

# Names of other tools, whose arguments have no groups -> what to write here; "" where there is no
# such thing. They are vLLM's unless `OF_OTHERS` has them.
VLLM = {
    "allowed_origins": "task.cors_origins of preset=serve",
    "api_key": "task.api_keys of preset=serve",
    "api_server_count": "task.api_server_count of preset=serve",
    "async_scheduling": "runtime.overlap=true",
    "attention_backend": "attention=...",
    "backend": "engine=openai engine.api",
    "base_url": "engine=openai engine.url",
    "block_size": "cache.block_size",
    "burstiness": "arrival=gamma arrival.burstiness",
    "chat_template": "",
    "cpu_offload_gb": "",
    "data_parallel_size": "parallel.replicas",
    "dataset_name": "workload=chat, file, shared_prefix, ...",
    "dataset_path": "workload=file workload.path",
    "dtype": "quant=bf16, quant=fp16 or quant=fp32",
    "enable_chunked_prefill": "batching.chunked_prefill",
    "enable_lora": "",
    "enable_prefix_caching": "cache.prefix_caching",
    "enforce_eager": "runtime.cuda_graphs=false",
    "gpu_memory_utilization": "cache.memory_fraction",
    "goodput": "measure.slo",
    "hf_overrides": "",
    "host": "task.host of preset=serve",
    "ignore_eos": "workload.ignore_eos",
    "kv_cache_dtype": "cache.kv_dtype",
    "load_format": "model.weights (random is vLLM's dummy)",
    "max_model_len": "model.max_model_len",
    "max_num_batched_tokens": "batching.max_num_batched_tokens",
    "max_num_seqs": "batching.max_num_seqs",
    "model": "model=qwen3, ..., or model=hf model.path",
    "num_gpu_blocks_override": "cache.num_blocks",
    "num_prompts": "workload.num_requests",
    "pipeline_parallel_size": "",
    "port": "task.port of preset=serve",
    "quantization": "quant=nf4, quant=int8, ...",
    "ramp_up_strategy": "arrival=ramp",
    "random_input_len": "workload.input_len",
    "random_output_len": "workload.output_len",
    "request_rate": "arrival.rate",
    "max_concurrency": "arrival=concurrency arrival.concurrency",
    "scheduling_policy": "batching=continuous, static, ... and decoding.priority",
    "seed": "measure.seed of a workload, decoding.seed of sampling",
    "served_model_name": "task.served_model_name of preset=serve",
    "speculative_config": "speculative=ngram, suffix, draft or early_exit",
    "swap_space": "cache.swap_space_gb",
    "tensor_parallel_size": "parallel.tensor",
    "tokenizer": "",
    "trust_remote_code": "",
}
OF_OTHERS = {
    "concurrency": "arrival=concurrency arrival.concurrency",
    "max_requests": "workload.num_requests",
    "max_seconds": "measure.duration_s",
    "target": "engine=openai engine.url",
    "url": "engine=openai engine.url",
}
# What vLLM needs to know of a model.
FOUND = ("enable_auto_tool_choice", "generation_config", "reasoning_parser", "tool_call_parser")
# Options that there were, and what to use instead.
REMOVED = {
    ("attention", "flex"): "attention=triton or attention=sdpa",
    ("attention", "torch_varlen"): "attention=triton or attention=sdpa",
}
# Formats of quantised checkpoints, which no option of `quant` makes.
STORED = ("awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "gguf", "gptq", "gptq_marlin")


def elsewhere(name: str) -> str | None:
    """What to write in place of an argument of vLLM or a load generator, as the end of an error;
    None where it is none of them."""
    name = name.replace("-", "_").lstrip("_")
    if name in FOUND:
        return "leave it out: it is found in the checkpoint"
    if name in OF_OTHERS:
        return f"what other tools call so is {OF_OTHERS[name]} here"
    known = VLLM.get(name)
    if known is None and (opposite := VLLM.get(name.removeprefix("no_"))):
        knob, _, value = opposite.partition("=")
        known = f"{knob}={'true' if value == 'false' else 'false'}"
    if known is None:
        return None
    return f"what vLLM calls so is {known} here" if known else "vLLM has it, minivllm has not"


def is_config_error(error: Exception) -> bool:
    """Whether Hydra, OmegaConf or the YAML reader raised this: then a configuration is wrong, not
    the program.

    Hydra raises plain ValueError and others too, so the place counts, not the type: the last one
    outside of the standard library, which opens and decodes files for its callers.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    callers = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
    readers = ("hydra", "omegaconf", "yaml", "antlr4")
    return bool(callers) and (
        callers[-1].partition(".")[0] in readers or callers[-1] == option_files.__name__
    )


def explain(
    error: Exception, overrides: Sequence[str], load: Callable[[Sequence[str]], DictConfig]
) -> BadInput:
    """The user's mistake behind an exception of Hydra or OmegaConf.

    Args:
        error: what was raised when the overrides were composed.
        overrides: the overrides of the command.
        load: composes a configuration from overrides; called to find out which names would have
            been valid.
    """
    if isinstance(error, OverrideParseException):
        return BadInput(
            f"{hidden(error.override or '')!r} is no override: write KEY=VALUE; what has special "
            "characters takes quotes of its own, as in 'KEY=\"a value\"' or 'KEY=[\"a b\",c]'"
        )
    if isinstance(error, MissingConfigException):
        return _missing_option(error, load)
    if isinstance(error, UnicodeDecodeError):
        return BadInput(f"a file of options is not UTF-8 text ({error}); save it as UTF-8")
    message = str(error)
    if match := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", message):
        return _unknown_key(match[1], overrides, load)
    if match := re.match(r"In '([^']+)': Could not override '([^'@]+)@", message):
        return BadInput(
            f"{match[1]}.yaml overrides {match[2]}, as only a file can whose first line is '# "
            "@package _global_'"
        )
    if match := re.match(r"Ambiguous value for argument '(.*)'", message):
        return BadInput(
            f"{match[1]}: several values; add -m to sweep over them, or write a list as key=[a,b]"
        )
    if match := re.match(r"Sweep parameters '(.*)' requires", message):
        return BadInput(f"{match[1]}: several values; add -m to sweep over them")
    if match := re.match(r"Could not append to config\. An item is already at '([^']+)'", message):
        return BadInput(f"{match[1]} exists already: write {match[1]}=... without the +")
    if message.startswith("Config group override must be a string"):
        return _no_name(_group_without_option(overrides), load)
    if match := re.match(r"Error merging override (.*)", message):
        line = omegaconf_line(error.__cause__ or error)
        if line == "Cannot merge DictConfig with ListConfig":
            is_list = re.search(r"=\s*\[", match[1])
            line = f"must be {'settings, {NAME: VALUE}' if is_list else 'a list, [A, B]'}"
        return BadInput(f"{match[1]}: {line}")
    if (
        isinstance(error, ConfigCompositionException)
        and error.__cause__ is not None
        and not message
    ):
        return BadInput(omegaconf_line(error.__cause__))
    return BadInput(omegaconf_line(error))


def omegaconf_line(error: BaseException) -> str:
    """An exception of OmegaConf (or any other) in one line, without the parts that only its authors
    need."""
    key = getattr(error, "full_key", None)
    if isinstance(error, MissingMandatoryValue) and key:
        return f"{key} is missing: give it a value, {key}=..."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [
        line
        for line in lines
        if not re.match(r"(full_key|object_type|reference_type|See http)", line)
    ]
    text = "; ".join(line.rstrip(".") for line in kept) or type(error).__name__
    if isinstance(error, InterpolationResolutionError) and key and key not in text:
        return f"{key}: {text}"
    return text


def several(group: str) -> BadInput:
    """A group was given a list of options."""
    return BadInput(
        f"{group}: a group takes the name of one option; -m {group}=A,B sweeps over several"
    )


def _no_name(override: str, load: Callable[[Sequence[str]], DictConfig]) -> BadInput:
    """A group was given a number or null in place of an option's name."""
    group, _, value = override.partition("=")
    with contextlib.suppress(HydraException):
        try:
            load([f"{group}='{value}'"])  # a name that Hydra looks for, and tells what there is
        except MissingConfigException as error:
            return _missing_option(error, load)
    return BadInput(f"{override}: a group takes the name of one of its options")


def _missing_option(
    error: MissingConfigException, load: Callable[[Sequence[str]], DictConfig]
) -> BadInput:
    name_of_file = error.missing_cfg_file or ""
    if "/" not in name_of_file or error.options is None:
        return BadInput(str(error).split("\n")[0])
    group, _, name = name_of_file.partition("/")
    if group not in GROUPS:  # Hydra's own lie in folders
        group, name = name_of_file.rsplit("/", 1)
    options = sorted(error.options)
    if not options:
        return BadInput(f"{group}={name}: there is no group {group}")
    if group == "model" and "/" in name:
        return BadInput(
            f"{group}={name}: no such option; a checkpoint's folder or hub id is model=hf "
            f"model.path={name}"
        )
    if group == "quant" and name in STORED:
        return BadInput(
            f"{group}={name}: no such option; a checkpoint brings this format, and is read as it "
            "is stored: model=hf model.path=CHECKPOINT"
        )
    if instead := REMOVED.get((group, name)):
        return BadInput(f"{group}={name}: no such option any more; use {instead}")
    settings = _settings(group, load)
    if name in settings:
        return BadInput(f"{group}={name}: no such option; write {group}.{name}=VALUE")
    if settings and len(options) == 1:
        return BadInput(
            f"{group}={name}: no such option; settings of {group} are written {group}.NAME=VALUE, "
            f"and {group}={options[0]} --help lists them"
        )
    hint = nearest(name, options)
    listed = "" if hint.startswith("choose") else f" ({group}: {', '.join(options)})"
    return BadInput(f"{group}={name}: no such option; {hint}{listed}")


def _settings(group: str, load: Callable[[Sequence[str]], DictConfig]) -> list[str]:
    """The settings of the option that a group has unless another one is chosen."""
    if group not in GROUPS:
        return []
    node = load([])[group]
    return [str(name) for name in node if name != "_target_"] if OmegaConf.is_dict(node) else []


def _unknown_key(
    key: str, overrides: Sequence[str], load: Callable[[Sequence[str]], DictConfig]
) -> BadInput:
    """`key` exists neither as a group nor as a setting: find the first part that is wrong."""
    if key.partition(".")[0] in ("ablation", "optimisations"):
        return BadInput(
            f"{key}: there is no ablation until one is added, as in +ablation=leave_one_out"
        )
    parsed = {text: _parse(text) for text in overrides}
    others = {
        text: override.key_or_group
        for text, override in parsed.items()
        if override is not None
        and override.key_or_group != key
        and not override.is_sweep_override()
    }
    config: DictConfig | None = None
    for attempt in (list(others), [text for text, group in others.items() if group in GROUPS], []):
        with contextlib.suppress(Exception):  # other errors are reported once this is right
            config = load(attempt)
            break
    if config is None:
        return BadInput(f"{key}: no such setting")
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    node, seen = config, ""
    for part in key.split("."):
        names = (
            [str(name) for name in node if str(name) not in ("hydra", "_target_")]
            if OmegaConf.is_dict(node)
            else []
        )
        if part not in names:
            if key.startswith("hydra."):
                return BadInput(
                    f"{key}: Hydra has no such setting; see --hydra-help, or --cfg hydra"
                )
            if not seen:
                names += ["preset"]
            owner = f"{seen}={choices[seen]}" if choices.get(seen) else seen
            where = f"no such option of {owner}" if seen else "no such group or setting"
            return BadInput(f"{key}: {where}; {_hint(config, key, seen, part, names)}")
        seen = f"{seen}.{part}" if seen else part
        node = node[part]
    return BadInput(
        f"{key}: a section of settings takes {key}.SETTING=VALUE; an option file of your own is "
        f"added with a plus, as in +{key}=NAME"
    )


def _hint(config: DictConfig, key: str, seen: str, part: str, names: Sequence[str]) -> str:
    """What to write in place of an unknown `part` of a key, after what was `seen` of it."""
    having = _having(config, seen, part) if seen in GROUPS else []
    if having:
        return f"{', '.join(having)} {'has' if len(having) == 1 else 'have'} it"
    leaf = key.rpartition(".")[2]
    if key == leaf and (hint := elsewhere(leaf)):
        return hint
    # Among a section's few names a less close one is meant, rather than a name of another group.
    if question := meant(part, names, cutoff=0.6 if "." in seen else 0.8):
        return question
    settings = [
        f"{group}.{leaf}"
        for group in GROUPS
        if OmegaConf.is_dict(node := config.get(group)) and leaf in node
    ]
    if settings:
        return f"did you mean {' or '.join(settings)}?"
    return elsewhere(leaf) or nearest(part, names)


def _having(config: DictConfig, group: str, knob: str) -> list[str]:
    """The options of a group that have a knob, or start from one that has it, as one chooses
    them."""
    sources = OmegaConf.select(config, "hydra.runtime.config_sources") or []
    files = {
        path.stem: path.read_text("utf-8")
        for source in reversed(sources)
        if source.schema in ("file", option_files.SCHEME)
        for path in sorted(Path(source.path, group).glob("*.yaml"))
    }

    def has(option: str) -> bool:
        text = files.get(option, "")
        target = re.search(r"^_target_: (\S+)", text, re.MULTILINE)
        cls = TARGETLESS.get(group) if target is None else OPTIONS.get(target[1])
        started_from = {*re.findall(r"^ *- ([\w-]+)$", text, re.MULTILINE)} - {"_self_", option}
        return (
            bool(re.search(rf"^{re.escape(knob)}:", text, re.MULTILINE))
            or any(map(has, started_from))
            or (cls is not None and knob in (item.name for item in fields(cls)))
        )

    return [f"{group}={option}" for option in files if has(option)]


def _group_without_option(overrides: Sequence[str]) -> str:
    """The override that gives a group something that cannot be an option's name."""
    for text in overrides:
        override = _parse(text)
        if (
            override is not None
            and override.key_or_group in GROUPS
            and not isinstance(override.value(), str)
        ):
            return text
    return " ".join(overrides)


def _parse(override: str) -> Override | None:
    with contextlib.suppress(HydraException):
        return OverridesParser.create().parse_override(override)
    return None
