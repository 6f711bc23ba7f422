"""Each call of lm-eval's against its own `hf` model, on the same weights in float32."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.errors import BadInput
from tests.evaluation.conftest import ASSETS, BOS, Pair

HELDOUT = (ASSETS / "heldout.txt").read_text()
END = "<|endoftext|>"


def assert_same(hf: list[tuple[float, bool]], ours: list[tuple[float, bool]]) -> None:
    assert [score for score, _ in ours] == pytest.approx(
        [score for score, _ in hf], rel=0, abs=1e-4
    )
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in hf]


# ---- loglikelihood


def test_loglikelihood_is_that_of_hf(pair: Pair) -> None:
    (greedy,), _ = pair.ask("generate_until", ("import numpy", {"max_gen_toks": 4}))
    hf, ours = pair.ask(
        "loglikelihood",
        ("def main():", "\n    return 1"),
        ("def main():", "\n    pass"),
        ("x = ", "1"),  # the space moves to the continuation
        ("", "import os"),  # conditioned on the token that ends texts
        ("", END + "import"),  # which is not doubled
        ("a", END),
        ("import numpy", greedy),
        (HELDOUT[500:900], HELDOUT[900:1000]),
    )
    assert_same(hf, ours)
    assert [is_greedy for _, is_greedy in ours][-2] and not all(is_greedy for _, is_greedy in ours)


def test_what_does_not_fit_loses_its_beginning_as_with_hf(pair: Pair) -> None:
    long, short = HELDOUT[:3000], HELDOUT[500:3000]
    for text in (long, short):
        assert len(pair.ours.tok_encode(text)) > pair.ours.max_length
    assert len(pair.ours.tok_encode(HELDOUT[:2000])) > pair.ours.max_length
    hf, ours = pair.ask(
        "loglikelihood", (long, "def f"), (HELDOUT[:1000], HELDOUT[1000:2000]), (short, "def f")
    )
    assert ours[0] == ours[2]
    assert_same(
        [(score / 1000, greedy) for score, greedy in hf],
        [(score / 1000, greedy) for score, greedy in ours],
    )


@pytest.mark.parametrize("short_of", [-1, 0, 1, 2, 3])
def test_windows_at_the_edge_of_the_context(pair: Pair, short_of: int) -> None:
    tokens = pair.ours.tok_encode(HELDOUT)[: pair.ours.max_length - short_of]
    assert len(tokens) == pair.ours.max_length - short_of
    request = [(("", ""), tokens[:-2], tokens[-2:])]
    assert_same(pair.hf._loglikelihood_tokens(request), pair.ours._loglikelihood_tokens(request))


def test_many_requests_come_back_in_order(pair: Pair) -> None:
    small = type(pair.ours)(pretrained=str(ASSETS), device="cpu", quant="fp32", batch_size=2)
    assert small.llm.engine.scheduler.policy.max_num_seqs == 2
    assert small.max_length == pair.hf.config.max_position_embeddings  # without a limit
    tokens = pair.ours.tok_encode(HELDOUT[:8000])
    cuts = [(i, i + 2 + i % 37, i + 3 + i % 37 + i % 5) for i in range(0, 1500, 31)]
    requests = [(("", ""), tokens[begin:middle], tokens[middle:end]) for begin, middle, end in cuts]
    assert_same(
        pair.hf._loglikelihood_tokens(requests, disable_tqdm=True),
        small._loglikelihood_tokens(requests, disable_tqdm=True),
    )


@pytest.mark.parametrize(
    "engine", [{"cache.prefix_caching": True}, {"cache": None}, {"batching": "static"}]
)
def test_the_engine_s_options_leave_scores_as_they_are(pair: Pair, engine: dict[str, Any]) -> None:
    model = type(pair.ours)(pretrained=str(ASSETS), device="cpu", quant="fp32", **engine)
    tokens = pair.ours.tok_encode(HELDOUT[:1200])
    # Each continuation has blocks of its own, whose scores a cache of prefixes could lose.
    requests = [(("", ""), tokens[:200], tokens[200 + i : 250 + i]) for i in range(6)]
    expected = pair.ours._loglikelihood_tokens(requests, disable_tqdm=True)
    for _ in range(2):  # the second time, a cache of prefixes knows them
        assert_same(expected, model._loglikelihood_tokens(requests, disable_tqdm=True))


def test_a_continuation_that_cannot_be_scored_is_refused(pair: Pair) -> None:
    for continuation in ([], [5] * (pair.ours.max_length + 1)):
        with pytest.raises(BadInput, match="cannot be scored"):
            pair.ours._loglikelihood_tokens([(("a", "b"), [1], continuation)])


def test_answers_beside_one_that_fails_are_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's cache has them when the error comes."""
    from lm_eval.api.instance import Instance

    kept: list[tuple[str, Any]] = []

    class Hook:
        def add_partial(self, kind: str, key: Any, value: Any) -> None:
            kept.append((kind, key))

    generate = pair.ours.llm.generate

    def one_fails(*given: Any, **more: Any) -> Any:
        results = generate(*given, **more)
        results[1].outputs[0].error = ArithmeticError("mine")
        return results

    monkeypatch.setattr(pair.ours, "cache_hook", Hook())
    monkeypatch.setattr(pair.ours.llm, "generate", one_fails)
    scored = [(("a", str(i)), [5, 6, 7], [8] * (3 - i)) for i in range(3)]
    with pytest.raises(ArithmeticError, match="mine"):
        pair.ours._loglikelihood_tokens(scored, disable_tqdm=True)
    asked = [
        Instance("generate_until", {}, ("a" * (3 - i), {"max_gen_toks": 2}), 0) for i in range(3)
    ]
    with pytest.raises(ArithmeticError, match="mine"):
        pair.ours.generate_until(asked, disable_tqdm=True)
    found = [("loglikelihood", scored[i][0]) for i in (0, 2)]
    assert kept == found + [("generate_until", asked[i].args) for i in (0, 2)]


