"""A server that speaks OpenAI's API as a TerminalModel. Torch-free."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import aclosing
from typing import Any

from minivllm.config.groups import GROUPS, HARNESS, Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.openai.stream import read_events
from minivllm.engines.openai.stream_event import (
    ServerError,
    StreamEvent,
    read_event,
)
from minivllm.engines.supported_knobs import defaults
from minivllm.errors import BadInput, NotInstalled
from minivllm.interactive.answer import Answer, AnswerPiece, collect
from minivllm.interactive.model import ChatDecoding, Turn
from minivllm.platform.support import INSTALL
from minivllm.prompts import check_streamable, params_of

CHAT, COMPLETIONS = "chat/completions", "completions"
# What a server may answer that has no chat completions, or a model without a chat template.
NO_CHAT = (400, 404, 405, 422, 501)
# Names for the limit of an answer: that of all servers, and that of OpenAI's newer models.
LIMITS = ("max_tokens", "max_completion_tokens")
# ChatDecoding parameters with the same name in requests; those after the first line are vLLM's.
SENT = (
    *("max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty"),
    *("frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words"),
    *("allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens", "ignore_eos"),
    *("priority", "deadline_ms"),
)
HOW = ("temperature", "top_p")  # what an option of `decoding` is sent as, whatever it leaves as is
Item = StreamEvent | Exception | None  # None: the end of a stream


class RemoteModel:
    """Answers by requests to a server: chat completions, or completions for a base model.

    A short request at the start finds out which of them it has.

    Args:
        config: the resolved configuration of task=chat, with `task.url`.

    Raises:
        BadInput: the server cannot be reached or used, or a knob is set that is the server's own.
        NotInstalled: aiohttp is missing.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _require_server_knobs(config)
        try:
            from minivllm.engines.openai.client import Client
        except ImportError as error:
            raise NotInstalled(f"task.url needs aiohttp ({error}): {INSTALL}") from error
        task = Config.of(config).task
        self.decoding = ChatDecoding(params_of(config["decoding"]), _given(config))
        self.check(self.decoding)
        self._client = Client(task.url, os.environ.get(task.api_key_env), 1, "task.url")
        try:
            self.form = self._client.address("").removesuffix("/v1").partition("://")[2]
            self.name = self._served_name(task.served_model_name)
            self._path, self._limit = self._find_path()
        except BaseException:
            self.close()
            raise
        self.is_base = self._path == COMPLETIONS

    def _served_name(self, chosen: str | None) -> str:
        try:
            served = self._client.served("task.url")
        except (OSError, ServerError) as error:
            raise BadInput(
                f"task.url={self._client.address('')}: no server answers there as it should "
                f"({error})"
            ) from error
        if chosen is not None and chosen not in served:
            raise BadInput(
                f"task.served_model_name={chosen}: {self.form} does not serve it; it serves "
                f"{', '.join(served)[:300]}"
            )
        return chosen or next(iter(served))

    def _find_path(self) -> tuple[str, str]:
        """The path that answers, and its name for the most tokens of an answer."""
        errors = []
        for path in (CHAT, COMPLETIONS):
            for limit in LIMITS:
                self._path, self._limit = path, limit
                try:
                    for _ in self._events({**self._prompt(Turn("Hi")), limit: 1}):
                        pass
                    return path, limit
                except ServerError as error:
                    if error.status not in NO_CHAT:
                        raise BadInput(f"{self.form}: {error}") from error
                    errors.append(f"/{path}: {error}")
                    if LIMITS[1] not in str(error):
                        break
        raise BadInput(f"{self.form} rejects requests: {'; '.join(errors)}")

    def check(self, decoding: ChatDecoding) -> None:
        check_streamable(decoding.params)
        unknown = [name for name in decoding.given if name not in SENT]
        if unknown:
            raise BadInput(
                f"decoding.{unknown[0]} is not sent to a server; it is sent {', '.join(SENT)}"
            )

    def answer(
        self,
        turn: Turn,
        decoding: ChatDecoding,
        show: Callable[[bool, str], None],
        watch: Callable[[Answer], None],
    ) -> Answer:
        fields = {name: getattr(decoding.params, name) for name in decoding.given}
        fields[self._limit] = fields.pop("max_tokens", None)
        sent = {name: value for name, value in fields.items() if value is not None}
        answer = Answer(num_prompt_tokens=None, is_counted=False)
        if self.is_base:
            show(False, turn.text)
        try:
            pieces = self._pieces({**self._prompt(turn), **sent}, answer)
            collect(answer, pieces, show, None if self.is_base else False, watch)
        except (OSError, ServerError) as error:
            raise BadInput(f"{self.form}: {error or type(error).__name__}") from error
        return answer

    def _prompt(self, turn: Turn) -> dict[str, Any]:
        return (
            {"prompt": turn.text} if self._path == COMPLETIONS else {"messages": turn.conversation}
        )

    def _pieces(self, body: Mapping[str, Any], answer: Answer) -> Generator[AnswerPiece]:
        """The answer to a request; notes in `answer` what the server counts."""
        reason = None
        for event in self._events(body):
            reason = event.finish_reason or reason
            if event.prompt_tokens is not None:
                answer.num_prompt_tokens = event.prompt_tokens
            if event.reasoning:
                yield AnswerPiece(event.reasoning, 1, reason, is_thought=True)
            if event.text:
                yield AnswerPiece(event.text, 1, reason)
            if event.total is not None:  # at the end, or so far
                answer.num_tokens, answer.is_counted = event.total, True
        answer.finish_reason = reason or "abort"
        if reason is None:
            raise ServerError("the server closed the stream before it was done")

    def _events(self, body: Mapping[str, Any]) -> Generator[StreamEvent]:
        """The events of the answer to a request; closing the generator closes the connection."""
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        whole = {
            "model": self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        request = self._client.start(self._ask(whole, items.put))
        try:
            while (item := items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            request.cancel()

    async def _ask(self, body: dict[str, Any], put: Callable[[Item], None]) -> None:
        try:
            async with (
                aclosing(self._client.lines(self._path, body)) as lines,
                aclosing(read_events(lines)) as events,
            ):
                async for event in events:
                    put(read_event(event))
            put(None)
        except Exception as error:
            put(error)

    def cache_use(self) -> str:
        return ""

    def weights(self) -> str:
        return ""

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self._client.close()


def _require_server_knobs(config: Mapping[str, Any]) -> None:
    """Raise BadInput for a knob of the engine: the server has its own."""
    standard, choices = defaults(), config["choices"]
    for group in GROUPS:
        if group in (*HARNESS, "decoding") or config[group] == standard[group]:
            continue
        changed = [
            f"{group}.{name}"
            for name, value in config[group].items()
            if value != standard[group].get(name)
        ]
        option = f"{group}={choices.get(group)}"
        what = option if choices.get(group) != standard["choices"].get(group) else changed[0]
        raise BadInput(f"task.url: the server has its own {group}; leave {what} out")


def _given(config: Mapping[str, Any]) -> Collection[str]:
    """The decoding parameters that the user has set, and the limit of an answer, which servers set
    too low for a conversation."""
    given = set(config.get("decoding_given") or ())
    if "decoding" in given:  # an option of the group
        params, plain = params_of(config["decoding"]), SamplingParams()
        names = {name for name in config["decoding"] if name != "_target_"}
        given |= {n for n in names if n in HOW or getattr(params, n) != getattr(plain, n)}
    return sorted((given | {"max_tokens"}) - {"decoding"})
