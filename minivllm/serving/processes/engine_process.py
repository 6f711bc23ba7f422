"""The process of the engine: requests come in and tokens go out over a channel, step by step."""

from __future__ import annotations

import time
import traceback
from contextlib import ExitStack
from typing import Any

from minivllm.engine.engine import Engine, TokenOutput
from minivllm.engine.events import StateChanged
from minivllm.engine.request import Request, RequestState
from minivllm.engines.minivllm.liveness import draft_counters, scheduling_counters
from minivllm.errors import BadInput, Crashed, NonFiniteLogits, first_line
from minivllm.extras.cached_blocks import put_prefix, take_prefix
from minivllm.extras.extensions import RequestExtras
from minivllm.extras.ranked_steps import LeadingExecutor
from minivllm.extras.speculative.speculation import Speculator
from minivllm.llm import LLM
from minivllm.parallel.handover import Handover, HandoverFailed
from minivllm.platform.processes.channel import Channel
from minivllm.platform.processes.heartbeat import BEAT_S, Progress
from minivllm.processes.messages import (
    Abort,
    EngineState,
    Piece,
    Prefix,
    Ready,
    Rejected,
    Reset,
    ResetPrefixCache,
    Step,
    Submit,
    Watch,
)
from minivllm.processes.started import run_child, serve_engine
from minivllm.serving.processes.grammar_compiler import POLL_S, GrammarCompiler
from minivllm.serving.view.outlet import ViewOutlet

COUNTERS_S = 0.05  # between two readings of the counters while the engine is busy
PATIENCE_S = 0.005  # most seconds that a policy may wait for a fuller batch before new requests
MOST_FAILURES = 3  # steps in a row that raise before the engine gives up


class EngineLoop:
    """Takes requests from a channel, steps the engine, and sends what each step gave.

    Args:
        engine: serves the requests.
        channel: to the process of HTTP.
        progress: of the turns of the loop.
    """

    def __init__(self, engine: Engine, channel: Channel, progress: Progress | None = None) -> None:
        self.engine, self.channel = engine, channel
        self._progress = progress or Progress()
        # The completions of each request; and by a completion's id its request and index.
        self._members: dict[str, list[Request]] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._failures = 0
        self._unbegun: set[str] = set()  # requests without a step
        # Requests whose first token ends them here.
        self._handing_over: dict[str, Handover] = {}
        self._begun: list[tuple[str, float]] = []  # for the next message
        self._counters_due_s = 0.0
        engine.events.subscribe(self._note_begun, StateChanged)
        extensions = engine.launcher.extensions
        assert isinstance(extensions, RequestExtras)
        self._compiler = GrammarCompiler(extensions.grammars)
        self._outlet = ViewOutlet(engine.scheduler, channel)
        executor = engine.launcher.executor
        self._team = executor.team if isinstance(executor, LeadingExecutor) else None

    def _note_begun(self, event: StateChanged) -> None:
        request_id = event.request.request_id
        if event.state is RequestState.PREFILL and request_id in self._unbegun:
            self._unbegun.discard(request_id)
            self._begun.append((request_id, time.perf_counter()))

    def run(self) -> None:
        """Serve until the other end is gone.

        Raises:
            Crashed: a rank of the engine is dead or silent.
            Exception: several steps in a row have raised it.
        """
        engine = self.engine
        while not self.channel.closed:
            idle = self._outlet.wait_s() if self._outlet.is_open else None
            idle = POLL_S if self._compiler.waiting else idle
            if self._team is not None:
                self._team.require_all()
                idle = BEAT_S if idle is None else min(idle, BEAT_S)
            messages = self.channel.receive(0.0 if engine.has_unfinished else idle)
            self._progress.begin()
            for message in messages:
                self._handle(message)
            if self._compiler.waiting:
                self._take_compiled()
            if engine.has_unfinished:
                self._step()
            if self._outlet.is_open:
                self._outlet.send_due(not engine.has_unfinished)
            self._progress.end()
        engine.abort_all()

    def _handle(self, message: Any) -> None:
        match message:
            case Submit():
                has_grammar = message.params.structured_outputs is not None
                if not has_grammar or not self._compiler.takes(message):
                    self._submit(message)
            case Abort(request_id):
                self._unbegun.discard(request_id)
                if self._compiler.waiting:
                    self._compiler.drop(request_id)
                self._handing_over.pop(request_id, None)
                for member in self._members.pop(request_id, ()):
                    self._places.pop(member.request_id, None)
                    self.engine.abort(member.request_id)
                self._send([])
            case ResetPrefixCache():
                if not self.engine.has_unfinished:
                    self.engine.cache.reset_prefix_cache()
                self.channel.send(Reset(not self.engine.has_unfinished))
            case Watch(on):
                self._outlet.watch(on)

    def _take_compiled(self) -> None:
        for message, error in self._compiler.finished():
            if error is None:
                self._submit(message)
            else:
                self._reject(message, error)

    def _reject(self, message: Submit, error: BaseException) -> None:
        self.channel.send(Rejected(message.request_id, _client_words(error)))

    def _submit(self, message: Submit) -> None:
        request_id = message.request_id
        try:
            ids, inputs = message.prompt_token_ids, message.inputs
            if message.prefix:
                put_prefix(self.engine.cache, self.engine.transfers, ids, message.prefix)
            first = self.engine.add_request(request_id, ids, message.params, inputs=inputs)
        except HandoverFailed as error:
            self._send([_failed(request_id, 0, error)])
            return
        except BadInput as error:
            self._reject(message, error)
            return
        if message.output_token_ids:
            # Stops, penalties, grammars and text go on from what another engine has given.
            for token_id in message.output_token_ids:
                self.engine.accept(first, token_id, None)
        else:
            self._unbegun.add(request_id)
        if message.hands_over is not None:
            self._handing_over[request_id] = message.hands_over
        members = self._members[request_id] = [first, *first.unstarted]
        for index, member in enumerate(members):
            self._places[member.request_id] = request_id, index

    def _step(self) -> None:
        try:
            outputs = self.engine.step(PATIENCE_S)
        except Crashed:  # no later step can be computed: another engine takes the requests
            raise
        except Exception as error:
            self._fail(error)
            return
        self._failures = 0
        if outputs:
            to_hand_over = [one for output in outputs if (one := self._to_hand_over(output))]
            self._send([piece for output in outputs if (piece := self._piece(output))])
            for request, how in to_hand_over:
                self._hand_over(request, how)

    def _to_hand_over(self, output: TokenOutput) -> tuple[Request, Handover] | None:
        """A request whose first token this is, if another engine continues it."""
        how = self._handing_over.pop(output.request.request_id, None)
        return None if how is None or output.finish_reason is not None else (output.request, how)

    def _hand_over(self, request: Request, how: Handover) -> None:
        """End a request here and send what another engine needs of it."""
        request_id = request.request_id
        prompt = request.token_ids[: request.num_prompt_tokens]
        content = take_prefix(self.engine.cache, self.engine.transfers, prompt)
        self._handle(Abort(request_id))
        try:
            given = how.give(content)
        except HandoverFailed as error:
            self._send([_failed(request_id, 0, error)])
            return
        self.channel.send(Prefix(request_id, given))

    def _fail(self, error: Exception) -> None:
        """End all requests: the step may have lost tokens of each."""
        self.engine.abort_all()
        pieces = [_failed(request_id, index, error) for request_id, index in self._places.values()]
        self._unbegun.clear()
        self._handing_over.clear()
        self._members.clear()
        self._places.clear()
        self._send(pieces)
        self._failures += 1
        if self._failures == MOST_FAILURES:
            raise error
        traceback.print_exception(error)

    def _piece(self, output: TokenOutput) -> Piece | None:
        """What HTTP gets of an output; None where nobody waits for it."""
        request = output.request
        if (place := self._places.get(request.request_id)) is None:
            return None
        request_id, index = place
        if output.finish_reason is not None:
            del self._places[request.request_id]
            members = self._members[request_id]
            if not any(member.request_id in self._places for member in members):
                del self._members[request_id]
                self._unbegun.discard(request_id)
        is_first = request.num_output_tokens <= 1
        return Piece(
            request_id,
            index,
            output.token_id,
            request.num_output_tokens,
            output.text,
            output.finish_reason,
            output.stop_reason,
            output.logprobs,
            request.cache.num_reused,
            request.prompt_logprobs if is_first and index == 0 else None,
            None if request.error is None else _client_words(request.error),
            isinstance(request.error, BadInput) and not isinstance(request.error, NonFiniteLogits),
        )

    def _send(self, pieces: list[Piece]) -> None:
        now, begun = time.perf_counter(), self._begun
        self._begun = []
        self.channel.send(Step(now, pieces, self._state(now), begun))

    def _state(self, now: float) -> EngineState:
        engine, counters = self.engine, None
        scheduler = engine.scheduler
        if now >= self._counters_due_s or not engine.has_unfinished:
            self._counters_due_s = now + COUNTERS_S
            counters = counters_of(engine)
        return EngineState(
            len(scheduler.running), len(scheduler.waiting), engine.cache.pool.num_used, counters
        )


