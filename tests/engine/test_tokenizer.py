"""Incremental text: characters split over tokens, chat templates."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from minivllm.engine.tokenizer import Detokenizer
from minivllm.errors import BadInput
from minivllm.models.load.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_add_up_to_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)
    assert "".join(pieces) + detokenizer.finish() == text


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Tokenizer) -> None:
    text, begins = "x y" * 200_000, Event()

    def encode() -> int:
        begins.set()
        return len(tokenizer.encode(text))

    turns = 0
    with ThreadPoolExecutor(1) as pool:
        ids = pool.submit(encode)
        begins.wait()
        while not ids.done():
            turns += 1
            sleep(0.001)
    assert ids.result() == len(text)
    assert turns > 10  # two or three where the lock is held


def test_an_unfinished_character_is_shown_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in ids] == ["a", ""]
    assert detokenizer.finish() == "\ufffd"


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.render_chat(messages)) == "[user]hi[assistant]"
    assert tokenizer.decode(tokenizer.render_chat(messages, think=True)) == "[user]hi![assistant]"


def test_chat_templates_are_rendered_as_by_transformers(tokenizer: Tokenizer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "é <b> & 'x'"}, {"role": "assistant", "content": "yes"}]
    template = (
        "{%- for m in messages %}{% if m.role == 'user' %}{{ m | tojson }}{% else %}{% "
        "generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}\n"
        "{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% "
        "endif %}{{ strftime_now('%Y') if strftime_now is defined }}"
    )
    chat = Tokenizer.__new__(Tokenizer)
    chat.chat_template, chat.special_tokens = template, {}
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True
    )
    assert chat.chat_text(messages) == theirs


def test_prompts_are_neither_cut_nor_padded(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As by transformers, whatever tokenizer.json was saved with."""
    tokenizer.fast.save(str(tmp_path / "tokenizer.json"))
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.enable_truncation(4)
    fast.enable_padding(length=8)
    fast.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer(tmp_path)
    for text in ("ab", "abcdefghij"):
        assert again.encode(text) == tokenizer.encode(text)


def test_half_a_character_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match="no character"):
        tokenizer.encode("a\ud800b")


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


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in the style of Llama 2: leading spaces as a mark, unknown characters as byte
    tokens."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", ",", "é"]
    fast = FastTokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True)
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_the_space_after_the_prompt_is_kept(sentencepiece: Tokenizer) -> None:
    hello, world, comma = 257, 258, 259
    detokenizer = Detokenizer(sentencepiece, prompt_token_ids=[hello])
    assert [detokenizer.push(i) for i in (world, comma, hello)] == [" world", ",", " Hello"]


@pytest.mark.parametrize("before", ["", "é", "😀", "😀😀", "日本語"])
def test_a_character_of_the_prompt_is_not_begun_in_its_middle(
    sentencepiece: Tokenizer, before: str
) -> None:
    """Bytes of which some make no character decode to none at all."""
    prompt = [257, *(1 + byte for byte in before.encode())]
    detokenizer = Detokenizer(sentencepiece, prompt_token_ids=prompt)
    text = "".join(detokenizer.push(1 + byte) for byte in "😀日".encode()) + detokenizer.finish()
    assert text == "😀日"


@settings(deadline=None)
@given(ids=st.lists(st.integers(1, 260), max_size=30))
def test_any_bytes_decode_without_a_crash(sentencepiece: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(sentencepiece)
    text = "".join(detokenizer.push(i) for i in ids) + detokenizer.finish()
    valid = [i for i in ids if i > 256]
    if valid == ids:
        assert text == sentencepiece.decode(ids)


def test_one_of_several_templates_is_the_default(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.fast.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer(tmp_path).chat_template == "d"
    config.write_text("{")
    with pytest.raises(BadInput, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path)


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet="aé€🌶", max_size=12), data=st.data())
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_an_answer_may_begin_inside_a_character(
    kind: str, text: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    """Wherever the prompt is cut, the answer's text is all that follows the prompt's last whole
    character."""
    one: Tokenizer = request.getfixturevalue("tokenizer" if kind == "bytes" else "sentencepiece")
    ids = one.encode(text) if kind == "bytes" else [1 + byte for byte in text.encode()]
    cut = data.draw(st.integers(0, len(ids)))
    begun = text.encode()[:cut].decode(errors="ignore")
    detokenizer = Detokenizer(one, prompt_token_ids=ids[:cut])
    answer = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.finish()
    assert answer == (text[len(begun) :] if cut < len(ids) else "")


def test_a_prompt_may_end_with_a_replacement_character(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=tokenizer.encode("ab\ufffd"))
    assert "".join(map(detokenizer.push, tokenizer.encode("cd"))) == "cd"


def test_bytes_that_make_no_character_are_not_held_for_ever(sentencepiece: Tokenizer) -> None:
    detokenizer = Detokenizer(sentencepiece, prompt_token_ids=[257])
    pieces = [detokenizer.push(1 + 0x80) for _ in range(200)]
    assert "".join(pieces).count("\ufffd") >= 200 - Detokenizer.HELD
    assert detokenizer.push(257).endswith(" Hello")


def test_what_was_told_is_not_told_again(sentencepiece: Tokenizer) -> None:
    """A byte that makes no character takes those beside it with it, in this decoder."""
    hello, e_acute = 257, [1 + byte for byte in "é".encode()]
    detokenizer = Detokenizer(sentencepiece, prompt_token_ids=[hello])
    text = "".join(map(detokenizer.push, [*e_acute, 1 + 0xF0, hello])) + detokenizer.finish()
    assert text == "é\ufffd Hello"


def test_special_tokens_are_text_only_where_they_are_asked_for(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_id("eos_token")
    assert (
        end is not None and tokenizer.token_id("<end>") == end and tokenizer.token_id("a") is None
    )
    ids = [*tokenizer.encode("a"), end]
    for skip, expected in ((True, "a"), (False, "a<end>")):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == expected
