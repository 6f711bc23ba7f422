"""Incremental text: characters split over tokens, stop strings, chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from minivllm.engine.tokenizer import Detokenizer, Tokenizer
from minivllm.errors import BadInput


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token a byte: every character above ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if think %}!{% endif %}[assistant]"
    config = {"chat_template": template, "eos_token": {"content": "<end>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_add_up_to_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)
    assert "".join(pieces) + detokenizer.finish() == text


def test_an_unfinished_character_is_shown_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in ids] == ["a", ""]
    assert detokenizer.finish() == "\ufffd"


@settings(deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=30),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(tokenizer, stop)
    shown, fed = "", ""
    for character in text:
        for token in tokenizer.encode(character):
            shown += detokenizer.push(token)
        fed += character
        if detokenizer.stopped:
            break
    shown += detokenizer.finish()
    # The stop string that completes first ends the text; where it begins is where the text ends.
    ends = [(fed.find(s) + len(s), fed.find(s)) for s in stop if s in fed]
    if ends:
        assert detokenizer.stopped
        first = min(end for end, _ in ends)
        assert shown == fed[: min(begin for end, begin in ends if end == first)]
    else:
        assert not detokenizer.stopped
        assert shown == text


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.render_chat(messages)) == "[user]hi[assistant]"
    assert tokenizer.decode(tokenizer.render_chat(messages, think=True)) == "[user]hi![assistant]"


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    assert Tokenizer.load(None) is None
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


def test_a_base_model_says_that_it_cannot_chat(tokenizer: Tokenizer) -> None:
    base = Tokenizer.__new__(Tokenizer)
    base.chat_template = None
    with pytest.raises(BadInput, match="preset=generate"):
        base.render_chat([{"role": "user", "content": "hi"}])