# ---- rolling


def test_rolling_loglikelihood_is_that_of_hf(pair: Pair) -> None:
    texts = [HELDOUT[:300], HELDOUT[:5000], "", "x"]  # the second takes several windows
    hf, ours = pair.ask("loglikelihood_rolling", *((text,) for text in texts))
    assert len(pair.ours.tok_encode(texts[1])) > 2 * pair.ours.max_length
    assert ours[0] == pytest.approx(hf[0], rel=0, abs=1e-4)
    # hf adds up thousands of nats in float32, whose steps are then coarser than 1e-4.
    assert ours == pytest.approx(hf, rel=1e-6)


# ---- generation


def test_generated_text_is_that_of_hf(pair: Pair) -> None:
    hf, ours = pair.ask(
        "generate_until",
        ("def main():\n", {"until": ["\n\n"], "max_gen_toks": 40}),
        ("import ", {"until": ["\n", END], "max_gen_toks": 20}),
        (
            "class A",
            {"until": "ject", "max_new_tokens": 12, "do_sample": False, "temperature": 0.7},
        ),
        ("x = [", {"until": [], "max_gen_toks": 16, "num_beams": 1}),
        # the context is cut from the left
        (HELDOUT[:3000], {"until": ["\n\n\n"], "max_gen_toks": 30}),
        ("for i in range(", {"until": ["("], "max_gen_toks": 12, "repetition_penalty": 1.3}),
    )
    assert ours == hf
    assert all(ours)


def test_a_special_stop_string_ends_the_text(load: Callable[..., Pair], chat_folder: Path) -> None:
    model = load(chat_folder)
    params, until = model.ours._sampling({"until": ["\n", BOS], "max_gen_toks": 8})
    begin = model.ours.tokenizer.special_id("bos_token")
    assert params.stop == ("\n",) and set(params.stop_token_ids) == {begin, model.ours.eot_token_id}
    assert until == ["\n", BOS, END]


