"""/v1/responses, without a state: every request brings the whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Piece
from minivllm.serving.answers.chat_model import ChatModel
from minivllm.serving.answers.structured import of_text_format
from minivllm.serving.errors import ApiError, PromptTooLong, naming
from minivllm.serving.http.access import Access, access
from minivllm.serving.http.answers import STREAMED, ApiAnswer, JsonEvent, event, event_stream
from minivllm.serving.http.calls import ignore
from minivllm.serving.openai.forms import (
    MOST_LOGPROBS,
    Body,
    ReasoningFields,
    SamplingFields,
    logprob_entries,
    usage,
)
from minivllm.serving.openai.response_input import chat_choice, chat_tools, read_input
from minivllm.serving.openai.response_output import ResponseOutput
from minivllm.serving.openai.tools import Tools, read_tools, schema_paths
from minivllm.serving.parsing.answers import AnswerParser
from minivllm.serving.service import Service

WITH_LOGPROBS = "message.output_text.logprobs"


class TextFields(Body):
    """`text`."""

    IGNORED = frozenset({"verbosity"})
    format: dict[str, Any] | None = None


class ResponseStreamOptions(Body):
    """`stream_options` of this API."""

    IGNORED = frozenset({"include_obfuscation"})


class ResponseBody(SamplingFields):
    """The body of a request."""

    IGNORED = Body.IGNORED | {"context_management", "access_programs"}
    model: str
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1)
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    def paths(self, **forms: Any) -> dict[str, str]:
        wanted = super().paths(**forms, **{"text.format": self.text and self.text.format})
        own = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
        return wanted | own

    @property
    def with_logprobs(self) -> bool:
        """Whether the answer shows log-probabilities."""
        return WITH_LOGPROBS in (self.include or ())

    def require_supported(self) -> None:
        """Raise ApiError for what this server does not do."""
        self.require_known()
        reasons = {
            "previous_response_id": (
                self.previous_response_id is not None,
                "nothing is stored here: send the whole conversation as input",
            ),
            "background": (bool(self.background), "a response is made while its client waits"),
            "store": (bool(self.store), "nothing is stored here"),
            "conversation": (
                self.conversation is not None,
                "nothing is stored here: send the whole conversation as input",
            ),
            "prompt": (
                self.prompt is not None,
                "no prompts are stored here: send its text as instructions or input",
            ),
            "truncation": (
                self.truncation not in (None, "auto", "disabled"),
                "must be auto or disabled",
            ),
            "n": (self.n not in (None, 1), "a response is one answer"),
            "return_token_ids": (self.return_token_ids, "a response has no place for them"),
            "response_format": (self.response_format is not None, "its place is text.format"),
        }
        for name, (is_asked, reason) in reasons.items():
            if is_asked:
                raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
        if self.truncation == "auto":  # which changes only what would be an error
            ignore("truncation: auto")
        for name in self.include or ():  # what else is listed, a response never has
            if name != WITH_LOGPROBS:
                ignore(f"include: {name}")


class ResponseAnswer(ApiAnswer):
    """One call, while it is answered.

    Args:
        service: answers it.
        body: of the request.
        params: how to decode.
        parser: takes the text of the answer apart.
    """

    def __init__(
        self, service: Service, body: ResponseBody, params: SamplingParams, parser: AnswerParser
    ) -> None:
        super().__init__(service)
        self.body, self.params, self.parser = body, params, parser
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.output = ResponseOutput()
        self._texts = service.token_texts() if body.with_logprobs else None
        self._num_reasoning_tokens = 0
        self._has_begun, self._count = False, 0  # of events
        self._finish_reason: str | None = None

    def events(self, number: int, pieces: list[Piece]) -> list[JsonEvent]:
        """Those that say how the output grows; before the first one, that there is a response."""
        found = [] if self._has_begun else self._begun()
        for piece in pieces:
            self._num_reasoning_tokens += self.parser.is_thinking and piece.token_id is not None
            events = self.parser.push(piece.text)
            if piece.finish_reason is not None:
                events += self.parser.finish()
            logprobs = []
            if self._texts is not None:
                logprobs = logprob_entries([piece], self._texts, self.body.top_logprobs or 0)
            found += self.output.add(events, logprobs)
        self._finish_reason = pieces[-1].finish_reason
        return found

    def resource(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response as it is now.

        Args:
            status: in_progress, completed, incomplete or failed.
            error: why it failed.
        """
        is_over = status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error and {"code": error.code or error.kind, "message": error.message},
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "output": list(self.output.items),
            "usage": self.usage() if is_over else None,
            **self._settings(),
        }

    def usage(self) -> dict[str, Any]:
        known = usage(self.streams)
        return {
            "input_tokens": known["prompt_tokens"],
            "input_tokens_details": known["prompt_tokens_details"],
            "output_tokens": known["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": known["total_tokens"],
        }

    def _settings(self) -> dict[str, Any]:
        """The settings of the request, which a response repeats."""
        body, params, given = self.body, self.params, self.body.model_extra or {}
        function = {"description": None, "parameters": None, "strict": None}
        reasoning = body.reasoning or ReasoningFields()
        return {
            "model": self.service.model,
            "instructions": body.instructions,
            "previous_response_id": None,
            "tools": [
                function | tool if tool.get("type") == "function" else tool
                for tool in body.tools or ()
            ],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "max_tool_calls": body.max_tool_calls,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "max_output_tokens": body.max_output_tokens,
            "truncation": "disabled",
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": given.get("metadata") or {},
            "user": given.get("user"),
            "safety_identifier": given.get("safety_identifier"),
            "prompt_cache_key": given.get("prompt_cache_key"),
        }

    def _finish(self) -> tuple[str, list[JsonEvent]]:
        """End the output: the status of the response, and the last events about its items."""
        status = "completed" if self._finish_reason == "stop" else "incomplete"
        return status, self.output.finish(status == "completed")

    def rendered(self) -> dict[str, Any]:
        return self.resource(self._finish()[0])

    def closing(self) -> list[JsonEvent]:
        status, events = self._finish()
        return [*events, self._state(status, status)]

    async def refused(self, error: ApiError) -> AsyncIterator[bytes]:
        """A response that fails before its first token, as events."""
        yield self.written(self._begun())
        yield self.failed(error)

    def failed(self, error: ApiError) -> bytes:
        events = self.output.finish(False) if self.output.items else []
        last = {"type": "response.failed", "response": self.resource("failed", error)}
        return self.written([*events, last])

    def _begun(self) -> list[JsonEvent]:
        self._has_begun = True
        return [self._state("created"), self._state("in_progress")]

    def _state(self, name: str, status: str = "in_progress") -> JsonEvent:
        return {"type": f"response.{name}", "response": self.resource(status)}

    def written(self, events: Sequence[JsonEvent]) -> bytes:
        """Events with their numbers."""
        first, self._count = self._count, self._count + len(events)
        numbered = enumerate(events, first)
        return b"".join(event({**one, "sequence_number": i}, one["type"]) for i, one in numbered)


def _params(
    service: Service, chat_model: ChatModel, body: ResponseBody, tools: Tools | None
) -> SamplingParams:
    if body.top_logprobs is not None and not body.with_logprobs:
        raise ApiError(400, f"top_logprobs needs include=[{WITH_LOGPROBS!r}]", param="top_logprobs")
    defaults = service.info.default_params
    given: dict[str, Any] = chat_model.sampling(tools is not None)
    most = body.max_output_tokens
    given["max_tokens"] = defaults.max_tokens if most is None else most
    if (wanted := of_text_format(body.text.format if body.text else None)) is not None:
        given["structured_outputs"] = wanted
    if body.with_logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return body.params(defaults, **given)


def _tools(body: ResponseBody) -> Tools | None:
    """The tools that may be called. Raises ApiError, with the paths of this API."""
    try:
        choice = chat_choice(body.tool_choice)
        return read_tools(chat_tools(body.tools), choice, body.parallel_tool_calls)
    except ApiError as error:
        for level in (".function", ".allowed_tools"):  # which chat completions have beyond it
            error.message = error.message.replace(level, "")
            error.param = error.param and error.param.replace(level, "")
        raise


def router(service: Service) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter()
    chat_model = ChatModel(service)

    @routes.post("/v1/responses", responses=STREAMED)
    @access(Access.ENGINE)
    async def responses(body: ResponseBody) -> Response:
        """Answer a conversation."""
        body.require_supported()
        service.require_model(body.model)
        service.admit()
        tools = _tools(body)
        if tools is not None:
            chat_model.require_tools()
        effort = body.reasoning.effort if body.reasoning is not None else None
        schemas = schema_paths(body.tools, tools, "tools[{}].parameters")
        with naming(body.paths(tools=tools) | schemas):
            params = _params(service, chat_model, body, tools)
            prompt = await chat_model.prompt(
                read_input(body.input, body.instructions),
                None if tools is None else tools.tools,
                chat_model.variables(body.chat_template_kwargs, effort),
            )
            params = await chat_model.constrained(params, prompt, tools, "text.format")
            parser = chat_model.parser(prompt, tools, body.max_tool_calls)
            answer = ResponseAnswer(service, body, params, parser)
            try:
                answer.start([prompt.token_ids], params, prompt.inputs)
            except PromptTooLong as error:
                error.param = "input"
                if not body.stream:
                    raise
                # As OpenAI says it in a stream: Codex, which then compacts, reads it there alone.
                return await event_stream(answer.refused(error), answer.failed)
            return await answer.response(body.stream)

    return routes
