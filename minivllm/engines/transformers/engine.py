"""engine=transformers: transformers' `generate` in static batches, behind the interface of every
engine."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineOutput
from minivllm.engines.engine_pictures import TakesImages
from minivllm.engines.transformers.options import TransformersOptions
from minivllm.engines.transformers.pretrained import PretrainedEngine
from minivllm.models.vision.inputs import RequestInputs

STATIC_CACHE_STEP = 256  # tokens that static caches are rounded up to
STEP_NOTE = (
    "a step's forward_ms is one turn of transformers' loop, sampling and stopping checks included; "
    "steps count the work of requests, not padding or finished requests"
)


class _Cancelled(Exception):
    """Ends a call of generate from within its streamer."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A batch is over."""

    error: BaseException | None


@dataclass(slots=True)
class _Request:
    request_id: str
    prompt: list[int]
    max_tokens: int  # tokens
    params: SamplingParams
    inputs: RequestInputs | None = None
    produced: int = 0

    @property
    def decoding(self) -> tuple[object, ...]:
        """What requests of one call of generate must have in common."""
        params = self.params
        return params.temperature, params.top_k, params.top_p, params.ignore_eos


class _Batch:
    """The requests of one call of generate, and the streamer that it hands every step's tokens to.

    Args:
        requests: in the order of the batch's rows.
        eos: token ids that end a request.
        engine: takes the tokens and the counts.
    """

    def __init__(
        self, requests: list[_Request], eos: frozenset[int], engine: TransformersEngine
    ) -> None:
        self.requests = requests
        self.live = list(enumerate(requests))
        self.width = max(len(request.prompt) for request in requests)
        self.ends = frozenset() if requests[0].params.ignore_eos else eos
        self.cancelled, self.encoder_flops = False, 0.0  # the latter of the first step
        self.started_s = self._turn_s = time.monotonic()
        self._turns = 0
        self._engine = engine

    def put(self, value: torch.Tensor) -> None:
        """Called by generate: first with the prompts, [rows, width], then each step with [rows]
        tokens."""
        if self.cancelled:
            raise _Cancelled
        if value.dim() > 1:
            return
        self._count(time.monotonic())
        token_ids, outputs, live = value.tolist(), [], []
        for row, request in self.live:
            token = token_ids[row]
            request.produced += 1
            reason = (
                "stop"
                if token in self.ends
                else "length"
                if request.produced >= request.max_tokens
                else None
            )
            started = self.started_s if request.produced == 1 else None
            outputs.append(EngineOutput(request.request_id, (token,), reason, started))
            if reason is None:
                live.append((row, request))
        self.live = live
        if outputs:
            self._engine.results.put(outputs)
        if not live:
            # generate knows where answers end by a token, but not by a length of their own
            raise _Cancelled

    def end(self) -> None:
        """Called by generate; the batch is over when generate has returned."""

    def _count(self, now: float) -> None:
        """Add the step that ends now to the engine's records, before its tokens change the
        batch."""
        live, rows = len(self.live), len(self.requests)
        context = sum(len(request.prompt) + request.produced for _, request in self.live)
        tokens = live if self._turns else context
        allocated = rows * (self._engine.cache_length or self.width + self._turns)
        self._engine.step_rows.append(
            {
                "start_s": self._turn_s,
                "num_requests": live,
                "num_tokens": tokens,
                "num_prefill_tokens": 0 if self._turns else tokens,
                "context_tokens": context,
                "waiting": len(self._engine.waiting),
                "kv_slots_wasted": allocated - context,
                "kv_slots_allocated": allocated,
                "encoder_flops": 0.0 if self._turns else self.encoder_flops,
                "forward_ms": (now - self._turn_s) * 1e3,
            }
        )
        self._engine.counts["wasted_decode_tokens"] += rows - live
        self._turn_s = now
        self._turns += 1


