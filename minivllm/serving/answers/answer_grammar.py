"""The grammar of a whole answer: thoughts, and behind them the form of the request, or calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.engine.options import StructuredOutputs
from minivllm.errors import BadInput
from minivllm.extras.masks.compiling import choice_rules
from minivllm.extras.masks.json_schema import guided_schema, require_schema
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.serving.answers.structured import call_rules, sentence
from minivllm.serving.errors import ApiError
from minivllm.serving.openai.tools import Tools
from minivllm.serving.parsing.reasoning import THINK_CLOSE, THINK_OPEN
from minivllm.serving.parsing.tool_forms import ToolForm

_ANY = "(?s:.)"
_SPACE = r"SPACE: /[ \n\r\t]{1,8}/"  # behind thoughts and calls


def answer_grammar(
    wanted: StructuredOutputs | None,
    tools: Tools | None,
    form: ToolForm | None,
    tokenizer: Tokenizer,
    begins_thinking: bool,
    field: str = "response_format",
) -> StructuredOutputs | None:
    """What the text of an answer has to be; None: anything.

    A model that thinks may do so before its answer has a form. With tools that it may call, a
    call stands in place of that form.

    Args:
        wanted: the form of the answer.
        tools: that it may or must call.
        form: of the model's calls, where there are tools.
        tokenizer: of the model.
        begins_thinking: the prompt ends inside a thinking block.
        field: of the body, that asks for the form.

    Raises:
        ApiError: this model cannot be held to it.
    """
    if wanted is not None and wanted.grammar is not None:
        _require_alone(tools, begins_thinking)
        return wanted
    rules: list[str] = []
    if tools is not None and form is not None:
        answer = _calls(tools, form, wanted is not None, tokenizer, rules)
        if answer:
            rules += call_rules(_schemas(tools), form, tokenizer, answer.startswith("TEXT"))
    else:
        answer = "" if wanted is None else "form"
    if not answer:
        return None
    thoughts = _thoughts(tokenizer, begins_thinking, field if wanted is not None else "tools")
    if answer == "form" and not thoughts:
        return wanted
    if wanted is not None and "form" in answer.split():
        rules += _form(wanted, field)
    between = "thoughts" if begins_thinking else "thoughts?"
    start = f"start: {between} answer" if thoughts else "start: answer"
    rules = [start, *thoughts, f"answer: {answer}", *rules, _SPACE]
    return StructuredOutputs(grammar="\n".join(rules))


def _require_alone(tools: Tools | None, begins_thinking: bool) -> None:
    """Raise ApiError where a client's own grammar is not all that is wanted."""
    if tools is not None or begins_thinking:
        what = "tools" if tools is not None else "thoughts, which the chat template begins"
        raise ApiError(
            400,
            f"structured_outputs.grammar is of a whole answer, without {what}",
            param="structured_outputs",
        )


def _calls(
    tools: Tools, form: ToolForm, is_asked: bool, tokenizer: Tokenizer, rules: list[str]
) -> str:
    """The rule of an answer with tools, further rules added; empty where it may be any text."""
    if tools.choice == "required":
        return "tool_call"
    if is_asked:
        return "form | tool_call"
    if not tools.strict:
        return ""
    if not form.before:
        raise ApiError(
            400,
            "strict=true needs tool_choice=required: this model's calls have no marker",
            param="tools",
        )
    # A call that is spelled otherwise than by this grammar would not be strict.
    marker = _pattern(re.escape(form.begin))
    # Nor would one be of which a text has the beginning at its end.
    torn = "|".join(_pattern(re.escape(form.begin[:end])) for end in range(2, len(form.begin)))
    whole_texts = f" & ~/{_ANY}*({torn})/" if torn else ""
    rules.append(f"TEXT: /{_ANY}+/ & ~/{_ANY}*{marker}{_ANY}*/{whole_texts}")
    several = "*" if tools.parallel and form.end else "?"
    answer = f"TEXT? (tool_call SPACE?){several}"
    if form.begin_id is not None:
        return answer
    # Ordinary tokens may spell the marker, and one of them begin in the text or end in the call.
    rules.append(f"marked[lazy]: /{_ANY}*{marker}/")
    rest = sentence(form.before.removeprefix(form.begin), tokenizer, True)
    rules.append(f"marked_call: marked {rest} call {sentence(form.after, tokenizer, True)}")
    others = f" (tool_call SPACE?){several}" if several == "*" else ""
    return f"{answer} | marked_call SPACE?{others}"


def _schemas(tools: Tools) -> Mapping[str, Any]:
    """The names of tools that may be called, with the schemas of their parameters."""
    names: Sequence[str] = tools.names if tools.name is None else [tools.name]
    given = tools.schemas
    return {name: {"type": "object", **given[name]} if given[name] else None for name in names}


def _thoughts(tokenizer: Tokenizer, begins_thinking: bool, field: str) -> list[str]:
    """The rules of a thinking block; none where the model has no tokens for it. Raises ApiError,
    about the field of the body that asks for a form, where there must be some."""
    begin, end = (tokenizer.fast.token_to_id(tag) for tag in (THINK_OPEN, THINK_CLOSE))
    if begin is None or end is None:
        if begins_thinking:
            what = "the form of an answer cannot be set with this chat template"
            raise ApiError(400, what, param=field)
        return []
    opened = "" if begins_thinking else f"<[{begin}]> "
    return [f"thoughts: {opened}THOUGHTS? <[{end}]> SPACE?", f"THOUGHTS: /{_ANY}+/"]


def _form(wanted: StructuredOutputs, field: str) -> list[str]:
    """The rules of a form. Raises ApiError where its schema is wrong."""
    if wanted.choice is not None:
        return choice_rules("form", wanted.choice)
    if wanted.regex is not None:
        return [f"form: /{_pattern(wanted.regex)}/"]
    schema = '{"type": "object"}' if wanted.json is None else str(wanted.json)
    try:
        guided = guided_schema(schema)
        require_schema(guided)
        return [f"form: %json {guided}"]
    except BadInput as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None


def _pattern(regex: str) -> str:
    """A regular expression between slashes."""
    parts = re.findall(r"\\.|[^\\]", regex, re.DOTALL)
    return "".join({"/": r"\/", "\n": r"\n"}.get(part, part) for part in parts)
