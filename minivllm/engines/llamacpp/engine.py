"""engine=llamacpp: llama.cpp's llama-server, started with arguments made of the configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.engines.llamacpp.options import LlamaOptions
from minivllm.engines.openai.stream_event import ServerError
from minivllm.engines.peer_process import merged, words
from minivllm.engines.servers.server import HOST, MetricsPage, StartedServer
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.source import Source
from minivllm.platform.support import INT4, INT8, NGRAM
from minivllm.platform.threads import thread_count

KV_TYPE = {"auto": None, "int8": "q8_0"}
FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # by dtype
PACKED = {INT8: "Q8_0", INT4: "Q4_0"}  # by option of quant
TYPE = "{type}"
ROUNDED = (
    "llama.cpp rounds activations to 8 bits for products with packed weights, whatever "
    "quant.activations says"
)


class LlamaServer(StartedServer):
    """`llama-server` of llama.cpp, whose arguments come from the configuration."""

    name = "llamacpp"
    reset_path = "/slots"
    counters = {
        "cache.prefix_tokens_reused": "llamacpp:prompt_tokens_cached_total",
        "engine.prompt_tokens_computed": "llamacpp:prompt_tokens_total",
        "engine.output_tokens": "llamacpp:tokens_predicted_total",
        "speculative.drafts": "llamacpp:spec_decode_num_drafts_total",
        "speculative.draft_tokens": "llamacpp:spec_decode_num_draft_tokens_total",
        "speculative.accepted_tokens": "llamacpp:spec_decode_num_accepted_tokens_total",
        "engine.steps": "llamacpp:n_decode_total",
    }
    log_facts = {
        "engine.version": re.compile(r"build:? (\d+ \(\w+\))"),
        "cache.kv_dtype": re.compile(r"K \((\w+)\):"),
        "quant.repacked_mib": re.compile(r"CPU_REPACK model buffer size = +([\d.]+)"),
        "attention.flash_attn": re.compile(r"flash_attn +=? *(\w+)|Flash Attention .*set to (\w+)"),
    }
    busy = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
    own: LlamaOptions

    def __init__(self, config: Mapping[str, Any], options: LlamaOptions) -> None:
        super().__init__(config, options)
        if self.view["quant"].get("activations") == "none":
            self.info.warnings.append(ROUNDED)

    def command(self, source: Source, port: int) -> list[str]:
        batching, cache = self.view["batching"], self.view["cache"]
        kv_type = self.kv_dtype(KV_TYPE, "use auto or int8 (q8_0), or engine.args.cache_type_k")
        if source.weights == "random":
            raise self.unsupported("model.weights=random", "its weights are those of engine.gguf")
        speculation, pool = self.view["speculative"], cache["num_blocks"]
        drafts = speculation["_target_"] == NGRAM
        threads, context = thread_count(self.view["runtime"]), self._context(source)
        arguments: dict[str, Any] = {
            "host": HOST,
            "port": port,
            "model": str(self._file(source)),
            "ctx-size": pool * cache["block_size"] if pool else context * self.max_num_seqs,
            "kv-unified": True if pool else None,
            "parallel": self.max_num_seqs,
            "batch-size": batching["max_num_batched_tokens"],
            "threads": threads,
            "threads-batch": threads,
            "cache-prompt": self.prefix_caching,
            "cache-ram": 0,  # the prompts that it would keep there cannot be emptied
            "cache-type-k": kv_type,
            "cache-type-v": kv_type,
            "spec-type": "ngram-simple" if drafts else None,
            "spec-ngram-simple-size-n": speculation["prompt_lookup_max"] if drafts else None,
            "spec-ngram-simple-size-m": speculation["num_speculative_tokens"] if drafts else None,
            "device": "none" if self.view.runtime.device == "cpu" else None,
            "metrics": True,
            "slot-save-path": str(self.folder),
            "log-verbosity": 4,
        }
        if cache["block_size"] != 16 and not pool:
            raise self.unsupported(
                f"cache.block_size={cache['block_size']}", "it counts with cache.num_blocks alone"
            )
        given = words(merged(arguments, self.own.args), negated=True)
        return [os.path.expanduser(self.own.program), *given]

    def weights_from(self, source: Source) -> Path | None:
        return self._file(source)

    def _context(self, source: Source) -> int:
        sizes = ModelConfig.from_dict(source.config)
        return int(self.view.model.max_model_len or sizes.max_position_embeddings)

    def _file(self, source: Source) -> Path:
        """The GGUF file: `engine.gguf` with the precision filled in, or the model's own. Raises
        BadInput where it is not there, or fixes another precision than `quant`."""
        quant, given = self.view["quant"], self.own.gguf
        if given is None and source.is_gguf:
            given = str(source.folder)
        if given is None:
            raise BadInput(
                "engine.gguf is missing: give the file with the weights, such as "
                "engine.gguf=qwen3-{type}.gguf, in which {type} is made of quant"
            )
        packed = PACKED.get(str(quant["_target_"]))
        if packed and quant["dtype"] != "bfloat16":
            raise self.unsupported(f"quant.dtype={quant['dtype']}", "the file decides")
        wanted = self.own.gguf_type or packed or FLOATS[quant["dtype"]]
        wants_one = packed or self.own.gguf_type or quant["dtype"] != "bfloat16"
        if TYPE not in given and wants_one:
            raise BadInput(
                f"a {wanted} file is asked for by quant or engine.gguf_type, and engine.gguf="
                f"{given} names one file: write {TYPE} where the precision stands in its name, or "
                "leave the knob out"
            )
        file = Path(os.path.expanduser(given.replace(TYPE, wanted)))
        if not file.is_file():
            raise BadInput(f"engine.gguf={file} is not there: give a file that llama.cpp can read")
        return file.resolve()

    def _with_own_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """Without llama.cpp's own cuts of the distribution, which other engines lack."""
        own = {"top_k": 0, "min_p": 0.0, "cache_prompt": self.prefix_caching}
        return {**own, **super()._with_own_fields(body)}

    def _empty_cache(self) -> None:
        """Erase every slot, once all are at rest."""
        self._await_rest()
        for slot in range(self.max_num_seqs):
            address = self._client.beside(f"slots/{slot}?action=erase")
            try:
                self._client.wait(self._client.ask("POST", address))
            except (OSError, ServerError) as error:
                raise BadInput(f"{self.starter}: POST {address}: {error}") from None

    def settings(self, now: MetricsPage) -> dict[str, float | str]:
        """The precision of the file, as the server says it."""
        try:
            listed = self._client.wait(self._client.models())
            meta = listed["data"][0]["meta"]
            kind, size = str(meta["ftype"]), float(meta["size"])
        except (OSError, ServerError, LookupError, TypeError, ValueError):
            return {}  # an older server does not say
        # ggml rounds activations to blocks of 8 bits for a product with any packed weights.
        activations = "none" if kind in FLOATS.values() else "int8"
        return {
            "quant.file_type": kind,
            "quant.file_bytes": size,
            "quant.activations": activations,
        }

    def derived(
        self, now: MetricsPage, before: MetricsPage, counted: Mapping[str, float | None]
    ) -> dict[str, float | str]:
        """See StartedServer; all prompt tokens query the cache."""
        reused, computed = (
            counted.get(name)
            for name in ("cache.prefix_tokens_reused", "engine.prompt_tokens_computed")
        )
        queried = None if reused is None or computed is None else reused + computed
        return super().derived(now, before, {**counted, "cache.prefix_tokens_queried": queried})
