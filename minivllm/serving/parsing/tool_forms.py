"""The forms in which families of models write tool calls, found by their chat templates.

Sources: the chat templates of Qwen2.5, Qwen3, Qwen3-Coder and Hermes 2 Pro; of Llama 3.1 and 3.2;
of Mistral 7B v0.3 and Mistral Small 3 (later tokenizers write a name before its arguments, as
mistral-common does); of Granite 3 and Phi-4-mini; and vLLM's tool parsers."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, replace

from minivllm.models.load.tokenizer import Tokenizer

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
        arguments_key: of a call's object; `arguments` and `parameters` are both read.
        separator: between two calls without a list; in a list a comma is.
        is_bare: an answer that begins with the JSON of a call is one without a marker, too.
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
    "hermes", "<tool_call>", "<tool_call>\n", "\n</tool_call>", end="</tool_call>"
)  # Hermes, Qwen
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
    """The form of a checkpoint's tool calls; None where its chat template takes no tools, or writes
    calls in a form that is not known here."""
    template = tokenizer.chat_template or ""
    if "tools" not in template:
        return None
    form = None
    if MISTRAL.begin in template:
        form = MISTRAL
    elif HERMES.begin in template and _OTHER_XML not in template:
        form = QWEN_CODER if "<function=" in template and "<parameter=" in template else HERMES
    elif FUNCTOOLS.before in template:
        form = FUNCTOOLS
    elif PHI4.end in template or tokenizer.token_id(PHI4.end) is not None:
        form = PHI4
    elif GRANITE.begin in template:
        form = GRANITE
    elif '"parameters"' in template and tokenizer.token_id(LLAMA.begin) is not None:
        form = LLAMA
    return None if form is None else replace(form, begin_id=tokenizer.token_id(form.begin))
