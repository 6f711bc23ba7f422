"""engine=vllm: vLLM's own engine, in an interpreter of its own, behind the interface of every
engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.bench.hardware.gpu import open_gpu, visible_devices
from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineInfo
from minivllm.engines.installed import require
from minivllm.engines.peer_process import peer_environment
from minivllm.engines.piped import PipedEngine
from minivllm.engines.supported_knobs import degrees, is_default, require_supported
from minivllm.engines.vllm.options import VllmOptions
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.costs import architecture_costs
from minivllm.models.load.source import Source, resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.folders import TemporaryFolder
from minivllm.platform.threads import thread_count

CPU_KV_CACHE_GB = 4.0
NOTES = (
    "vLLM answers from a process of its own: a token's time is when it was read from there",
    "vLLM's steps cannot be seen from outside: no breakdown, use of bandwidth or queueing time",
)
DUMMY = "vLLM filled in dummy weights of its own: its tokens are not those of other engines"


class VllmEngine(PipedEngine):
    """Drives `vllm.v1.engine.llm_engine.LLMEngine` step by step through a pipe; see worker.py.

    Args:
        config: the resolved configuration.
        options: the knobs of `engine`.

    Raises:
        BadInput: a knob is set that is not supported, there is no vLLM, or it rejects the
            configuration.
        RuntimeError: the process ended; the last lines that it printed are in the message, and
            all of them in the log.
    """

    peer = "vLLM"
    worker = Path(__file__).with_name("worker.py")

    def __init__(self, config: Mapping[str, Any], options: VllmOptions) -> None:
        require_supported(config, options.support)
        require(config)
        view = Config.of(config)
        begin = time.monotonic()
        source = resolve(config["model"], allow_random=False)[1]
        source.reject_gguf("engine=vllm")
        sizes = ModelConfig.from_dict(source.config)
        self.tokenizer = Tokenizer.load(source.folder)
        self._keep_prefixes = view.measure.prefix_cache == "warm"
        given = {**_arguments(view, source, options.kv_cache_gb), **(options.args or {})}
        random = source.weights == "random"
        config_json = source.config if random else None
        with TemporaryFolder("minivllm-vllm-") as folder:  # until the engine is built
            self._begin(
                str(options.python),
                vllm_environment(view, options.env or {}),
                {"args": given, "config": config_json, "folder": folder},
            )
        self.info = self._describe(view, source, sizes, time.monotonic() - begin)
        self.info.warnings += [DUMMY] * random

    def _describe(
        self, config: Config, source: Source, sizes: ModelConfig, load_s: float
    ) -> EngineInfo:
        costs, _ = architecture_costs(sizes, config["quant"])
        requested, device = config.runtime.device, str(self._settled["device"])
        if requested != "auto" and not requested.startswith(device):
            self.close()
            raise BadInput(
                f"runtime.device={requested}, but the vLLM of engine.python is built for {device}: "
                f"set runtime.device={device}, or give an interpreter with another build"
            )
        return EngineInfo(
            name="vllm",
            computes_here=False,
            weights=source.weights,
            fingerprint=source.fingerprint,
            weights_from=source.weights_from,
            vocab_size=sizes.vocab_size,
            max_model_len=int(self._settled["max_model_len"]),
            eos_token_ids=sizes.eos_token_ids,
            max_num_seqs=int(self._settled["max_num_seqs"]),
            load_s=load_s,
            model={**costs, "device": device if requested == "auto" else requested},
            warnings=[*source.warnings, *NOTES],
        )

    def _sampling(self, max_tokens: int, params: SamplingParams) -> dict[str, Any]:
        """`SamplingParams` of vLLM."""
        eos = () if params.ignore_eos else self.info.eos_token_ids
        return {
            "max_tokens": max_tokens,
            "min_tokens": params.min_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "seed": None if params.greedy else params.seed,
            # vLLM has no tokenizer to know it from: it is one of the stop tokens
            "ignore_eos": True,
            "stop_token_ids": [*eos, *params.stop_token_ids],
        }

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """What vLLM settled on, and steps that gave tokens; see BenchEngine."""
        settled = self._settled
        return {
            "engine": {"version": str(settled["version"]), "steps": float(self._steps)},
            "quant": {"dtype": str(settled["dtype"]), "layers_quantised": 0.0},
            "batching": {
                "largest_batch": float(self._largest_batch),
                "max_num_batched_tokens": float(settled["max_num_batched_tokens"]),
            },
            "cache": {
                "block_size": float(settled["block_size"] or 0),
                "num_blocks": float(settled["num_blocks"] or 0),
                "prefix_caching": float(bool(settled["prefix_caching"])),
            },
        }


def _arguments(config: Config, source: Source, kv_cache_gb: float | None) -> dict[str, Any]:
    """vLLM's `EngineArgs` for a configuration."""
    batching, cache = config.batching, config.cache
    if kv_cache_gb is None and not open_gpu(config.runtime.device).present:
        kv_cache_gb = CPU_KV_CACHE_GB  # vLLM would take nearly all of the memory
    arguments = {
        "dtype": config.quant.dtype,
        "max_model_len": config.model.max_model_len,
        "seed": config.model.seed,
        "skip_tokenizer_init": True,
        "max_num_seqs": batching.max_num_seqs,
        "max_num_batched_tokens": batching.max_num_batched_tokens,
        "enable_chunked_prefill": batching.chunked_prefill,
        "enable_prefix_caching": cache.prefix_caching,
        "disable_log_stats": True,
    }
    if not is_default("cache", "block_size", cache.block_size):
        arguments["block_size"] = cache.block_size
    if kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gb * 1e9)
    if (tensor := degrees(config)[0]) > 1:
        arguments["tensor_parallel_size"] = tensor
    if source.weights == "checkpoint":
        arguments["model"] = str(source.folder)
    return arguments


def vllm_environment(config: Config, further: Mapping[str, Any]) -> dict[str, str]:
    """Variables of vLLM's process: with as many threads as ours, and pinned as little."""
    ours = {
        "OMP_NUM_THREADS": str(thread_count(config["runtime"])),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM's own choice leaves a core idle
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return peer_environment({**ours, **visible_devices(config.runtime.device), **further})
