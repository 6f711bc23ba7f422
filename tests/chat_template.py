"""A chat template of a few characters, for tests of what templates are given."""

from __future__ import annotations

from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no "
    "robots') }}{% endif %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ date_string "
    "}}{% if add_generation_prompt %}<a>{% endif %}"
)


def templated_tokenizer() -> Tokenizer:
    """The embedded model's tokenizer with that template."""
    loaded = Tokenizer(EMBEDDED)
    loaded.chat_template = TEMPLATE
    return loaded
