"""What ends an output, what of it is text, and what is said of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from minivllm.extras.stop_strings import StopStrings
from minivllm.models.load.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import byte_tokenizer

YES, NO, END, CALL = 1, 2, 3, 4


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A random model whose tokenizer marks its end of sequence as an ordinary token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = dict(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1
    )
    heads: dict[str, Any] = dict(
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=64
    )
    LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=END)
    ).save_pretrained(folder)
    fast = FastTokenizer(models.WordLevel({"<unk>": 0, "yes": YES, "no": NO}, unk_token="<unk>"))
    fast.decoder = decoders.Fuse()
    fast.add_tokens([AddedToken("<end>", special=False), AddedToken("<call>", special=True)])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    with LLM(str(folder), device="cpu", quant="fp32", overrides=["cache.num_blocks=40"]) as one:
        yield one


def answer(llm: LLM, script: list[int], **params: Any) -> tuple[Any, ...]:
    """Text, reason and stop of an output that is made to be `script`."""
    chosen = SamplingParams(
        max_tokens=8, token_mask=lambda prompt, output: [script[len(output)]], **params
    )
    output = llm.generate([[YES]], chosen)[0].outputs[0]
    return output.text, output.finish_reason, output.stop_reason


@pytest.mark.parametrize(
    ("script", "params", "expected"),
    [
        ([YES, END], {}, ("yes", "stop", None)),
        ([YES, END], {"include_stop_str_in_output": True}, ("yes<end>", "stop", None)),
        ([YES, NO], {"stop_token_ids": [NO]}, ("yes", "stop", NO)),
        (
            [YES, NO],
            {"stop_token_ids": [NO], "include_stop_str_in_output": True},
            ("yesno", "stop", NO),
        ),
        ([YES, NO], {"stop": "sn"}, ("ye", "stop", "sn")),
        ([YES, NO], {"stop": "sn", "include_stop_str_in_output": True}, ("yesn", "stop", "sn")),
        ([YES, CALL], {"stop": ["<call>"]}, ("yes", "stop", "<call>")),
        (
            [YES, CALL],
            {"stop": ["<call>"], "include_stop_str_in_output": True, "skip_special_tokens": False},
            ("yes<call>", "stop", "<call>"),
        ),
        ([YES, CALL, NO, END], {}, ("yesno", "stop", None)),
        ([YES, CALL, NO, END], {"skip_special_tokens": False}, ("yes<call>no", "stop", None)),
        ([YES] * 8, {"ignore_eos": True}, ("yes" * 8, "length", None)),
    ],
)
def test_stops(
    llm: LLM, script: list[int], params: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert answer(llm, script, **params) == expected


def test_a_beam_s_text_has_no_end_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, beam_width=2, n=2, allowed_token_ids=[YES, END])
    for output in llm.generate([[YES]], params)[0].outputs:
        assert output.text is not None and "<end>" not in output.text
        assert (END in output.token_ids) == (output.finish_reason == "stop")


def test_words_need_a_tokenizer(llm: LLM) -> None:
    tokenizer, llm.engine.input_processor.tokenizer = llm.engine.input_processor.tokenizer, None
    try:
        for name in ("stop", "bad_words"):
            with pytest.raises(BadInput, match=f"^{name} needs a tokenizer"):
                llm.generate([[YES]], SamplingParams(**{name: ["x"]}))
    finally:
        llm.engine.input_processor.tokenizer = tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def stop_strings(tokenizer: Any, stop: list[str], **params: Any) -> StopStrings:
    return StopStrings(tokenizer, [], SamplingParams(stop=tuple(stop), **params))


@settings(deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=30),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    detokenizer = stop_strings(tokenizer, stop)
    shown, fed = "", ""
    for character in text:
        for token in tokenizer.encode(character):
            shown += detokenizer.push(token)
        fed += character
        if detokenizer.stop_reason is not None:
            break
    shown += detokenizer.finish()
    # The stop string that completes first ends the text; where it begins is where the text ends.
    ends = [(fed.find(s) + len(s), fed.find(s)) for s in stop if s in fed]
    if ends:
        assert detokenizer.stop_reason is not None
        first = min(end for end, _ in ends)
        assert shown == fed[: min(begin for end, begin in ends if end == first)]
    else:
        assert detokenizer.stop_reason is None
        assert shown == text


class Pieces:
    """A tokenizer whose tokens are given pieces of bytes, cut anywhere."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


@settings(deadline=None, max_examples=500)
@given(
    text=st.text(alphabet="abé€", max_size=24),
    cuts=st.sets(st.integers(1, 60)),
    stop=st.lists(st.text("abé€", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_are_found_however_the_text_is_split(
    text: str, cuts: set[int], stop: list[str]
) -> None:
    whole = text.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    pieces = [whole[begin:end] for begin, end in itertools.pairwise(edges)]
    detokenizer = stop_strings(Pieces(pieces), stop)  # type: ignore[arg-type]
    shown, complete = "", ""
    for token, end in enumerate(edges[1:]):
        shown += detokenizer.push(token)
        complete = whole[:end].decode(errors="ignore")  # the characters that are complete
        if any(one in complete for one in stop):
            break
        assert detokenizer.stop_reason is None and complete.startswith(shown)
    shown += detokenizer.finish()
    begins = [complete.find(one) for one in stop if one in complete]
    assert (detokenizer.stop_reason is not None) == bool(begins)
    assert shown == complete[: min(begins)] if begins else shown == text
    assert not any(one in shown for one in stop)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = stop_strings(tokenizer, ["b"])
    ids = tokenizer.encode("abab")
    shown = "".join(detokenizer.push(i, may_stop=position >= 2) for position, i in enumerate(ids))
    assert (shown, detokenizer.stop_reason) == ("aba", "b")


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="abé", max_size=12),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    first=st.integers(0, 8),
)
def test_a_stop_string_may_begin_before_min_tokens(
    tokenizer: Tokenizer, text: str, stop: list[str], first: int
) -> None:
    """It counts where it ends: at a token that may be the last one."""
    ids = tokenizer.encode(text)
    detokenizer = stop_strings(tokenizer, stop)
    shown, fed = "", ""
    for position, token in enumerate(ids):
        shown += detokenizer.push(token, may_stop=position >= first)
        known, fed = fed, tokenizer.decode(ids[: position + 1]).rstrip("\ufffd")
        ends = [fed.find(one, max(0, len(known) - len(one) + 1)) for one in stop]
        if position >= first and (begins := [begin for begin in ends if begin >= 0]):
            assert detokenizer.stop_reason is not None and shown == fed[: min(begins)]
            return
        assert detokenizer.stop_reason is None and fed.startswith(shown)
    if len(ids) > first:
        assert shown + detokenizer.finish() == text and detokenizer.stop_reason is None


def test_a_stop_string_may_be_kept(tokenizer: Tokenizer) -> None:
    detokenizer = stop_strings(tokenizer, ["bc", "c"], include_stop_str_in_output=True)
    assert "".join(map(detokenizer.push, tokenizer.encode("abcd"))) == "abc"
    assert detokenizer.stop_reason == "bc"
