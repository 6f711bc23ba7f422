"""Single tokens show the bytes that make up a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.serving.answers.token_texts import TokenTexts

TEXT = "the naïve 値 of 😀\n\tx = the"


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Tokenizer:
    """A tokenizer as Llama 2 has it: ▁ for a space, and bytes for what it does not know."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁thenofx=",
        "▁t",
        "he",
        "▁the",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    fast = FastTokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    return Tokenizer(tmp_path)


def test_bytes_of_byte_level_tokens_make_up_the_text() -> None:
    tokenizer = Tokenizer(EMBEDDED)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT)
    assert b"".join(map(texts.data, ids)).decode() == TEXT
    assert "\ufffd" in "".join(map(texts.text, ids))  # a character that is split
    labels = {texts.label(token_id) for token_id in range(6144)}
    assert len(labels) == 6144 and "bytes:\\xc3" in labels
    assert sum(map(texts.num_characters, ids)) == len(TEXT)
    assert texts.text(0) == "<|endoftext|>" and texts.data(10**6) == b""


def test_bytes_of_sentencepiece_tokens_make_up_the_text(sentencepiece: Tokenizer) -> None:
    texts = TokenTexts(sentencepiece)
    ids = sentencepiece.encode(TEXT)
    assert b"".join(map(texts.data, ids)).decode() == f" {TEXT}"
    assert texts.text(ids[0]) == " the"
