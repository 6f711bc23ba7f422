"""The forms in which families of models write tool calls, found by their chat templates; and the
generic one of those whose templates take no tools.

Sources: the chat templates of Qwen2.5, Qwen3, Qwen3-Coder and Hermes 2 Pro; of Llama 3.1 and 3.2;
of Mistral 7B v0.3 and Mistral Small 3 (later tokenizers write a name before its arguments, as
mistral-common does); of Granite 3 and Phi-4-mini; and vLLM's tool parsers."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, replace

from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.tool_texts import CALL_BEGIN, CALL_END, GENERIC_CALL, takes_tools

ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolForm:
    """How a family writes tool calls: JSON objects with a name and arguments, between two markers.

    A forced call is `before`, a JSON object with the keys `name` and `arguments_key`, and `after`.

    Args:
        name: of the form.
        begin: the marker before calls.
        before: `begin` and all else that a forced call begins with.
        after: what a forced call ends with.
        end: the marker after calls; a form may have none.
        arguments_key: of a call's object; `arguments` and `parameters` are both read, but for the
            generic form.
        separator: between two calls without a list; in a list a comma is.
        is_bare: an answer that begins with the JSON of a call is one without a marker, too.
        is_generic: the chat template takes no tools, which are described in the system turn: what
            names none of them is no call, even with a marker.
        is_xml: a call is XML, `<function=name><parameter=x>...</parameter></function>`; where it
            is forced, JSON.
        has_names: a name may stand before the JSON of its arguments, as in `name[ARGS]{...}`.
        id_length: of a call's id, where the chat template wants a certain one.
        begin_id: token id of `begin`, where that is a special token: then text shows it only with
            `skip_special_tokens=False`, and a grammar must ask for the token.
    """

    name: str
    begin: str
    before: str
    after: str
    end: str = ""
    arguments_key: str = "arguments"
    separator: str = ""
    is_bare: bool = False
    is_generic: bool = False
    is_xml: bool = False
    has_names: bool = False
    id_length: int | None = None
    begin_id: int | None = None

    def new_id(self) -> str:
        """An id for a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.id_length))


HERMES = ToolForm(
    "hermes", CALL_BEGIN, GENERIC_CALL.before, GENERIC_CALL.after, end=CALL_END
)  # Hermes, Qwen
GENERIC = replace(HERMES, name="generic", is_bare=True, is_generic=True)
QWEN_CODER = replace(HERMES, name="qwen_coder", is_xml=True)
LLAMA = ToolForm(
    "llama", "<|python_tag|>", "", "", arguments_key="parameters", separator=";", is_bare=True
)
MISTRAL = ToolForm("mistral", "[TOOL_CALLS]", "[TOOL_CALLS] [", "]", has_names=True, id_length=9)
GRANITE = ToolForm("granite", "<|tool_call|>", "<|tool_call|>[", "]")
PHI4 = replace(GRANITE, name="phi4", after="]<|/tool_call|>", end="<|/tool_call|>")
FUNCTOOLS = ToolForm("functools", "functools", "functools[", "]")

_OTHER_XML = "<arg_key>"  # of templates with `<tool_call>`, which is not known here


def tool_form(tokenizer: Tokenizer) -> ToolForm | None:
    """The form of a checkpoint's tool calls; None where it has no chat template, or one with tools
    that writes calls in a form that is not known here."""
    template = tokenizer.chat_template
    if template is None:
        return None
    form = _of_family(template, tokenizer) if takes_tools(template) else GENERIC
    return None if form is None else replace(form, begin_id=tokenizer.token_id(form.begin))


def _of_family(template: str, tokenizer: Tokenizer) -> ToolForm | None:
    if MISTRAL.begin in template:
        return MISTRAL
    if HERMES.begin in template and _OTHER_XML not in template:
        return QWEN_CODER if "<function=" in template and "<parameter=" in template else HERMES
    if FUNCTOOLS.before in template:
        return FUNCTOOLS
    if PHI4.end in template or tokenizer.token_id(PHI4.end) is not None:
        return PHI4
    if GRANITE.begin in template:
        return GRANITE
    is_llama = '"parameters"' in template and tokenizer.token_id(LLAMA.begin) is not None
    return LLAMA if is_llama else None


def described(tokenizer: Tokenizer | None) -> str:
    """One line about the form of a checkpoint's tool calls; empty where it has no chat template."""
    if tokenizer is None or tokenizer.chat_template is None:
        return ""
    form = tool_form(tokenizer)
    if form is None:
        return "tools are refused: the form in which this model writes calls is not known"
    more = ": the chat template takes no tools, the prompt describes them"
    return f"tool calls have the {form.name} form{more if form.is_generic else ''}"
