"""Conversations with pictures and tools, as chat models write them."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any, cast

import pytest

from minivllm.extras.vision.options import VisionOptions
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.load.chat_template import Conversation
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.tool_texts import SYSTEM, instructions
from minivllm.models.vision.smolvlm_processor import SmolVLMProcessor
from minivllm.serving.answers.chat_model import ChatModel, ChatPrompt
from minivllm.serving.anthropic.conversation import conversation
from minivllm.serving.anthropic.schemas import CountBody
from minivllm.serving.errors import ApiError
from minivllm.serving.openai.response_input import read_input
from minivllm.serving.openai.tools import Tools
from minivllm.serving.options import ServeOptions
from minivllm.serving.parsing.tool_forms import GENERIC, HERMES, LLAMA, PHI4, ToolForm
from minivllm.serving.service import Service
from tests.models.load.test_tool_texts import CHATML, IN_SYSTEM
from tests.seeing import IMAGE_TOKEN, PROCESSOR, VISION, add_tokenizer, encoded, picture

CONFIG = {"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "vision_config": VISION}
DATA = base64.b64encode(encoded(picture(20, 20))).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = {"type": "text", "text": "what is this"}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    client: Any = type("Client", (), {"listeners": []})()
    pictures = Pictures(SmolVLMProcessor(CONFIG, PROCESSOR), tokenizer, VisionOptions())
    service = Service(ServeOptions(), client, cast(Any, None), tokenizer, "m", pictures)
    return ChatModel(service)


def prompt_of(chat_model: ChatModel, messages: Any) -> ChatPrompt:
    return asyncio.run(chat_model.prompt(messages))


def test_every_api_gives_the_same_prompt_and_picture(chat_model: ChatModel) -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    chat = prompt_of(chat_model, [{"role": "user", "content": [part, TEXT]}])
    items = [
        {"type": "input_image", "image_url": URL},
        {"type": "input_text", "text": TEXT["text"]},
    ]
    responses = prompt_of(chat_model, read_input([{"role": "user", "content": items}], None))
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    turn = {"role": "user", "content": [{"type": "image", "source": source}, TEXT]}
    body = CountBody(model="m", messages=[turn])
    messages = prompt_of(chat_model, conversation(body))
    assert chat.token_ids == responses.token_ids == messages.token_ids
    assert chat.token_ids.count(IMAGE_TOKEN) == 160
    found = [one.inputs and one.inputs.images[0].digest for one in (chat, responses, messages)]
    assert found[0] is not None and len({*found}) == 1
    assert prompt_of(chat_model, [{"role": "user", "content": "what"}]).inputs is None


def test_a_tool_may_answer_with_a_picture(chat_model: ChatModel) -> None:
    """As tools that take screenshots do."""
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    part = {"type": "image_url", "image_url": {"url": URL}}
    chat = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "ok", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [TEXT, part]},
    ]
    output = [
        {"type": "input_text", "text": TEXT["text"]},
        {"type": "input_image", "image_url": URL},
    ]
    items = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "ok"},
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c"}
    blocks = [TEXT, {"type": "image", "source": source}]
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}, use]},
        {"role": "user", "content": [{**result, "content": blocks}]},
    ]
    body = CountBody(model="m", messages=turns)
    prompts = [
        prompt_of(chat_model, given)
        for given in (chat, read_input(items, None), conversation(body))
    ]
    assert len({tuple(one.token_ids) for one in prompts}) == 1
    assert all(one.inputs is not None and len(one.inputs.images) == 1 for one in prompts)
    turns[2]["content"] = [{**result, "content": blocks[1:], "is_error": True}]
    failed = conversation(CountBody(model="m", messages=turns))[2]["content"]
    assert failed[0] == {"type": "text", "text": "Error: "} and failed[1]["type"] == "image_url"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://127.0.0.1/cat.png", "no URL is fetched"),
        ("file:///etc/passwd", "vision.folder names no folder"),
        ("data:image/png;base64,aGVsbG8=", "is broken or no picture"),
    ],
)
def test_what_is_not_read_is_a_clear_400(chat_model: ChatModel, url: str, words: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(ApiError, match=words) as error:
        prompt_of(chat_model, [{"role": "user", "content": [part, TEXT]}])
    assert error.value.status == 400


def test_a_model_without_a_template_is_what_is_wrong(chat_model: ChatModel) -> None:
    base = ChatModel(chat_model.service)
    base.template = None
    with pytest.raises(ApiError, match="has no chat template") as error:
        prompt_of(base, [{"role": "user", "content": "x"}])
    assert (error.value.status, error.value.param) == (400, "model")


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]


class _Tokenizer:
    """A template, whose texts are their own tokens."""

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template

    def token_id(self, text: str) -> int | None:
        is_of_phi = self.chat_template == IN_SYSTEM and text in (PHI4.begin, PHI4.end)
        return 1 if is_of_phi else None

    def decode(self, token_ids: str, skip_special_tokens: bool = True) -> str:
        return token_ids


class _Service:
    """Writes conversations as text."""

    model, pictures = "m", None

    def __init__(self, template: str) -> None:
        self.tokenizer = _Tokenizer(template)

    def require_tokenizer(self) -> _Tokenizer:
        return self.tokenizer

    def require_templates(self) -> _Service:
        return self

    async def token_ids(
        self, messages: list[dict[str, Any]], client: str, /, **variables: Any
    ) -> str:
        known = {"add_generation_prompt": True, **variables}
        return Conversation.of(self.tokenizer.chat_template, messages, known).text()


def written(*messages: dict[str, Any], tools: Any = TOOLS, template: str = IN_SYSTEM) -> str:
    model = ChatModel(cast(Any, _Service(template)))
    assert model.form is not None
    assert model.form.name == ("phi4" if template == IN_SYSTEM else "generic")
    return cast(str, asyncio.run(model.prompt(list(messages), tools)).token_ids)


def test_tools_are_a_text_of_the_system_message() -> None:
    listed = '<|tool|>[{"name": "f", "parameters": {"type": "object"}}]<|/tool|><|end|>'
    user = {"role": "user", "content": "u"}
    end = "<|user|>u<|end|><|assistant|>"
    assert written(user) == f"<|system|>{SYSTEM}{listed}{end}"
    system = {"role": "system", "content": "s"}
    assert written(system, user) == f"<|system|>s{listed}{end}"
    assert written(system, user, tools=None) == f"<|system|>s<|end|>{end}"


def test_calls_of_earlier_turns_are_in_their_texts() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    said = {"role": "assistant", "content": "so ", "tool_calls": [call, call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "r"}
    text = '<|tool_call|>[{"name": "f", "arguments": {"x": "é"}}]<|/tool_call|>'
    found = written({"role": "user", "content": "u"}, said, result, tools=None)
    assert found == (
        f"<|user|>u<|end|><|assistant|>so {text}{text}<|end|><|tool|>r<|end|><|assistant|>"
    )


def test_a_template_without_tools_has_the_generic_form() -> None:
    """The text is that of `LLM.chat`; the role `developer` is the system's."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    turns = [
        ("system", f"s\n\n{instructions(TOOLS)}"),
        ("user", "u"),
        ("assistant", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
        ("user", "<tool_response>\nr\n</tool_response>"),
    ]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert written(*messages, template=CHATML) == f"{text}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "words"),
    [(None, "m has no chat template"), ("{{ tools }}", "is not known to this server")],
)
def test_what_cannot_be_given_tools_is_a_400(template: Any, words: str) -> None:
    model = ChatModel(cast(Any, _Service(template)))
    with pytest.raises(ApiError, match=words) as error:
        model.require_tools()
    assert error.value.status == 400
    ChatModel(cast(Any, _Service(CHATML))).require_tools()


@pytest.mark.parametrize(
    ("form", "strict", "is_call"),
    [(GENERIC, False, True), (GENERIC, True, False), (HERMES, False, False), (LLAMA, True, True)],
)
def test_a_call_without_a_marker_is_none_where_a_grammar_binds_marked_ones(
    form: ToolForm, strict: bool, is_call: bool
) -> None:
    model = ChatModel(cast(Any, _Service(CHATML)))
    model.form = form
    parser = model.parser(ChatPrompt([], False), Tools(TOOLS, "auto", strict=strict))
    parser.push('{"name": "f", "arguments": {}}')
    assert bool(parser.num_calls) == is_call
