"""What ends an output, what of it is text, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput

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
        for params in (SamplingParams(stop="x"), SamplingParams(bad_words=["x"])):
            with pytest.raises(BadInput, match="need a tokenizer"):
                llm.generate([[YES]], params)
    finally:
        llm.engine.input_processor.tokenizer = tokenizer
