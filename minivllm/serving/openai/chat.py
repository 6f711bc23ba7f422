"""/v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Piece
from minivllm.serving.answers.chat_model import ChatModel, ChatPrompt
from minivllm.serving.errors import ApiError, naming
from minivllm.serving.http.access import Access, access
from minivllm.serving.http.answers import STREAMED, JsonEvent
from minivllm.serving.openai.chat_choice import ChatChoice
from minivllm.serving.openai.forms import (
    MOST_LOGPROBS,
    Body,
    ChoiceAnswer,
    ReasoningFields,
    SamplingFields,
)
from minivllm.serving.openai.tools import Tools, read_tools, schema_paths
from minivllm.serving.parsing.answers import AnswerParser
from minivllm.serving.service import Service


class ChatBody(SamplingFields):
    """The body of a request."""

    IGNORED = Body.IGNORED | {"prediction", "verbosity", "web_search_options"}
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    reasoning: ReasoningFields | None = None
    modalities: list[str] | None = None
    store: bool | None = None

    def paths(self, **forms: Any) -> dict[str, str]:
        most = "max_tokens" if self.max_tokens is not None else "max_completion_tokens"
        return super().paths(**forms) | {"prompt": "messages", "max_tokens": most}

    def effort(self) -> str | None:
        """How much thinking is wanted."""
        given = {self.reasoning_effort, self.reasoning.effort if self.reasoning else None} - {None}
        if len(given) > 1:
            raise ApiError(
                400, "reasoning_effort and reasoning.effort differ", param="reasoning_effort"
            )
        return given.pop() if given else None


class ChatCompletion(ChoiceAnswer):
    """One call, while it is answered.

    Args:
        service: answers it.
        body: of the request.
        prompt: the conversation.
        parsers: of each completion.
    """

    PREFIX, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, service: Service, body: ChatBody, prompt: ChatPrompt, parsers: list[AnswerParser]
    ) -> None:
        super().__init__(service, body)
        texts = service.token_texts() if body.logprobs else None
        top, with_ids = body.top_logprobs or 0, body.return_token_ids
        self.choices = [
            ChatChoice(index, parser, texts, top, with_ids) for index, parser in enumerate(parsers)
        ]
        # The prompt's token ids, where they are wanted: of a stream with its first event.
        self._ids = {"prompt_token_ids": prompt.token_ids} if with_ids else {}

    def usage(self) -> dict[str, Any]:
        thoughts = sum(choice.num_reasoning_tokens for choice in self.choices)
        return {
            **super().usage(),
            "completion_tokens_details": {"reasoning_tokens": thoughts},
        }

    def events(self, number: int, pieces: list[Piece]) -> list[JsonEvent]:
        """One for each token that adds to the answer."""
        events = []
        for piece in pieces:
            choice = self.choices[piece.completion]
            if not choice.has_begun:
                events.append(self.chunk([choice.role()], **self._ids))
                self._ids = {}
            if (delta := choice.delta(piece)) is not None:
                events.append(self.chunk([delta]))
        return events

    def rendered(self) -> dict[str, Any]:
        choices = [choice.whole(self._collected[0, choice.index]) for choice in self.choices]
        return {**self.head, "choices": choices, "usage": self.usage(), **self._ids}


def _params(
    service: Service, chat_model: ChatModel, body: ChatBody, tools: Tools | None
) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens mean the same: give one of them",
            param="max_tokens",
        )
    defaults = service.info.default_params
    given: dict[str, Any] = chat_model.sampling(tools is not None)
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return body.params(
        defaults, max_tokens=limits.pop() if limits else defaults.max_tokens, **given
    )


def _require_supported(body: ChatBody) -> None:
    """Raise ApiError for what this server does not do."""
    if body.store:
        raise ApiError(400, "store=true is not supported: nothing is stored here", param="store")
    if body.continue_final_message == (body.add_generation_prompt is not False):
        raise ApiError(
            400,
            "continue_final_message=true and add_generation_prompt=false need each other",
            param="continue_final_message",
        )
    if body.modalities not in (None, ["text"]):
        raise ApiError(
            400, 'modalities must be ["text"]: the model writes text', param="modalities"
        )


def router(service: Service) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter()
    chat_model = ChatModel(service)

    @routes.post("/v1/chat/completions", responses=STREAMED)
    @access(Access.ENGINE)
    async def chat_completions(body: ChatBody) -> Response:
        """Answer a conversation."""
        body.require_known()
        service.require_model(body.model)
        service.admit()
        _require_supported(body)
        tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        if tools is not None:
            chat_model.require_tools()
        schemas = schema_paths(body.tools, tools, "tools[{}].function.parameters")
        with naming(body.paths(tools=tools) | schemas):
            params = _params(service, chat_model, body, tools)
            prompt = await chat_model.prompt(
                body.messages,
                None if tools is None else tools.tools,
                chat_model.variables(body.chat_template_kwargs, body.effort()),
                body.continue_final_message,
            )
            field = "response_format" if body.structured_outputs is None else "structured_outputs"
            params = await chat_model.constrained(params, prompt, tools, field)
            parsers = [chat_model.parser(prompt, tools) for _ in range(params.n)]
            answer = ChatCompletion(service, body, prompt, parsers)
            answer.start([prompt.token_ids], params, prompt.inputs)
            return await answer.response(body.stream)

    return routes
