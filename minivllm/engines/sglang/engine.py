"""engine=sglang: `sglang.launch_server`, started with arguments made of the configuration.

SGLang has no build for CPUs on PyPI: its arguments and metrics are those of its documentation,
tested against a stand-in server and not against SGLang itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minivllm.bench.hardware.gpu import visible_devices
from minivllm.engines.peer_process import merged, words
from minivllm.engines.servers.server import (
    HOST,
    MetricsPage,
    StartedServer,
    interpreter,
)
from minivllm.engines.sglang.options import SglangOptions
from minivllm.engines.supported_knobs import degrees, is_default
from minivllm.models.load.source import Source
from minivllm.platform.support import FP8, NGRAM

KV_DTYPE = {"auto": None, "fp8": "fp8_e4m3"}
UNMEASURED = (
    "engine=sglang was written from SGLang's documentation and tested against a stand-in alone: "
    "check the command in run.log"
)


class SglangServer(StartedServer):
    """SGLang's server, whose arguments come from the configuration."""

    name = "sglang"
    notes = (*StartedServer.notes, UNMEASURED)
    reset_path = "/flush_cache"
    counters = {
        "cache.prefix_tokens_queried": "sglang:prompt_tokens_total",
        "cache.prefix_tokens_reused": "sglang:cached_tokens_total",
        "batching.preemptions": "sglang:num_retracted_requests_total",
        "speculative.drafts": "sglang:spec_verify_calls_total",
        "engine.output_tokens": "sglang:generation_tokens_total",
    }
    queue = "sglang:queue_time_seconds"
    log_facts = {
        "cache.kv_dtype": re.compile(r"kv_cache_dtype='(\w+)'"),
        "quant.quantization": re.compile(r"\bquantization='(\w+)'"),
        "attention.backend": re.compile(r"attention_backend='(\w+)'"),
        "runtime.cuda_graphs": re.compile(r"Capture cuda graph (end)"),
        "runtime.overlap": re.compile(r"disable_overlap_schedule=(\w+)"),
    }
    own: SglangOptions

    def command(self, source: Source, port: int) -> list[str]:
        batching, cache, quant = (self.view[group] for group in ("batching", "cache", "quant"))
        device = self.view.runtime.device
        tensor, replicas = degrees(self.view)
        usual_page = is_default("cache", "block_size", cache["block_size"])
        step = batching["max_num_batched_tokens"]
        speculation = self.view["speculative"]
        drafts = speculation["_target_"] == NGRAM
        arguments: dict[str, Any] = {
            "host": HOST,
            "port": port,
            "model-path": str(self.folder if source.weights == "random" else source.folder),
            "dtype": quant["dtype"],
            "quantization": "fp8" if quant["_target_"] == FP8 else None,
            "context-length": self.view.model.max_model_len,
            "random-seed": self.view.model.seed,
            "device": None if device == "auto" else device.partition(":")[0],
            "tp-size": tensor if tensor > 1 else None,
            "dp-size": replicas if replicas > 1 else None,
            "max-running-requests": self.max_num_seqs,
            "max-prefill-tokens": step,
            "chunked-prefill-size": step if batching["chunked_prefill"] else -1,
            "disable-radix-cache": not self.prefix_caching,
            "page-size": None if usual_page else cache["block_size"],
            "kv-cache-dtype": self.kv_dtype(KV_DTYPE, "use auto or fp8"),
            "speculative-algorithm": "NGRAM" if drafts else None,
            "speculative-num-draft-tokens": (
                speculation["num_speculative_tokens"] if drafts else None
            ),
            "enable-metrics": True,
            "enable-cache-report": True,  # so that each answer says what was cached
            **self.dummy_weights(source),
        }
        given = words(merged(arguments, self.own.args), negated=False)
        return [interpreter(self.own.python), "-m", "sglang.launch_server", *given]

    def environment(self) -> dict[str, str]:
        """The GPUs that the server may see."""
        return visible_devices(self.view.runtime.device)

    def derived(
        self, now: MetricsPage, before: MetricsPage, counted: Mapping[str, float | None]
    ) -> dict[str, float | str]:
        """Adds `speculative.tokens_per_draft`: of drafts SGLang counts the verifications alone."""
        found = super().derived(now, before, counted)
        steps, tokens = counted.get("speculative.drafts"), counted.get("engine.output_tokens")
        if self.view["speculative"]["_target_"] == NGRAM and steps and tokens is not None:
            found["speculative.tokens_per_draft"] = tokens / steps
        return found
