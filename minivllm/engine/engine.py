"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from minivllm.cache.kv import KVCache
from minivllm.cache.tiers.transfer import BlockTransfers
from minivllm.engine.events import StepEnded, StepTimed
from minivllm.engine.extension import StepTimer
from minivllm.engine.input_processor import InputProcessor
from minivllm.engine.launcher import InFlightStep, Launcher, SampledToken
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request, RequestState, placeholder
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.step import StepPlan
from minivllm.engine.tokenizer import Detokenizer
from minivllm.errors import BadInput, NonFiniteLogits
from minivllm.models.load.loading import LoadedModel
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.vision.inputs import RequestInputs


class TokenOutput(NamedTuple):
    """One new token of one request."""

    request: Request
    token_id: int | None  # None: the request ended without a further one
    text: str  # new text that is certain; "" without a tokenizer or while a character is incomplete
    finish_reason: str | None
    logprobs: dict[int, float] | None = None
    stop_reason: int | str | None = None  # the request's own stop that ended it


@dataclass
class Overlap:
    """Whether steps overlap, and counters of it."""

    enabled: bool
    steps: int = 0  # launched before the tokens of the step before were read
    wasted_tokens: int = 0  # computed for requests that had ended


class Engine:
    """Owns scheduler, launcher and cache, and moves requests through them.

    Args:
        loaded: the model and what it says of itself.
        tokenizer: None serves token ids only.
        scheduler: plans steps, with its cache.
        launcher: carries them out, with an executor and with extensions for requests that need more
            than the core does.
        kv: the memory of the cache.
        transfers: moves blocks between tiers.
        seed: seeds of requests that bring none are derived from it.
        overlap: plan and launch the next step before the tokens of one are read.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer | None,
        scheduler: Scheduler,
        launcher: Launcher,
        kv: KVCache,
        transfers: BlockTransfers,
        seed: int = 0,
        overlap: bool = False,
    ) -> None:
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.max_model_len = loaded.max_model_len
        self.scheduler, self.cache, self.events = scheduler, scheduler.cache, scheduler.events
        self.launcher, self.runner = launcher, launcher.runner
        self.kv, self.transfers = kv, transfers
        self.input_processor = InputProcessor(
            loaded.config.vocab_size,
            self.max_model_len,
            loaded.config.eos_token_ids,
            tokenizer,
            seed,
            scheduler.now,
            launcher.extensions,
        )
        self.overlap = Overlap(overlap)
        self._in_flight: InFlightStep | None = None  # launched; its tokens are not read yet
        self._requests: dict[str, Request] = {}
        self._detokenizers: dict[str, Detokenizer] = {}
        self._last_step_end: float | None = None

    @cached_property
    def timer(self) -> StepTimer:
        """What times steps, made when something first listens."""
        return self.launcher.extensions.step_timer(self)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_unfinished

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        detokenize: bool = True,
        inputs: RequestInputs | None = None,
    ) -> Request:
        """Queue a request.

        With `params.n` above 1 the further samples are requests of their own, in the `group` of the
        one returned, with ids that end in ".1", ".2", ...: they start once the prompt is computed,
        on the same blocks. Members of a joint group start in the same way, but only the request
        returned has outputs, all of them at the end.

        Args:
            request_id: unique among unfinished requests.
            prompt_token_ids: the prompt.
            params: how to decode.
            detokenize: also make text (always so when there are stop strings or a grammar).
            inputs: the images that some of the prompt's tokens stand for.

        Raises:
            BadInput: the prompt is empty, too long or holds unknown ids; the request can never fit;
                stop strings or structured outputs without a tokenizer; a grammar is wrong.
        """
        if request_id in self._requests:
            raise BadInput(f"request {request_id} is already being served; choose another id")
        request = self.input_processor.request(request_id, prompt_token_ids, params)
        for member in (request, *request.unstarted):
            member.inputs = inputs
            if member.request_id in self._requests:
                raise BadInput(
                    f"request {member.request_id} is being served, and a sample of {request_id} "
                    "would have its id; choose another id"
                )
        self.scheduler.add(request)
        if request.is_joint:
            self._requests[request_id] = request
            return request
        for one in (request, *request.unstarted):
            self._requests[one.request_id] = one
            if self.tokenizer is not None and (detokenize or params.reads_text):
                self._detokenizers[one.request_id] = self._detokenizer(one)
        return request

    def _detokenizer(self, request: Request) -> Detokenizer:
        assert self.tokenizer is not None
        if request.params.reads_text:
            return self.launcher.extensions.detokenizer(self.tokenizer, request)
        skips = request.params.skip_special_tokens
        return Detokenizer(self.tokenizer, request.token_ids, skips)

    def abort(self, request_id: str) -> None:
        """End a request early, and samples of it that have not started; unknown and finished ones
        are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            for one in (*request.unstarted, request):
                if one.request_id in self._requests:  # Joint members end with the first one.
                    self._finish(one, "abort")

    def step(self, patience_s: float = math.inf) -> list[TokenOutput]:
        """Plan, launch, read and accept one step; the tokens it produced, or with overlap those of
        the step before.

        Args:
            patience_s: most seconds to sleep where the policy waits for a fuller batch.
        """
        mark, timed = self.runner.mark, bool(self.events.listeners[StepTimed])
        begin = mark("schedule")
        ended = self._last_step_end or begin
        plan = self.scheduler.plan()
        if any(plan.transfers) or self.transfers.unfinished:
            self.transfers.run(plan.transfers)
        outputs = [output for request in plan.shed for output in self._forget(request)]
        previous = self._in_flight
        if not plan.scheduled and previous is None:
            if plan.next_poll_s is not None and not outputs:
                self._sleep(plan.next_poll_s, patience_s)
            mark("")
            return self._ended(plan, outputs)
        planned = mark("prepare" if plan.scheduled else "sample")
        launched = self._launch(plan, previous) if plan.scheduled else None
        # Only now: if the launch raises, the tokens of the previous step are still to be read.
        self._in_flight = None
        earlier = [] if previous is None else self.launcher.read(previous)
        deferred = launched is not None and self.overlap.enabled and launched.deferrable
        sampled = [] if launched is None or deferred else self.launcher.read(launched)
        if timed:
            self.timer.emit_pending()
        read = mark("sample" if deferred and previous is None else "emit")
        if previous is not None:
            outputs += self._accept_tokens(previous, earlier)
        if launched is None:
            mark("")
            return self._ended(plan, outputs)
        self._note_computed(launched)
        if timed:
            self.timer.computed()
        if deferred:
            self._defer(launched)
        else:
            outputs += self._accept_tokens(launched, sampled)
        if launched.rows.joint:
            outputs += self._advance(launched)
        end = mark("")
        if timed:
            marks = (ended, begin, planned, *launched.ends, read, end)
            self.timer.emit(plan, launched.seq_lens, marks)
            if not deferred or not self._requests:
                self.timer.emit_pending()  # The tokens are read, or no request is left.
        if self._requests:
            self._last_step_end = end
        return self._ended(launched.plan, outputs)

    def _ended(self, plan: StepPlan, outputs: list[TokenOutput]) -> list[TokenOutput]:
        if self.events.listeners[StepEnded]:
            self.events.emit(StepEnded(self.scheduler.now(), plan))
        return outputs

    def _sleep(self, until_s: float, patience_s: float) -> None:
        if self.scheduler.policy.wake_at(self.scheduler.waiting) is not None:
            self._last_step_end = None  # Waiting for a fuller batch is no gap between steps.
        time.sleep(min(max(0.0, until_s - self.scheduler.now()), patience_s))

    def _launch(self, plan: StepPlan, previous: InFlightStep | None) -> InFlightStep:
        """Launch a step. Its requests may continue tokens of the previous step that are not read
        yet."""
        follows = previous is not None and previous.sampled is not None
        launched = self.launcher.launch(plan, follows)
        if self.events.listeners[StepTimed]:
            self.timer.launched()
        self.overlap.steps += previous is not None
        return launched

    def _note_computed(self, launched: InFlightStep) -> None:
        """Report computed tokens to the scheduler, and start group members that waited for the
        prompt."""
        for part in launched.plan.scheduled:
            if part.request.state is RequestState.DONE:
                # The request's last token arrived while this step was computed.
                self.overlap.wasted_tokens += part.num_tokens
            else:
                self.scheduler.computed(part)
        for request, member in launched.rows.forks:
            self.scheduler.fork(request, member)

    def _defer(self, launched: InFlightStep) -> None:
        """Read a step's tokens after the next launch; until then placeholders stand for them."""
        self._in_flight = launched
        for row, request in enumerate(launched.rows.requests):
            if request.state is not RequestState.DONE:
                request.token_ids.append(placeholder(row))

    def _accept_tokens(
        self, launched: InFlightStep, sampled: list[SampledToken]
    ) -> list[TokenOutput]:
        """Append sampled tokens to their requests, except those that have ended meanwhile."""
        outputs = []
        for request, token in zip(launched.rows.requests, sampled, strict=True):
            if request.state is not RequestState.DONE:
                if request.token_ids[-1] < 0:
                    request.token_ids.pop()
                outputs.append(self.accept(request, token.token_id, token.logprobs))
        return outputs

    def _advance(self, launched: InFlightStep) -> list[TokenOutput]:
        """Advance the joint groups of a step; the outputs of the groups that are finished."""
        outputs: list[TokenOutput] = []
        for request, token_ids, reason in self.launcher.extensions.joint.advance(
            list(launched.rows.joint), launched.choices, self.scheduler
        ):
            if request.error is not None:
                outputs.append(self._fail(request))
                continue
            self._finish(request, reason)
            outputs += [TokenOutput(request, token, "", None) for token in token_ids[:-1]]
            outputs.append(TokenOutput(request, token_ids[-1], "", reason))
        return outputs

    def accept(
        self, request: Request, token_id: int, logprobs: dict[int, float] | None
    ) -> TokenOutput:
        """Add a sampled token to its request and end the request if that was the last one, or it
        has an error."""
        if token_id < 0:
            request.error = request.error or NonFiniteLogits.of(
                request.request_id, request.num_tokens
            )
        if request.error is not None:
            return self._fail(request)
        params, reason, text = request.params, request.append(token_id), ""
        end_token_id = token_id if reason == "stop" else None
        stop_reason: int | str | None = end_token_id
        if end_token_id not in params.stop_token_ids:
            stop_reason = None
        detokenizer = self._detokenizers.get(request.request_id)
        if detokenizer is not None:
            if reason != "stop" or params.include_stop_str_in_output:
                may_stop = request.may_stop(request.num_tokens)
                text = detokenizer.push(token_id, may_stop)
            if reason is not None:
                text += detokenizer.finish(end_token_id)
            if detokenizer.stop_reason is not None:
                reason, stop_reason = "stop", detokenizer.stop_reason or None
        if reason is not None:
            self._finish(request, reason)
        return TokenOutput(request, token_id, text, reason, logprobs, stop_reason)

    def _fail(self, request: Request) -> TokenOutput:
        """End a request for its `error`. Keys and values that may be NaN are cleared, so that no
        other request reads them."""
        if isinstance(request.error, NonFiniteLogits):
            for one in request.joint_members:
                self.kv.clear(self.cache.discard(one.cache))
        self._finish(request, "error")
        return TokenOutput(request, None, "", "error")

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        self._forget(request)

    def _forget(self, request: Request) -> list[TokenOutput]:
        """Drop a request that has ended, with samples that will never start; their last
        outputs."""
        ended = (request,) if request.is_joint else (request, *request.unstarted)
        for one in ended:
            del self._requests[one.request_id]
            if one.token_ids[-1] < 0:
                one.token_ids.pop()  # the placeholder of a token that is not needed
            self._detokenizers.pop(one.request_id, None)
        if not self._requests:
            self._last_step_end = None  # Idle time is no gap between steps.
        return [TokenOutput(one, None, "", request.finish_reason) for one in ended]

    def abort_all(self) -> None:
        """End every request; the cache is empty afterwards."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self.timer.emit_pending()

    def close(self) -> None:
        """Remove what the cache has on disk. The engine cannot be used afterwards."""
        self.transfers.close()
