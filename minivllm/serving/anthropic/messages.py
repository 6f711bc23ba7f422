"""/v1/messages: the next turn of a conversation, in Anthropic's form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Response

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.serving.answers.chat_model import EFFORT, ChatModel, ChatPrompt
from minivllm.serving.anthropic.answer import FORM, MessageAnswer
from minivllm.serving.anthropic.conversation import conversation, read_tools
from minivllm.serving.anthropic.forms import PATH
from minivllm.serving.anthropic.schemas import CountBody, MessagesBody, Thinking
from minivllm.serving.errors import ApiError, form_paths, naming
from minivllm.serving.http.access import Access, access
from minivllm.serving.http.answers import STREAMED
from minivllm.serving.http.calls import ignore
from minivllm.serving.openai.tools import Tools, schema_paths
from minivllm.serving.parsing.reasoning import THINK_OPEN
from minivllm.serving.service import Service

_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k"),
    *("seed", "ignore_eos", "priority", "deadline_ms", "cache_salt"),
)
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates


async def _prompt(chat_model: ChatModel, body: CountBody) -> tuple[ChatPrompt, Tools | None]:
    """The conversation of a body, and the tools that its answer may call."""
    body.require_known()
    chat_model.service.require_model(body.model)
    chat_model.require()
    tools = read_tools(body.tools, body.tool_choice)
    if tools is not None:
        chat_model.require_tools()
    given = conversation(body)
    variables = template_variables(chat_model, body) | (body.chat_template_kwargs or {})
    with naming({"messages": "messages"}):  # others than the body's, with other numbers
        prompt = await chat_model.prompt(
            given,
            None if tools is None else tools.tools,
            variables,
            continues=body.messages[-1].role == "assistant",
        )
    return prompt, tools


def template_variables(chat_model: ChatModel, body: CountBody) -> dict[str, Any]:
    """Variables of the chat template that let the model think, or not, and how much. What the
    template has no variable for is ignored.

    Raises:
        ApiError: the budget is wrong.
    """
    effort = None if body.output_config is None else body.output_config.effort
    known: dict[str, Any] = {}
    if effort is not None and chat_model.names(EFFORT):
        known = {EFFORT: chat_model.effort(effort)}
    elif effort is not None:
        ignore(f"output_config.effort: {effort}")
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    if body.thinking is not None:
        _check_budget(body.thinking, getattr(body, "max_tokens", None))
    for switch in _SWITCHES:
        if chat_model.names(switch):
            return known | {switch: thinks}
    if thinks and THINK_OPEN not in (chat_model.template or ""):
        ignore("thinking: this model does not think")
    return known


def _check_budget(thinking: Thinking, max_tokens: int | None) -> None:
    budget = thinking.budget_tokens
    if (budget is not None) != (thinking.type == "enabled"):
        raise ApiError(
            400, "thinking.budget_tokens: type=enabled needs it, no other has it", param="thinking"
        )
    if budget is not None and max_tokens is not None and budget >= max_tokens:
        raise ApiError(400, "thinking.budget_tokens must be less than max_tokens", param="thinking")


def _params(chat_model: ChatModel, body: MessagesBody, tools: Tools | None) -> SamplingParams:
    given = {name: getattr(body, name) for name in _SAMPLING}
    chosen = {name: value for name, value in given.items() if value is not None}
    chosen |= chat_model.sampling(tools is not None)
    if body.output_config is not None and body.output_config.format is not None:
        chosen["structured_outputs"] = {"json": body.output_config.format.json_schema}
    if body.stop_sequences is not None:
        chosen["stop"] = tuple(body.stop_sequences)
    try:
        return replace(chat_model.service.info.default_params, **chosen)
    except BadInput as error:
        raise ApiError.of(error) from None


def _paths(body: MessagesBody, tools: Tools | None) -> dict[str, str]:
    """The paths of fields, see `naming`."""
    has_form = body.output_config is not None and body.output_config.format is not None
    return {
        **form_paths(FORM if has_form or tools is None else "tools"),
        **schema_paths(body.tools, tools, "tools.{}.input_schema"),
        "stop": "stop_sequences",
        "prompt": "messages",
    }


def router(service: Service) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter()
    chat_model = ChatModel(service)

    @routes.post(PATH, responses=STREAMED)
    @access(Access.ENGINE)
    async def messages(body: MessagesBody) -> Response:
        """Answer a conversation."""
        service.admit()
        prompt, tools = await _prompt(chat_model, body)
        with naming(_paths(body, tools)):
            params = _params(chat_model, body, tools)
            answer = await MessageAnswer(service, chat_model, body, prompt, tools, params).begin()
            return await answer.response(body.stream)

    @routes.post(f"{PATH}/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        """Count the tokens of a conversation, without an answer to it."""
        prompt, _ = await _prompt(chat_model, body)
        return {"input_tokens": len(prompt.token_ids)}

    return routes
