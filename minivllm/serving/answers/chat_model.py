"""A model as a partner of conversations: what its chat template takes, and how its answers read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.models.load.messages import parse_messages
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.tool_texts import with_calls_in_content
from minivllm.models.vision.inputs import RequestInputs
from minivllm.serving.children.grammar_checks import GrammarRequest
from minivllm.serving.errors import ApiError
from minivllm.serving.http.calls import account, ignore
from minivllm.serving.openai.tools import Tools
from minivllm.serving.parsing.answers import AnswerParser
from minivllm.serving.parsing.reasoning import begins_thinking
from minivllm.serving.parsing.tool_forms import tool_form
from minivllm.serving.service import Service

EFFORT = "reasoning_effort"  # as templates call it
_NEXT = {"minimal": "low", "xhigh": "high", "max": "high"}
_SETTLED = (
    "messages",
    "tools",
    "self",
    "continue_final_message",
)  # which are no variables that a client may set


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as token ids, up to the assistant's turn."""

    token_ids: list[int]
    begins_thinking: bool  # the template has opened a thinking block
    inputs: RequestInputs | None = None  # its images


class ChatModel:
    """Writes conversations as the chat template of a service's model does, and reads the answers.

    Args:
        service: has the tokenizer.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        tokenizer = service.tokenizer
        self.template = tokenizer.chat_template if tokenizer is not None else None
        self.form = tool_form(tokenizer) if tokenizer is not None else None

    def require(self) -> Tokenizer:
        """The tokenizer. Raises ApiError where the model cannot chat."""
        tokenizer = self.service.require_tokenizer()
        if self.template is None:
            raise ApiError(
                400,
                f"{self.service.model} has no chat template: it is a base model, which continues "
                "texts; use /v1/completions",
                param="model",
            )
        return tokenizer

    def names(self, variable: str) -> bool:
        """Whether the chat template has this variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self.template or "") is not None

    def require_tools(self) -> None:
        """Raise ApiError where the model cannot be given tools."""
        self.require()
        if self.form is None:
            raise ApiError(
                400,
                "the form in which this model writes tool calls is not known to this server",
                param="tools",
            )

    def variables(self, given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
        """Variables of the chat template.

        Args:
            given: by name (`chat_template_kwargs`), which win.
            effort: how much to think, "none" for not at all; ignored where the template has no
                variable for it.
        """
        if effort is None:
            return dict(given or {})
        settings = {EFFORT: self.effort(effort), "enable_thinking": effort != "none"}
        known = {name: value for name, value in settings.items() if self.names(name)}
        if not known:
            ignore(f"effort: {effort}")
        return known | dict(given or {})

    def effort(self, wanted: str) -> str:
        """The effort that the chat template knows and that comes next to the wanted one:
        clients know more steps than most models were trained with."""
        return wanted if self.names(wanted) else _NEXT.get(wanted, wanted)

    async def prompt(
        self,
        messages: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> ChatPrompt:
        """Write a conversation as the chat template does.

        Args:
            messages: in OpenAI's form.
            tools: in OpenAI's form, that the model may call.
            variables: further ones of the template (`chat_template_kwargs`).
            continues: end with the last message's text, which the answer continues.

        Raises:
            ApiError: the model cannot chat; these are no messages, or the template rejects them;
                a variable is none of the template's.
        """
        tokenizer = self.require()
        templates = self.service.require_templates()
        known_names = await templates.variables(account()) if variables else ()
        for name in variables or {}:
            if name in _SETTLED or name not in known_names:
                raise ApiError(
                    400,
                    f"the chat template of this model has no variable {name!r:.100}",
                    param=f"chat_template_kwargs.{name:.100}",
                )
        pictures = self.service.pictures
        parts = None if pictures is None else pictures.parts()
        try:
            parsed = parse_messages(messages, images=parts)
        except BadInput as error:
            raise ApiError.of(error, "messages") from None
        known = dict(variables or {})
        form = self.form
        if form is not None and not form.is_generic and not self.names("tool_calls"):
            parsed = with_calls_in_content(parsed, form)
        if tools:
            known["tools"] = list(tools)
        if continues:
            known["continue_final_message"] = True
        ids = await templates.token_ids(parsed, account(), **known)
        inputs = None
        if pictures is not None and parts is not None:
            ids, inputs = await pictures.add(ids, parts, account())
        return ChatPrompt(ids, begins_thinking(tokenizer, ids), inputs)

    async def constrained(
        self,
        params: SamplingParams,
        prompt: ChatPrompt,
        tools: Tools | None,
        field: str,
    ) -> SamplingParams:
        """The same parameters with what the text of a whole answer has to be, see
        `answer_grammar`.

        Raises:
            ApiError: this model cannot be held to it.
        """
        form = params.structured_outputs
        if form is None and tools is None:
            return params
        request = GrammarRequest(form, True, tools, self.form, prompt.begins_thinking, field)
        return replace(params, structured_outputs=await self.service.checked(request))

    def parser(
        self,
        prompt: ChatPrompt,
        tools: Tools | None = None,
        most_calls: int | None = None,
    ) -> AnswerParser:
        """A parser of one answer.

        Args:
            prompt: that is answered.
            tools: that the model may call; None finds no calls.
            most_calls: see AnswerParser; tools that are not parallel are called once.
        """
        if tools is None:
            return AnswerParser(prompt.begins_thinking, trims=True)
        most, form = most_calls if tools.parallel else 1, self.form
        if form is not None and form.before and tools.strict:  # the grammar binds marked calls
            form = replace(form, is_bare=False)
        return AnswerParser(
            prompt.begins_thinking, form, tools.schemas, trims=True, most_calls=most
        )

    def sampling(self, with_tools: bool) -> dict[str, Any]:
        """Parameters that the parser needs: where tool calls begin with a special token, the text
        has to show special tokens."""
        if with_tools and self.form is not None and self.form.begin_id is not None:
            return {"skip_special_tokens": False}
        return {}