def _failed(request_id: str, index: int, error: Exception) -> Piece:
    """The end of a completion for which the client is not to blame."""
    return Piece(request_id, index, None, 0, "", "error", None, None, 0, None, first_line(error))


def _client_words(error: BaseException) -> str:
    """An error for a client."""
    return str(error) if isinstance(error, BadInput) else first_line(error)


def counters_of(engine: Engine) -> dict[str, float]:
    """What an engine has counted since it was built: work of scheduler, cache and drafts."""
    groups = scheduling_counters(engine.scheduler, engine.cache)
    speculation = engine.launcher.speculation
    speculator = speculation if isinstance(speculation, Speculator) else None
    drafts = {name: float(count) for name, count in draft_counters(speculator).items()}
    return {name: n for group in (*groups.values(), drafts) for name, n in group.items()}


def ready(llm: LLM) -> Ready:
    """What the process of HTTP needs to know of an engine."""
    engine = llm.engine
    return Ready(
        engine.max_model_len,
        engine.loaded.config.vocab_size,
        tuple(engine.loaded.config.eos_token_ids),
        engine.scheduler.policy.max_num_seqs,
        engine.cache.pool.num_usable,
        engine.cache.layout.block_size,
        llm.default_params,
        [*engine.loaded.warnings, *filter(None, [llm.defaults_note()])],
    )


def serve(channel: Channel) -> int:
    """Build the engine of the configuration that comes first, and serve until the other end is
    gone; returns the exit code."""
    return serve_engine(channel, _serve)


def _serve(config: dict[str, Any], channel: Channel, progress: Progress, exits: ExitStack) -> None:
    llm = exits.enter_context(LLM.from_config(config))
    channel.send(ready(llm))
    EngineLoop(llm.engine, channel, progress).run()


if __name__ == "__main__":
    run_child(serve)
