"""Messages of a workload, written by the model's own chat template."""

from __future__ import annotations

import pytest

from minivllm.errors import BadInput
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import DATE, Tokenizer, chat_renderer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no "
    "robots') }}{% endif %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ date_string "
    "}}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    loaded = Tokenizer(EMBEDDED)
    loaded.chat_template = TEMPLATE
    return loaded


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