class TransformersEngine(TakesImages, PretrainedEngine):
    """Static batching, as transformers' users have it: the next batch starts when the last answer
    is done.

    `poll` starts a batch of what is waiting. `generate` runs in a thread of its own, and a streamer
    passes each step's tokens on when they are there. A request that is done is reported at once;
    its row goes on in the batch, as generate does it, and what it computes then is counted as
    wasted.

    Args:
        config: the resolved configuration.
        options: the knobs of `engine`.

    Raises:
        BadInput: a knob is set that is not supported, transformers is missing, or the model cannot
            be loaded.
    """

    def __init__(self, config: Mapping[str, Any], options: TransformersOptions) -> None:
        super().__init__(config, options)
        self._static = options.mode == "static_cache"
        self._compile = options.compile
        self._cache: Any = None  # a StaticCache, kept while batches fit it
        self._cache_rows = self._cache_length = 0
        self.pictures = self._loaded.pictures(self.tokenizer, self._view.vision)
        self._batch_size = options.batch_size
        self._describe("transformers", self._batch_size, STEP_NOTE)
        self._eos = frozenset(self.info.eos_token_ids)
        self._batch: _Batch | None = None
        self._ids: set[str] = set()  # of unfinished requests
        self.waiting: deque[_Request] = deque()
        self.results: queue.SimpleQueue[list[EngineOutput] | _Ended] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[tuple[_Batch, int] | None] = queue.SimpleQueue()
        self._clear()
        self._thread = threading.Thread(target=self._work, name="generate", daemon=True)
        self._thread.start()

    def _clear(self) -> None:
        self.step_rows: list[dict[str, Any]] = []
        self.counts = dict.fromkeys(("generate_calls", "padded_tokens", "wasted_decode_tokens"), 0)
        self._largest_batch = 0

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        max_tokens = self.tokens_wanted(request_id, prompt_token_ids, params, self._ids)
        self._ids.add(request_id)
        images = None if self.pictures is None else self.pictures.take(request_id, prompt_token_ids)
        self.waiting.append(_Request(request_id, prompt_token_ids, max_tokens, params, images))

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Wait for the next tokens, with a batch started if there is none; see BenchEngine."""
        if self._batch is None:
            if not self.waiting:
                return []
            self._start()
        outputs: list[EngineOutput] = []
        try:
            self._take(
                self.results.get(timeout=None if timeout_s is None else max(timeout_s, 0)), outputs
            )
            while not self.results.empty():
                self._take(self.results.get(), outputs)
        except queue.Empty:
            pass
        return outputs

    def _start(self) -> None:
        """Hand the next requests to the thread: as many as fit, of the same decoding."""
        requests = [self.waiting.popleft()]
        while (
            self.waiting
            and len(requests) < self._batch_size
            and self.waiting[0].decoding == requests[0].decoding
        ):
            requests.append(self.waiting.popleft())
        self._batch = batch = _Batch(requests, self._eos, self)
        self.counts["generate_calls"] += 1
        self.counts["padded_tokens"] += sum(
            batch.width - len(request.prompt) for request in requests
        )
        self._largest_batch = max(self._largest_batch, len(requests))
        # The number of threads is each thread's own, and may have been changed in this one.
        self._jobs.put((batch, torch.get_num_threads()))

    def _take(self, result: list[EngineOutput] | _Ended, outputs: list[EngineOutput]) -> None:
        if isinstance(result, _Ended):
            self._batch = None
            if result.error is not None:
                raise result.error
            return
        self._ids.difference_update(output.request_id for output in result if output.finish_reason)
        outputs += result

    def _work(self) -> None:
        """The thread: one batch after the other, until there is None."""
        while (job := self._jobs.get()) is not None:
            batch, threads = job
            error: BaseException | None = None
            try:
                torch.set_num_threads(threads)
                self._generate(batch)
                if batch.live:
                    raise RuntimeError(
                        f"generate returned with {len(batch.live)} requests unfinished"
                    )
            except _Cancelled:
                pass
            except BaseException as caught:
                error = caught
            del batch, job
            self.results.put(_Ended(error))

    def _generate(self, batch: _Batch) -> None:
        """Run a batch, left-padded, to the end of its longest answer."""
        device, params = self._loaded.device, batch.requests[0].params
        pads = [batch.width - len(request.prompt) for request in batch.requests]
        rows = [
            [0] * pad + request.prompt for pad, request in zip(pads, batch.requests, strict=True)
        ]
        mask = [[0] * pad + [1] * (batch.width - pad) for pad in pads]
        options: dict[str, Any] = {"do_sample": False}
        if not params.greedy:
            options = {
                "do_sample": True,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
            }
            if params.seed is not None:
                torch.manual_seed(params.seed)  # transformers draws a batch from one generator
        longest = max(request.max_tokens for request in batch.requests)
        token_ids = torch.tensor(rows, device=device)
        further = self._pixels(batch, token_ids)
        if self._static:
            further["past_key_values"] = self._static_cache(len(rows), batch.width + longest)
            options |= self._compiling()
        self._loaded.model.generate(
            input_ids=token_ids,
            attention_mask=torch.tensor(mask, device=device),
            generation_config=self._transformers.GenerationConfig(
                max_new_tokens=longest,
                eos_token_id=sorted(batch.ends) or None,
                pad_token_id=0,
                **options,
            ),
            streamer=batch,
            **further,
        )

    def _pixels(self, batch: _Batch, token_ids: torch.Tensor) -> dict[str, Any]:
        """What the model takes of the images of a batch with these tokens, int64 [R, T]."""
        images = [one.inputs.images if one.inputs else () for one in batch.requests]
        if self.pictures is None or not any(images):
            return {}
        batch.encoder_flops = self._loaded.encoder_flops(images)
        processor = self.pictures.prompts.processor
        arrays = processor.reference_inputs(images, token_ids.numpy(force=True))
        device, dtype = self._loaded.device, self._loaded.model.dtype
        values = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        return {name: v.to(dtype) if v.is_floating_point() else v for name, v in values.items()}

    def _static_cache(self, rows: int, length: int) -> Any:
        """An empty cache for so many rows and at least so many tokens; the same again while they
        fit.

        A compiled step is compiled again for another shape, so lengths are rounded up: a warm-up
        with shorter answers then uses the shape that is measured.
        """
        # Padding to one width may take more than any request's own length, and more than the
        # model's longest.
        length = max(
            length,
            min(-(-length // STATIC_CACHE_STEP) * STATIC_CACHE_STEP, self.info.max_model_len),
        )
        if self._cache is not None and (self._cache_rows, self._cache_length) == (rows, length):
            self._cache.reset()
            return self._cache
        self._cache = None  # first make room
        self._cache = self._transformers.StaticCache(
            self._loaded.model.config, max_cache_len=length
        )
        self._cache_rows, self._cache_length = rows, length
        return self._cache

    @property
    def cache_length(self) -> int | None:
        """Slots of each row of a static cache; None where the cache grows."""
        return None if self._cache is None else self._cache_length

    def _compiling(self) -> dict[str, Any]:
        """Options of `GenerationConfig`: transformers compiles by itself on a GPU, and
        elsewhere by this option."""
        if not self._compile:
            return {"disable_compile": True}
        compiling = self._transformers.CompileConfig(fullgraph=False)
        if self._loaded.device.type == "cpu":
            compiling.mode = "default"  # CUDA graphs are what the preset mode is for
            compiling._compile_all_devices = True
        return {"compile_config": compiling}

    def reset(self) -> None:
        """See BenchEngine. A running batch ends after its current step."""
        self.waiting.clear()
        if self._batch is not None:
            self._batch.cancelled = True
            while not isinstance(self.results.get(), _Ended):
                pass
            self._batch = None
        self._ids.clear()
        if self.pictures is not None:
            self.pictures.reset()
        self._clear()
        self._restart_peak()

    def steps(self) -> list[dict[str, Any]]:
        """One row a turn of generate's loop; see BenchEngine and STEP_NOTE."""
        return list(self.step_rows)

    def liveness(self) -> dict[str, dict[str, float | str]]:
        counts: dict[str, float | str] = {name: float(count) for name, count in self.counts.items()}
        if self._static:
            model = self._loaded.model
            counts["static_cache_tokens"] = float(self.cache_length or 0)
            counts["compiled"] = float(getattr(model, "_compiled_call", None) is not None)
        return {
            "engine": counts,
            "quant": self._quant(),
            "attention": {
                "kernel": self._loaded.attn_implementation,
                "steps": float(len(self.step_rows)),
            },
            "batching": {"largest_batch": float(self._largest_batch)},
        }

    def close(self) -> None:
        self.reset()
        self._jobs.put(None)
        self._thread.join()
        self._release()
