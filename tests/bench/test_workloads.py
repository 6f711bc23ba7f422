"""Workloads: lengths, prompts, the prompt file, and content-addressed storage."""

from __future__ import annotations

import inspect
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from minivllm.bench.lengths import Lengths
from minivllm.bench.prompt_file import PromptLine, parse_line, read_prompt_file
from minivllm.bench.workloads import Chat, File, Smoke, Workload
from minivllm.errors import BadInput

CONF = Path(__file__).parents[2] / "conf" / "workload"


def encode(text: str) -> list[int]:
    """A tokenizer of one token a character."""
    return [ord(character) % 256 for character in text]


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


# ---- lengths


def draw(spec: Any, n: int = 20_000) -> list[int]:
    return Lengths.parse("input_len", spec).sample(np.random.default_rng(0), n)


def test_fixed_and_uniform_lengths() -> None:
    assert draw(7, 3) == draw({"distribution": "fixed", "value": 7}, 3) == [7, 7, 7]
    drawn = draw({"distribution": "uniform", "min": 3, "max": 6})
    assert set(drawn) == {3, 4, 5, 6}
    assert statistics.mean(drawn) == pytest.approx(4.5, abs=0.05)


@pytest.mark.parametrize("distribution", ["normal", "lognormal"])
def test_mean_and_deviation_are_those_of_the_lengths(distribution: str) -> None:
    drawn = draw({"distribution": distribution, "mean": 400, "std": 100})
    assert statistics.mean(drawn) == pytest.approx(400, rel=0.01)
    assert statistics.stdev(drawn) == pytest.approx(100, rel=0.03)
    skew = statistics.mean(((x - 400) / 100) ** 3 for x in drawn)
    assert skew == pytest.approx(0 if distribution == "normal" else 0.766, abs=0.1)  # (e^s² + 2) √(e^s² - 1)


