"""engine=transformers_continuous: transformers' continuous batching, behind the interface of every
engine.

`generate_batch` takes a list of prompts and returns when all are done; requests that arrive over
time go to the manager that it is made of, which is what is driven here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineOutput
from minivllm.engines.supported_knobs import is_default
from minivllm.engines.transformers.options import TransformersContinuousOptions
from minivllm.engines.transformers.pretrained import PretrainedEngine
from minivllm.errors import BadInput
from minivllm.platform.support import INSTALL

NO_EOS = -1
PAGED = "paged|"
SENTINEL = "reset"
WAIT_S = 0.2  # between two looks at whether the thread is still alive
NOTE = (
    "transformers' continuous batching shows no steps: no breakdown, use of bandwidth or "
    "queueing time"
)


@dataclass(slots=True)
class _Request:
    eos: frozenset[int]
    produced: int = 0


class TransformersContinuousEngine(PretrainedEngine):
    """Feeds a `ContinuousBatchingManager` and takes its streams; it runs in a thread of its own.

    Args:
        config: the resolved configuration.
        options: the knobs of `engine`.

    Raises:
        BadInput: a knob is set that is not supported, transformers is missing, or the model cannot
            be loaded.
    """

    def __init__(self, config: Mapping[str, Any], options: TransformersContinuousOptions) -> None:
        super().__init__(config, options)
        view = self._view
        self._compile_level = options.compile_level
        self._batching, self._cache = view.batching, view.cache
        self._keep_prefixes = view.measure.prefix_cache == "warm"
        self._unfinished: dict[str, _Request] = {}
        self._requests = self._most = 0
        self._sampling: SamplingParams = view.decoding
        self._decoding = _decoding(self._sampling)
        self._start()
        self._describe("transformers_continuous", self._batching.max_num_seqs, NOTE)

    def _start(self) -> None:
        """A manager with an empty cache, at work."""
        temperature, top_k, top_p = self._decoding
        options: dict[str, Any] = {"do_sample": False}
        if temperature:
            options = {
                "do_sample": True,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
            }
        settings = self._settings()
        # older releases: the name of the attention says it
        if not hasattr(settings, "auto_switch_to_flash"):
            name = self._loaded.attn_implementation.removeprefix(PAGED)
            self._loaded.model.set_attn_implementation(PAGED + name)
        try:
            self._manager = self._loaded.model.init_continuous_batching(
                generation_config=self._transformers.GenerationConfig(
                    eos_token_id=NO_EOS, **options
                ),
                continuous_batching_config=settings,
            )
        except (ImportError, ValueError) as error:
            raise BadInput(f"transformers rejects this continuous batching: {error}") from error
        self._manager.start()
        self._finish_one()  # the cache is made within the thread: now, and not while requests wait

    def _settings(self) -> Any:
        """transformers' `ContinuousBatchingConfig` for the configuration."""
        batching, cache, seed = self._batching, self._cache, self._sampling.seed
        options = {
            "max_requests_per_batch": batching.max_num_seqs,
            "max_batch_tokens": batching.max_num_batched_tokens,
            "num_blocks": cache.num_blocks,
            "max_memory_percent": cache.memory_fraction,
            "allow_block_sharing": cache.prefix_caching,
            "auto_switch_to_flash": False,  # attn_implementation says which
            "default_compile_level": self._compile_level,
            # one generator for all, whatever a request's own seed
            "seed": 0 if seed is None else seed,
        }
        kind = self._transformers.ContinuousBatchingConfig
        known = {field.name for field in fields(kind)}
        if "auto_switch_to_flash" not in known:
            del options["auto_switch_to_flash"]
        if not is_default("cache", "block_size", cache.block_size):
            options["page_size" if "page_size" in known else "block_size"] = cache.block_size
        if unknown := options.keys() - known:
            raise BadInput(
                f"this transformers has no {', '.join(sorted(unknown))} in "
                f"ContinuousBatchingConfig: {INSTALL} --upgrade"
            )
        return kind(**options)

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        max_tokens = self.tokens_wanted(request_id, prompt_token_ids, params, self._unfinished)
        if _decoding(params) != self._decoding:
            raise BadInput(
                f"request {request_id}: all requests of "
                f"{TransformersContinuousOptions.support.engine} share one way of decoding"
            )
        eos = frozenset(() if params.ignore_eos else self.info.eos_token_ids)
        self._requests += 1
        self._unfinished[request_id] = _Request(eos)
        self._most = max(self._most, len(self._unfinished))
        self._add(request_id, prompt_token_ids, max_tokens, eos)

    def _add(
        self, request_id: str, prompt: list[int], max_tokens: int, eos: frozenset[int]
    ) -> None:
        self._manager.add_request(
            prompt,
            request_id,
            max_new_tokens=max_tokens,
            streaming=True,
            eos_token_id=sorted(eos) or [NO_EOS],
        )

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Wait for the next tokens; see BenchEngine."""
        outputs: list[EngineOutput] = []
        deadline = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
        while self._unfinished:
            # 1e-4: a queue that does not wait at all gives nothing
            wait = 0.0 if outputs else deadline - time.monotonic()
            result = self._manager.get_result(timeout=max(1e-4, wait))
            if result is None:
                self._check_alive()
                return outputs
            if (output := self._output(result)) is not None:
                outputs.append(output)
        return outputs

    def _check_alive(self) -> None:
        if not self._manager.is_running():
            raise RuntimeError("transformers' generation thread has ended; the log says why")

    def _output(self, result: Any) -> EngineOutput | None:
        """The new tokens of a result; None if its request was aborted."""
        if result.error is not None:
            raise RuntimeError(f"transformers: {result.error}")
        name, request = result.request_id, self._unfinished.get(result.request_id)
        if request is None:
            return None
        token_ids = tuple(result.generated_tokens[request.produced :])
        request.produced += len(token_ids)
        if not result.is_finished():
            return EngineOutput(name, token_ids)
        del self._unfinished[name]
        return EngineOutput(name, token_ids, "stop" if token_ids[-1] in request.eos else "length")

    def reset(self) -> None:
        """See BenchEngine. Prefixes are forgotten with the manager that kept them."""
        for request_id in self._unfinished:
            self._manager.cancel_request(request_id)
        self._unfinished.clear()
        self._requests = self._most = 0
        if self._cache.prefix_caching and not self._keep_prefixes:
            self._manager.stop(block=True)
            self._start()
        else:
            self._finish_one()
        self._restart_peak()

    def _finish_one(self) -> None:
        """Run one short request to its end: all earlier requests are then over."""
        self._unfinished[SENTINEL] = _Request(frozenset())
        self._add(SENTINEL, [0], 1, frozenset())
        while SENTINEL in self._unfinished:
            self.poll()

    def liveness(self) -> dict[str, dict[str, float | str]]:
        settled = self._manager.continuous_batching_config
        return {
            "engine": {
                "requests": float(self._requests),
                "cuda_graphs": float(any(settled.cuda_graph_booleans)),
                "async_batching": float(bool(settled.use_async_batching)),
            },
            "quant": self._quant(),
            "attention": {"kernel": self._loaded.attn_implementation.removeprefix(PAGED)},
            "batching": {"most_at_once": float(self._most)},
            "cache": {
                "block_size": float(getattr(settled, "page_size", None) or settled.block_size),
                "num_blocks": float(settled.num_blocks or 0),
                "prefix_caching": float(settled.allow_block_sharing),
            },
        }

    def close(self) -> None:
        for request_id in self._unfinished:
            self._manager.cancel_request(request_id)
        self._manager.stop(block=True)
        del self._manager
        self._release()


def _decoding(params: SamplingParams) -> tuple[float, int, float]:
    """What one manager has in common for all of its requests."""
    return params.temperature, params.top_k, params.top_p
