"""A checkpoint's tokenizer files: equal to what transformers makes of them, and one line for each
that is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.extras.stop_strings import StopStrings
from minivllm.models.load import tokenizer_files
from minivllm.models.load.generation import read_generation
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.tokenizer_files import as_bad_input, named_token_id, read_tokenizer
from tests.damage import damaged

TALK = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ image_token }}"


def word_level(folder: Path, config: dict[str, Any], special: dict[str, Any] | None = None) -> Path:
    fast = FastTokenizer(models.WordLevel({"hi": 0, "<unk>": 1}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<bos>", "<eos>", "<img>")]
    )
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    if special is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({}, {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}}),
        (
            {
                "bos_token": "<bos>",
                "image_token": "<img>",
                "extra_special_tokens": {"image_token": "<img>"},
            },
            None,
        ),
        (
            {
                "bos_token": {"__type": "AddedToken", "content": "<bos>"},
                "add_bos_token": True,
                "eos_token": None,
            },
            None,
        ),
        ({"bos_token": "<eos>"}, {"bos_token": "<bos>"}),
    ],
)
def test_chat_prompts_name_special_tokens_as_with_transformers(
    tmp_path: Path, config: dict[str, Any], special: dict[str, Any] | None
) -> None:
    from transformers import AutoTokenizer

    folder = word_level(tmp_path, config, special)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tokenize=False)
    assert Tokenizer(folder).chat_text(TALK, add_generation_prompt=False) == theirs


def test_a_conversation_begins_with_one_begin_of_text(tmp_path: Path) -> None:
    """The template writes it; the tokenizer, which adds one to other text, does not add a
    second."""
    folder = word_level(
        tmp_path,
        {"bos_token": "<bos>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"},
    )
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    begin = fast.token_to_id("<bos>")
    fast.post_processor = processors.TemplateProcessing(
        "<bos> $A", special_tokens=[("<bos>", begin)]
    )
    fast.save(str(folder / "tokenizer.json"))
    ours = Tokenizer(folder)
    assert ours.encode("hi") == [begin, 0]
    assert ours.render_chat(TALK) == [begin, 0]


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_vocab_and_merges_cut_text_as_with_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "h"),
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("1", "2"),
    ]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n"
    )
    added = {
        str(len(vocab)): {"content": "<|endoftext|>", "special": True},
        str(len(vocab) + 1): {"content": "<tool>", "special": False, "normalized": False},
    }
    config = {"tokenizer_class": kind, "eos_token": "<|endoftext|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = {"Qwen2Tokenizer": Qwen2Tokenizer, "GPT2Tokenizer": GPT2Tokenizer}[
        kind
    ].from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert ours is not None and ours.special_id("eos_token") == len(vocab)
    for text in ("hello world's 1234 é\n\n  x<tool>y<|endoftext|>", "e\u0301 I'LL go", ""):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_id_that_can_be_none_is_looked_for_in_the_tokenizer(tmp_path: Path) -> None:
    added = {"9" * 5000: {"content": "<eos>"}, "²": {"content": "<eos>"}, "x": {"content": "<eos>"}}
    word_level(tmp_path, {"eos_token": "<eos>", "added_tokens_decoder": added})
    assert named_token_id(tmp_path, "eos_token") == 3


def test_a_named_id_is_read_from_the_tokenizer_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_level(tmp_path, {"eos_token": "<eos>"})
    read: list[Path] = []

    def counted(folder: Path) -> tokenizer_files.TokenizerFiles:
        read.append(folder)
        return read_tokenizer(folder)

    monkeypatch.setattr(tokenizer_files, "read_tokenizer", counted)
    assert [named_token_id(tmp_path, "eos_token") for _ in range(3)] == [3, 3, 3] and len(read) == 1
    word_level(tmp_path, {"eos_token": "<bos>", "pad_token": "<eos>"})
    assert named_token_id(tmp_path, "eos_token") == 2 and len(read) == 2


def test_a_named_token_is_special_whatever_tokenizer_json_says(tmp_path: Path) -> None:
    fast = FastTokenizer(models.WordLevel({"yes": 0, "<|end|>": 1, "<unk>": 2}, unk_token="<unk>"))
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    assert Tokenizer(tmp_path).decode([0, 1]) == "yes"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": 5}, r"tokenizer_config\.json: bos_token=5"),
        ({"eos_token": {"content": ["x"]}}, r"eos_token=\{'content'"),
        ({"chat_template": 7}, "chat_template must be"),
        ({"chat_template": [{"name": "default"}]}, "chat_template must be"),
        ({"extra_special_tokens": {"image_token": 3}}, "image_token=3"),
    ],
)
def test_a_config_that_is_wrong_is_one_line(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        Tokenizer(word_level(tmp_path, config))


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    ],
)
@pytest.mark.parametrize("target", ["gone", "itself"])
def test_a_link_that_leads_nowhere_is_no_file_that_was_never_there(
    tmp_path: Path, name: str, target: str
) -> None:
    folder = word_level(tmp_path, {"bos_token": "<bos>"})
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name if target == "itself" else "gone")
    with pytest.raises(BadInput, match=rf"{name}.*(at the other end of this link|symbolic links)"):
        read_generation(folder)
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", '{"a": "x"}', "vocab.json: must be"),
        ("vocab.json", "[1]", "not a JSON object"),
        ("merges.txt", "a b c\n", "no pair"),
        ("merges.txt", "a q\n", "does not fit"),
        ("added_tokens.json", '{"<x>": 9}', "does not follow"),
        ("added_tokens.json", '{"<x>": "y"}', "added tokens must be"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "LlamaTokenizer"}',
            "AutoTokenizer and save_pretrained",
        ),
    ],
)
def test_merges_that_are_wrong_are_one_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert Tokenizer(tmp_path).encode("ab") == [2]
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=message):
        Tokenizer(tmp_path)


class PanicException(BaseException):
    """As the tokenizers library raises it where its Rust code panics."""


def test_a_map_of_characters_that_leads_out_of_itself_is_one_line(tmp_path: Path) -> None:
    array = [1 << 30 | 1 << 8] * 512
    charsmap = struct.pack("<I512I", 4 * len(array), *array) + b"b\0"
    fast = FastTokenizer(models.BPE({"a": 0}, []))
    parts: list[Any] = [normalizers.NFC(), normalizers.Precompiled(charsmap)]
    fast.normalizer = normalizers.Sequence(parts)
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInput, match=r"tokenizer\.json cannot be read as a tok") as raised:
        read_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_panics_are_bad_input_and_interrupts_stay_interrupts() -> None:
    interrupt = KeyboardInterrupt()
    assert as_bad_input("it cannot decode", interrupt) is interrupt
    for error in (ValueError("no such id"), PanicException("no such id")):
        told = as_bad_input("it cannot decode", error)
        assert isinstance(told, BadInput) and str(told) == "it cannot decode (no such id)"


def in_full(model: Any) -> bytes:
    """tokenizer.json with a part of every kind."""
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(" +"), "_")]
    )
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+| ?\d"), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    fast.add_tokens([AddedToken("<tool>", lstrip=True)])
    fast.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 9)])
    fast.enable_truncation(8)
    fast.enable_padding(length=4)
    return fast.to_str().encode()


WORDS = {"<unk>": 0, "h": 1, "i": 2, "hi": 3, "a": 4, "b": 5, "ab": 6, "<0x41>": 7, "_": 8}
FULL = [
    in_full(models.WordLevel(WORDS, unk_token="<unk>")),
    in_full(models.BPE(WORDS, [("h", "i"), ("a", "b")], unk_token="<unk>", byte_fallback=True)),
    in_full(models.WordPiece(WORDS, unk_token="<unk>")),
    in_full(models.Unigram([(word, -1.0 - i) for word, i in WORDS.items()], 0, True)),
]
ADDED = {"9": {"content": "<s>", "special": True}, "10": {"content": "<tool>", "lstrip": True}}
BESIDE = {
    "tokenizer_config.json": json.dumps(
        {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": True,
            "bos_token": "<s>",
            "eos_token": {"content": "<tool>", "special": True},
            "image_token": "<img>",
            "extra_special_tokens": {"image_token": "<img>"},
            "added_tokens_decoder": ADDED,
            "chat_template": [{"name": "default", "template": TEMPLATE}],
        }
    ).encode(),
    "special_tokens_map.json": b'{"bos_token": "<s>", '
    b'"pad_token": {"content": "<unk>", "lstrip": false}}',
    "added_tokens.json": b'{"<s>": 9, "<tool>": 10}',
    "vocab.json": json.dumps(WORDS).encode(),
    "merges.txt": b"#version: 0.2\nh i\na b\n",
    "chat_template.jinja": TEMPLATE.encode(),
}


@pytest.mark.fuzz("tokenizer files")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    whole=st.sampled_from(FULL).flatmap(lambda content: st.just(content) | damaged(content))
    | st.none(),
    beside=st.fixed_dictionaries(
        {}, optional={name: damaged(content) for name, content in BESIDE.items()}
    ),
    ids=st.lists(st.integers(0, 12), max_size=8),
)
def test_any_files_are_a_tokenizer_or_one_line(
    tmp_path: Path, whole: bytes | None, beside: dict[str, bytes], ids: list[int]
) -> None:
    for name, content in {"tokenizer.json": whole, **BESIDE, **beside}.items():
        (tmp_path / name).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name).write_bytes(content)
    try:
        tokenizer = Tokenizer(tmp_path)
        tokenizer.decode(tokenizer.encode("hi ab 12 <s><tool> é"))
        assert tokenizer.special_id("bos_token") in (None, *range(1 << 20))
        detokenizer = StopStrings(tokenizer, ids[:3], SamplingParams(stop=("ab",)))
        "".join(map(detokenizer.push, ids[3:])) + detokenizer.finish()
    except BadInput as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