@given(
    st.sampled_from(["normal", "lognormal"]),
    st.floats(1, 1e9),
    st.floats(0, 1e9),
    st.integers(1, 5000),
    st.integers(0, 5000),
)
def test_lengths_stay_within_their_bounds(kind: str, mean: float, std: float, low: int, width: int) -> None:
    spec = {"distribution": kind, "mean": mean, "std": std, "min": low, "max": low + width}
    drawn = draw(spec, 50)
    assert all(type(length) is int and low <= length <= low + width for length in drawn)
    assert Lengths.parse("x", spec).longest == low + width
    unbounded = Lengths.parse("x", {**spec, "min": None, "max": None})
    assert unbounded.longest is None
    assert min(unbounded.sample(np.random.default_rng(0), 50)) >= 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, "input_len=0 must be a whole number"),
        (1.5, "input_len=1.5 must be a whole number"),
        (True, "input_len=True"),
        ("64", "input_len='64'"),
        ({}, "input_len.distribution=None must be one of fixed, uniform, normal, lognormal"),
        ({"distribution": "zipf"}, "input_len.distribution='zipf'"),
        ({"distribution": ["uniform"]}, r"input_len.distribution=\['uniform'\]"),
        ({"distribution": "uniform", "min": 3}, "a uniform length also needs max"),
        ({"distribution": "uniform", "min": 3, "max": 2}, "input_len.min=3 is above input_len.max=2"),
        ({"distribution": "uniform", "min": 0, "max": 2}, "input_len.min=0"),
        ({"distribution": "uniform", "min": 1, "max": 2, "mean": 3}, "a uniform length has no mean"),
        ({"distribution": "uniform", "min": 1, "max": 2, "maximum": 3}, "no maximum; it takes min, max"),
        ({"distribution": "fixed", "value": 9, "min": 1}, "no min; write input_len=9"),
        ({"distribution": "normal", "mean": 3}, "also needs std"),
        ({"distribution": "normal", "mean": math.nan, "std": 1}, "input_len.mean=nan"),
        ({"distribution": "lognormal", "mean": 0, "std": 1}, "input_len.mean=0"),
        ({"distribution": "lognormal", "mean": 5, "std": -1}, "input_len.std=-1"),
        ({"distribution": "lognormal", "mean": 1, "std": 1e300}, "input_len.std=1e[+]300"),
    ],
)
def test_a_wrong_length_is_named(spec: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Lengths.parse("input_len", spec)


@given(
    st.dictionaries(
        st.sampled_from(["distribution", "value", "mean", "std", "min", "max", "?"]),
        st.one_of(
            st.none(),
            st.integers(),
            st.floats(),
            st.text(max_size=3),
            st.sampled_from(["fixed", "uniform", "normal", "lognormal"]),
        ),
    )
)
def test_any_mapping_is_lengths_or_a_line_of_advice(spec: dict[str, Any]) -> None:
    try:
        lengths = Lengths.parse("input_len", spec)
    except BadInput as error:
        assert str(error).startswith("input_len")
    else:
        assert all(1 <= length < 2**31 for length in lengths.sample(np.random.default_rng(0), 5))


# ---- synthetic workloads


def test_smoke_has_equal_requests_of_text() -> None:
    work = Smoke().generate(encode, 256, 128, seed=0, decode=decode)
    assert [(len(r.prompt_token_ids), r.max_tokens) for r in work.requests] == [(64, 32)] * 16
    assert all(request.ignore_eos for request in work.requests)
    assert len({request.prompt_token_ids for request in work.requests}) > 12
    for request in work.requests:
        assert request.text is not None and request.text == decode(list(request.prompt_token_ids))
        assert not request.text[0].isspace()  # begins where a line does
    assert len({request.request_id for request in work.requests}) == 16


def test_chat_draws_its_lengths() -> None:
    work = Chat(num_requests=500).generate(encode, 256, 384, seed=0)
    inputs = [len(request.prompt_token_ids) for request in work.requests]
    outputs = [request.max_tokens for request in work.requests]
    assert (min(inputs), max(inputs)) == pytest.approx((64, 256), abs=3)
    assert (min(outputs), max(outputs)) == pytest.approx((32, 128), abs=3)
    assert len(Chat().generate(encode, 256, 384, seed=0)) == 32


def test_without_a_tokenizer_prompts_are_random_ids() -> None:
    work = Chat().generate(None, 50, 384, seed=0)
    ids = {token for request in work.requests for token in request.prompt_token_ids}
    assert ids == set(range(50))
    assert all(request.text is None for request in work.requests)


def test_a_sparse_tokenizer_still_fills_prompts() -> None:
    work = Smoke(num_requests=2, input_len=300).generate(lambda text: encode(text[::40]), 256, 1000, seed=0)
    assert [len(request.prompt_token_ids) for request in work.requests] == [300, 300]
    with pytest.raises(BadInput, match="no prompt of 64 tokens"):
        Smoke().generate(lambda text: [], 256, 1000, seed=0)


def test_long_prompts_wrap_round_the_text() -> None:
    work = Smoke(num_requests=1, input_len=2_000_000).generate(encode, 256, 3_000_000, seed=0)
    assert len(work.requests[0].prompt_token_ids) == 2_000_000


def test_the_seed_makes_the_workload() -> None:
    first = Chat().generate(encode, 256, 384, seed=1)
    assert Chat().generate(encode, 256, 384, seed=1) == first
    assert Chat().generate(encode, 256, 384, seed=1).hash == first.hash
    assert Chat().generate(encode, 256, 384, seed=2).hash != first.hash


@pytest.mark.parametrize(
    ("workload", "longest"),
    [
        (Smoke(), 96),
        (Chat(), 384),
        (Chat(input_len=10), 138),
        (Chat(input_len={"distribution": "normal", "mean": 5, "std": 2}), None),
    ],
)
def test_longest_is_known_from_the_knobs(workload: Smoke | Chat, longest: int | None) -> None:
    assert workload.longest() == longest


def test_a_request_beyond_the_context_says_the_numbers() -> None:
    with pytest.raises(BadInput, match=r"64 prompt \+ 32 output = 96 tokens, and the context holds 95"):
        Smoke().check_lengths(95)
    with pytest.raises(
        BadInput, match=r"lower workload\.input_len or workload\.output_len, or raise model\.max"
    ):
        Smoke().generate(encode, 256, 95, seed=0)
    Smoke().check_lengths(96)
    wide = Chat(input_len={"distribution": "lognormal", "mean": 100, "std": 100})
    wide.check_lengths(200)  # nothing can be said before lengths are drawn
    with pytest.raises(BadInput, match=r"workload=chat: request \d+ has \d+ prompt"):
        wide.generate(encode, 256, 200, seed=0)


@pytest.mark.parametrize("number", [0, -1, 1.5, "3", True])
def test_a_wrong_number_of_requests_is_named(number: Any) -> None:
    with pytest.raises(BadInput, match=r"workload\.num_requests="):
        Smoke(num_requests=number)


@pytest.mark.parametrize("cls", [Smoke, Chat, File])
def test_option_files_show_every_knob_with_its_default(cls: type[Smoke | Chat | File]) -> None:
    options = yaml.safe_load((CONF / f"{cls.name}.yaml").read_text())
    assert options.pop("_target_") == f"minivllm.bench.workloads.{cls.__name__}"
    for name, value in options.items():
        if isinstance(value, dict):
            options[name] = {key: item for key, item in value.items() if item is not None}
    knobs = inspect.signature(cls).parameters
    assert options == {name: parameter.default for name, parameter in knobs.items()}


# ---- storage


def test_save_and_load(tmp_path: Path) -> None:
    work = Chat(num_requests=5).generate(encode, 256, 384, seed=0, decode=decode)
    path = work.save(tmp_path / "workloads")
    assert path.name == f"{work.hash}.parquet" and len(work.hash) == 16
    assert Workload.load(path) == work
    untouched = path.stat().st_mtime_ns
    assert work.save(tmp_path / "workloads") == path
    assert path.stat().st_mtime_ns == untouched
    assert list(path.parent.iterdir()) == [path]


def test_a_workload_without_text_is_stored_too(tmp_path: Path) -> None:
    work = Smoke(num_requests=2).generate(None, 256, 384, seed=0)
    assert Workload.load(work.save(tmp_path)) == work


def test_the_hash_is_of_the_work_and_not_of_names() -> None:
    request = Smoke(num_requests=1).generate(encode, 256, 384, seed=0).requests[0]

    def changed(**fields: Any) -> str:
        return Workload((replace(request, **fields),)).hash

    same = changed()
    assert changed(text="other", request_id="other") == same
    assert changed(max_tokens=31) != same
    assert changed(ignore_eos=False) != same
    assert changed(prompt_token_ids=request.prompt_token_ids[1:]) != same


def test_a_torn_or_altered_workload_is_refused(tmp_path: Path) -> None:
    path = Smoke(num_requests=2).generate(None, 256, 384, seed=0).save(tmp_path)
    other = path.rename(tmp_path / "0123456789abcdef.parquet")
    with pytest.raises(BadInput, match="other requests than its name says"):
        Workload.load(other)
    other.write_bytes(other.read_bytes()[:100])
    with pytest.raises(BadInput, match="cannot read the workload"):
        Workload.load(other)
    with pytest.raises(BadInput, match="cannot read the workload"):
        Workload.load(tmp_path / "missing.parquet")


# ---- the file of prompts


def prompt_file(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_every_form_of_a_line(tmp_path: Path) -> None:
    part = {"type": "text", "text": "ho"}
    path = prompt_file(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "abc"}\r',
        "",
        '{"prompt_token_ids": [1, 2], "max_tokens": 5, "id": "kept by nobody"}',
        '{"messages": [{"role": "user", "content": "hi"}], "output_len": 7}',
        json.dumps({"messages": [{"role": "user", "content": [part, part]}]}),
    )
    work = File(str(path), output_len=9).generate(encode, 256, 100, seed=0, decode=decode)
    assert [request.text for request in work.requests] == [
        "abc",
        "\x01\x02",
        "user: hi\nassistant:",
        "user: hoho\nassistant:",
    ]
    assert [request.max_tokens for request in work.requests] == [9, 5, 7, 9]
    assert work.requests[1].prompt_token_ids == (1, 2)
    assert not any(request.ignore_eos for request in work.requests)
    assert len(File(str(path), num_requests=2).generate(encode, 256, 200, seed=0)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ("[1]", "a line must be a JSON object"),
        ("{}", "exactly one of prompt, prompt_token_ids, messages; it has none of them"),
        ('{"prompt": "a", "messages": []}', "it has prompt and messages"),
        ('{"prompt": ""}', "prompt must be a non-empty string"),
        ('{"prompt": 3}', "prompt must be a non-empty string"),
        (r'{"prompt": "\ud800"}', "half a surrogate pair"),
        ('{"prompt_token_ids": []}', "prompt_token_ids must be a non-empty list"),
        ('{"prompt_token_ids": [1, -1]}', "whole numbers, 0 or more"),
        ('{"prompt_token_ids": [true]}', "whole numbers, 0 or more"),
        ('{"prompt_token_ids": [300]}', "token id 300 is outside the vocabulary of 256"),
        ('{"messages": []}', "messages must be a non-empty list"),
        ('{"messages": ["hi"]}', r"messages\[0\] must be an object"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\].content must be a non-empty string"),
        ('{"messages": [{"content": "x"}]}', r"messages\[0\].role must be a non-empty string"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "parts that are not text"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0 must be a whole number"),
        ('{"prompt": "a", "output_len": "5"}', "output_len='5' must be"),
        ('{"prompt": "a", "output_len": 5, "max_tokens": 5}', "mean the same"),
        (
            '{"prompt": "aaaa", "max_tokens": 97}',
            "4 prompt [+] 97 output = 101 tokens, and the context holds 100",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = prompt_file(tmp_path, '{"prompt": "fine"}', "", line)
    with pytest.raises(BadInput, match=f"prompts.jsonl:3: .*{message}"):
        File(str(path), output_len=1).generate(encode, 256, 100, seed=0)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, '{"prompt_token_ids": [1]}', '{"prompt": "a"}')
    with pytest.raises(
        BadInput, match=r"prompts.jsonl:2: this model has no tokenizer; give prompt_token_ids"
    ):
        File(str(path)).generate(None, 256, 200, seed=0)
    assert len(File(str(path), num_requests=1).generate(None, 256, 200, seed=0)) == 1
    with pytest.raises(BadInput, match=r"prompts\.jsonl:2: the prompt has no tokens"):
        File(str(path)).generate(lambda text: [], 256, 200, seed=0)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"set workload\.path="):
        File()
    with pytest.raises(BadInput, match="there is no such file"):
        File(str(tmp_path / "none.jsonl")).check_lengths(100)
    with pytest.raises(BadInput, match="cannot be read"):
        File(str(tmp_path)).longest()
    with pytest.raises(BadInput, match="holds no prompts"):
        File(str(prompt_file(tmp_path, "", " "))).longest()


def test_early_checks_of_a_file(tmp_path: Path) -> None:
    ids = prompt_file(
        tmp_path, '{"prompt_token_ids": [1, 2, 3]}', '{"prompt_token_ids": [1], "max_tokens": 9}'
    )
    assert File(str(ids), output_len=2).longest() == 10
    with pytest.raises(BadInput, match=r"prompts.jsonl:2: the request has 1 prompt [+] 9 output = 10"):
        File(str(ids), output_len=2).check_lengths(9)
    assert File(str(prompt_file(tmp_path, '{"prompt": "a"}'))).longest() is None


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}")
def test_any_bytes_are_a_request_or_a_line_of_advice(line: bytes) -> None:
    try:
        parsed = parse_line(line, "f:1")
    except BadInput as error:
        assert str(error).startswith("f:1: ") and "\n" not in str(error)
    else:
        assert (parsed.text is None) != (parsed.token_ids is None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "prompt_token_ids", "messages", "max_tokens", "output_len"]), json_values
    )
)
def test_any_object_is_a_request_or_a_line_of_advice(row: dict[str, Any]) -> None:
    try:
        parsed = parse_line(json.dumps(row).encode(), "f:1")
    except BadInput as error:
        assert str(error).startswith("f:1: ")
    else:
        assert bool(parsed.text) != bool(parsed.token_ids)
        assert parsed.max_tokens is None or parsed.max_tokens >= 1


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5))
def test_text_prompts_come_back_unchanged(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = prompt_file(tmp_path_factory.mktemp("f"), *(json.dumps({"prompt": text}) for text in texts))
    lines = read_prompt_file(path)
    assert lines == [PromptLine(f"{path}:{i}", text, None, None) for i, text in enumerate(texts, start=1)]
