"""What clients ask of the form of an answer, as structured outputs of the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from minivllm.engine.options import StructuredOutputs
from minivllm.errors import BadInput
from minivllm.extras.masks.compiling import quoted
from minivllm.extras.masks.json_schema import guided_schema, is_tag, require_schema
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.tool_texts import CallForm
from minivllm.serving.errors import ApiError

# Of a tool without parameters.
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def structured_outputs(response_format: Any = None, given: Any = None) -> StructuredOutputs | None:
    """What `response_format` or `structured_outputs` of completions and chat ask for; None: any
    text.

    Raises:
        ApiError: one of them has another form, or both are given.
    """
    form = _of_format(response_format, "response_format")
    if given is None:
        return form
    if form is not None:
        raise ApiError(
            400, "give either response_format or structured_outputs", param="structured_outputs"
        )
    return _checked(given, "structured_outputs")


def of_text_format(text_format: Any) -> StructuredOutputs | None:
    """What `text.format` of Responses asks for, where a schema lies beside its name; None: any
    text. Raises ApiError for another form."""
    return _of_format(text_format, "text.format")


def _of_format(form: Any, param: str) -> StructuredOutputs | None:
    """The same of OpenAI's formats: {"type": "text"}, "json_object" or "json_schema"; the latter
    with the schema in `json_schema`, or beside the type."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise ApiError(
            400, f"{param}.type must be text, json_object or json_schema", param=f"{param}.type"
        )
    where = f"{param}.json_schema" if "json_schema" in form else param
    holder = form.get("json_schema", form)
    if not isinstance(holder, Mapping) or not isinstance(holder.get("schema"), Mapping):
        raise ApiError(400, f"{where}.schema must be a JSON schema", param=f"{where}.schema")
    if not isinstance(holder.get("strict"), bool | None):
        raise ApiError(400, f"{where}.strict must be true or false", param=f"{where}.strict")
    return _checked({"json": dict(holder["schema"])}, f"{where}.schema")


def _checked(given: Any, param: str) -> StructuredOutputs | None:
    try:
        return StructuredOutputs.of(given)
    except BadInput as error:
        message = str(error).replace("decoding.structured_outputs", param)
        raise ApiError(400, message, param=param) from None


def call_rules(
    tools: Mapping[str, Any], form: CallForm, tokenizer: Tokenizer, spelled: bool = False
) -> list[str]:
    """Rules of a grammar with `tool_call`, one call of one of these tools, in the model's own form,
    with arguments that satisfy the tool's schema.

    Args:
        tools: names, with the JSON schemas of their parameters; None: a tool takes none.
        form: of the model's calls.
        tokenizer: of the model, whose special tokens may be part of the form.
        spelled: see `sentence`.

    Raises:
        ApiError: a schema is none, or llguidance is missing.
    """
    rules = [
        f"tool_call: {sentence(form.before, tokenizer, spelled)} call "
        f"{sentence(form.after, tokenizer, spelled)}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}",
    ]
    for number, (name, parameters) in enumerate(tools.items()):
        begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments_key}": '
        param = f"tools[{number}].parameters"
        try:
            schema = guided_schema(json.dumps(NO_PARAMETERS if parameters is None else parameters))
            require_schema(schema)
        except (BadInput, TypeError, ValueError, RecursionError) as error:
            raise ApiError(400, f"the schema of tool {name!r:.100}: {error}", param=param) from None
        rules.append(f'call_{number}: {quoted(begin)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {schema}")
    return rules


def sentence(text: str, tokenizer: Tokenizer, spelled: bool) -> str:
    """A text in a Lark rule, where special tokens are those tokens and not their characters.

    Args:
        text: of the rule.
        tokenizer: of the model.
        spelled: tags that are tokens, but no special ones, may be spelled by others, too.
    """
    added = tokenizer.fast.get_added_tokens_decoder()
    special = {
        token.content: number
        for number, token in added.items()
        if token.special or is_tag(token.content)
    }
    if not special:
        return quoted(text)
    pattern = "|".join(re.escape(one) for one in sorted(special, key=len, reverse=True))

    def written(part: str) -> str:
        if (number := special.get(part)) is None:
            return quoted(part)
        is_fixed = added[number].special or not spelled
        return f"<[{number}]>" if is_fixed else f"(<[{number}]> | {quoted(part)})"

    return " ".join(written(part) for part in re.split(f"({pattern})", text) if part)
