"""Messages of a workload, written by the model's own chat template."""

from __future__ import annotations

import pytest

from minivllm.errors import BadInput
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import DATE, Tokenizer, chat_renderer
from tests.chat_template import templated_tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return templated_tokenizer()


def test_messages_are_written_by_the_models_template(tokenizer: Tokenizer) -> None:
    render = chat_renderer(tokenizer)
    assert render is not None
    text, token_ids = render(
        [{"role": "developer", "content": "short"}, {"role": "user", "content": "hi"}]
    )
    assert text == f"<system>short<user>hi{DATE}<a>"
    assert list(token_ids) == tokenizer.encode(text, add_special_tokens=False)
    with pytest.raises(BadInput, match="no robots"):
        render([{"role": "robot", "content": "x"}])


def test_without_a_template_nothing_is_rendered(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = None
    assert chat_renderer(None) is chat_renderer(tokenizer) is None


def test_the_embedded_model_joins_contents() -> None:
    embedded = Tokenizer.load(EMBEDDED)
    assert embedded is not None
    contents = ["# <|im_start|>", "def f(a):\n", "", "    return", None]
    messages = [
        {"role": role, "content": content}
        for role, content in zip(
            ["system", "user", "assistant", "user", "user"], contents, strict=True
        )
    ]
    assert embedded.chat_text(messages) == "# <|im_start|>\ndef f(a):\n    return\n"
    assert embedded.chat_text(messages[:1]) == contents[0]  # the model goes on in this line


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("So: ", "So: "),
        (" two  ", "two  "),
        ([{"type": "text", "text": "b"}], "b"),
    ],
)
def test_an_answer_that_is_begun_has_no_end(tokenizer: Tokenizer, content: str, end: str) -> None:
    messages = [{"role": "user", "content": "So: b"}, {"role": "assistant", "content": content}]
    text = tokenizer.chat_text(messages, continue_final_message=True)
    assert text.startswith("<user>So: b<assistant>") and text.endswith(end)
    with pytest.raises(BadInput, match="none to continue"):
        tokenizer.chat_text(
            [messages[0], {"role": "a", "content": " "}], continue_final_message=True
        )