def test_sampling_goes_to_the_engine(pair: Pair) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3}
    params, _ = pair.ours._sampling(options)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.8, 0.9, 20, 3)
    assert params.max_tokens == pair.hf.max_gen_toks
    assert pair.ours._sampling({**options, "do_sample": False})[0].greedy


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"num_beams": 4}, "a beam ends at a token"),
        ({"max_gen_toks": 2048}, "leaves no room"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_generation_arguments_are_checked(
    pair: Pair, options: dict[str, Any], complaint: str
) -> None:
    from lm_eval.api.instance import Instance

    with pytest.raises(BadInput, match=complaint):
        pair.ours.generate_until([Instance("generate_until", {}, ("a", options), 0)])


def test_thinking_is_no_part_of_the_answer(pair: Pair) -> None:
    pair.ours.think_end_token = "\n"
    try:
        (hf,), (ours,) = pair.ask("generate_until", ("def main():\n", {"max_gen_toks": 20}))
    finally:
        pair.ours.think_end_token = None
    assert "\n" in hf and ours == hf.rpartition("\n")[2].lstrip()


# ---- special tokens and chat


def test_a_token_that_begins_texts_is_added_as_hf_adds_it(
    load: Callable[..., Pair], chat_folder: Path
) -> None:
    model = load(chat_folder)
    for text in ("def f", BOS + "def f", END + "x", ""):
        for special in (None, True, False):
            assert model.ours.tok_encode(text, special) == model.hf.tok_encode(text, special)
    assert model.ours.tok_encode("x")[0] == model.ours.prefix_token_id == model.hf.prefix_token_id
    hf, ours = model.ask("loglikelihood", ("def f", "(x)"), ("", "import"), (BOS + "x", " = 1"))
    assert_same(hf, ours)
    hf, ours = model.ask("loglikelihood_rolling", (HELDOUT[:200],))
    assert ours == pytest.approx(hf, rel=0, abs=1e-4)
    # one by one: of a batch, hf asks only its first text for the token
    for text in ("import", BOS + "def"):
        hf, ours = model.ask("generate_until", (text, {"max_gen_toks": 8}))
        assert ours == hf


def test_a_conversation_is_written_as_hf_writes_it(
    load: Callable[..., Pair], chat_folder: Path
) -> None:
    model = load(chat_folder)
    user, assistant = {"role": "user", "content": "hi "}, {"role": "assistant", "content": "well, "}
    cases = (([user], True), ([user, assistant], False), ([user, assistant, user], True))
    for messages, prompt in cases:
        text = model.ours.apply_chat_template(messages, prompt)
        assert text == model.hf.apply_chat_template(messages, prompt)
    assert model.ours.apply_chat_template([{"role": "system", "content": "s"}, user]).endswith(
        "hi" + END + "[assistant]"
    )
    assert model.ours.chat_template(True) == model.hf.chat_template(True)
    assert model.ours.tokenizer_name == model.hf.tokenizer_name


def test_a_base_model_refuses_to_chat(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.ours.llm.tokenizer, "chat_template", None)
    with pytest.raises(BadInput, match="no chat template"):
        pair.ours.apply_chat_template([{"role": "user", "content": "hi"}])


# ---- model arguments


def test_every_argument_of_the_engine_can_be_given(pair: Pair) -> None:
    model = type(pair.ours).create_from_arg_string(
        "pretrained=tiny,quant=int8,attention=eager,batching=sequential,cache=paged,cache.block_size=32,"
        "quant.skip=[down_proj],cache.num_blocks=none,cache.memory_fraction=0.01,runtime.threads=1",
        {"batch_size": 1, "device": "cpu", "max_batch_size": None},
    )
    config = model.llm.config
    chosen = {
        group: config["choices"][group] for group in ("quant", "attention", "batching", "cache")
    }
    assert chosen == {
        "quant": "int8",
        "attention": "eager",
        "batching": "sequential",
        "cache": "paged",
    }
    assert config["cache"]["block_size"] == 32 and config["cache"]["num_blocks"] is None
    assert config["quant"]["skip"] == ["down_proj"] and config["runtime"]["device"] == "cpu"
    assert model.get_model_info()["minivllm"]["quant"] == "int8"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "pretrained is missing"),
        ({"pretrained": "tiny", "quantt": "nf4"}, "did you mean quant"),
        ({"pretrained": "tiny", "dtype": "float32"}, "no such model argument"),
        ({"pretrained": "tiny", "decoding": "top_p"}, "lm-eval and its tasks decide this"),
        ({"pretrained": "tiny", "workload.num_requests": 3}, "lm-eval and its tasks decide this"),
        ({"pretrained": "tiny", "tracker": "mlflow"}, "lm-eval and its tasks decide this"),
        ({"pretrained": "tiny", "quality.window": 5}, "lm-eval and its tasks decide this"),
        ({"pretrained": "tiny", "quant": "nf5"}, "no such option"),
        ({"pretrained": "tiny", "cache.blocksize": 8}, "did you mean block_size"),
        ({"pretrained": "tiny", "batch_size": "many"}, "max_num_seqs"),
        ({"pretrained": "tiny", "enable_thinking": True}, "needs think_end_token"),
        ({"pretrained": "qwen3", "model.weights": "nowhere"}, "nowhere"),
    ],
)
def test_arguments_are_checked(pair: Pair, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput, match=re.escape(complaint)) as error:
        type(pair.ours)(**given)
    assert "\n" not in str(error.value)


def test_scoring_refuses_what_would_be_noise(pair: Pair) -> None:
    kind = type(pair.ours)
    with pytest.raises(BadInput, match="random"):
        kind(pretrained=str(ASSETS), device="cpu", **{"model.weights": "random"})
    model = kind(pretrained="tiny", device="cpu", enable_thinking=True, think_end_token="</think>")
    with pytest.raises(BadInput, match="for generation"):
        model.loglikelihood([])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the default is a device that exists")
def test_the_device_that_lm_eval_names_unasked_is_auto(pair: Pair) -> None:
    model = type(pair.ours)(pretrained="tiny", device="cuda:0")
    assert model._device.type == "cpu"


def test_a_checkpoint_without_tokenizer_is_refused(pair: Pair, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(ASSETS / name)
    with pytest.raises(BadInput, match="no tokenizer"):
        type(pair.ours)(pretrained=str(tmp_path), device="cpu")
