"""Workloads: lengths, prompts, the prompt file, and content-addressed storage."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from minivllm.bench.driver import drive
from minivllm.bench.workloads.agents.agentic import Agentic
from minivllm.bench.workloads.arrivals import Concurrency
from minivllm.bench.workloads.from_file.file import File
from minivllm.bench.workloads.from_file.prompt_file import (
    PromptLine,
    parse_conversation,
    parse_entry,
    read_prompt_file,
)
from minivllm.bench.workloads.from_file.trace import Trace
from minivllm.bench.workloads.generator import Reader
from minivllm.bench.workloads.images import Images
from minivllm.bench.workloads.lengths import NAMES, Lengths
from minivllm.bench.workloads.multi_turn import MultiTurn
from minivllm.bench.workloads.served import Served
from minivllm.bench.workloads.shared_prefix import SharedPrefix
from minivllm.bench.workloads.synthetic import Chat, Code, LongDocument, Smoke, Summarize, Synthetic
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.config.compose import OPTIONS as DATACLASSES
from minivllm.config.compose import build, compose
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.platform.options import filled
from tests.bench.scripted import ScriptedClock

CONF = Path(__file__).parents[3] / "conf" / "workload"


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
    # (e^s² + 2) √(e^s² - 1)
    assert skew == pytest.approx(0 if distribution == "normal" else 0.766, abs=0.1)


@given(
    st.sampled_from(["normal", "lognormal"]),
    st.floats(1, 1e9),
    st.floats(0, 1e9),
    st.integers(1, 5000),
    st.integers(0, 5000),
)
def test_lengths_stay_within_their_bounds(
    kind: str, mean: float, std: float, low: int, width: int
) -> None:
    spec = {"distribution": kind, "mean": mean, "std": std, "min": low, "max": low + width}
    drawn = draw(spec, 50)
    assert all(type(length) is int and low <= length <= low + width for length in drawn)
    assert Lengths.parse("x", spec).longest == low + width
    unbounded = Lengths.parse("x", {**spec, "min": None, "max": None})
    assert unbounded.longest is None
    assert min(unbounded.sample(np.random.default_rng(0), 50)) >= 1


def test_empirical_lengths_are_drawn_from_their_values(tmp_path: Path) -> None:
    drawn = draw({"distribution": "empirical", "values": [5, 9, 9, 700]})
    assert set(drawn) == {5, 9, 700}
    assert drawn.count(9) / len(drawn) == pytest.approx(0.5, abs=0.02)
    drawn = draw({"distribution": "empirical", "values": [5, 9, 7], "weights": [1, 3, 0]})
    assert drawn.count(9) / len(drawn) == pytest.approx(0.75, abs=0.02) and set(drawn) == {5, 9}
    path = tmp_path / "lengths.txt"
    path.write_bytes(b"\xef\xbb\xbf12\r\n\r\n 40 \r\n12")
    lengths = Lengths.parse("x", {"distribution": "empirical", "path": str(path)})
    assert lengths.values == (12, 40, 12) and lengths.longest == 40
    path.write_text("12\n12.5\n")
    with pytest.raises(BadInput, match=r"lengths.txt:2: '12.5' is not a number of tokens"):
        Lengths.parse("x", {"distribution": "empirical", "path": str(path)})


@pytest.mark.fuzz("files of lengths")
@given(st.binary(max_size=60))
@example(b"9" * 5000)
@example(b"\xc2\xb2")
@example(b"\x1c0")  # a space to str.strip, and not to int
def test_any_file_is_lengths_or_a_line_of_advice(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("lengths") / "f"
    path.write_bytes(data)
    try:
        lengths = Lengths.parse("x", {"distribution": "empirical", "path": str(path)})
    except BadInput as error:
        assert str(path) in str(error) or "x.values=[]" in str(error)
        assert "\n" not in str(error)
    else:
        assert all(value >= 1 for value in lengths.values)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"distribution": "empirical"}, "an empirical length needs values or path, one of them"),
        ({"distribution": "empirical", "values": [1], "path": "x"}, "values or path, one of them"),
        (
            {"distribution": "empirical", "values": []},
            r"input_len.values=\[\] must be a list of lengths",
        ),
        ({"distribution": "empirical", "values": "12"}, "input_len.values='12' must be a list"),
        (
            {"distribution": "empirical", "values": [3, 0]},
            "input_len.values=0 must be a whole number",
        ),
        (
            {"distribution": "empirical", "values": [3], "weights": [0]},
            "input_len.weights=.* not all 0",
        ),
        ({"distribution": "empirical", "values": [3, 4], "weights": [1]}, "must be 2 numbers"),
        ({"distribution": "empirical", "values": [3], "max": 4}, "an? empirical length has no max"),
        (
            {"distribution": "empirical", "path": "nowhere"},
            "input_len.path=nowhere: there is no such file",
        ),
        (0, "input_len=0 must be a whole number"),
        (1.5, "input_len=1.5 must be a whole number"),
        (True, "input_len=True"),
        ("64", "input_len='64'"),
        (
            {},
            "input_len.distribution=None must be one of fixed, uniform, normal, lognormal, "
            "empirical",
        ),
        ({"distribution": "zipf"}, "input_len.distribution='zipf'"),
        ({"distribution": ["uniform"]}, r"input_len.distribution=\['uniform'\]"),
        ({"distribution": "uniform", "min": 3}, "a uniform length also needs max"),
        (
            {"distribution": "uniform", "min": 3, "max": 2},
            "input_len.min=3 is above input_len.max=2",
        ),
        ({"distribution": "uniform", "min": 0, "max": 2}, "input_len.min=0"),
        (
            {"distribution": "uniform", "min": 1, "max": 2, "mean": 3},
            "a uniform length has no mean",
        ),
        (
            {"distribution": "uniform", "min": 1, "max": 2, "maximum": 3},
            "no maximum; it takes min, max",
        ),
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
    assert ids == set(range(1, 50))  # the first one is special in most vocabularies
    assert all(request.text is None for request in work.requests)


def test_a_sparse_tokenizer_still_fills_prompts() -> None:
    work = Smoke(num_requests=2, input_len=300).generate(
        lambda text: encode(text[::40]), 256, 1000, seed=0
    )
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


def test_a_request_beyond_the_context_says_the_numbers() -> None:
    with pytest.raises(
        BadInput,
        match=r"64 prompt \+ 32 output = 96 tokens, and the context holds 95.*if it is below the "
        r"model's own",
    ):
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


OPTIONS = [Smoke, Chat, LongDocument, Summarize, Code, SharedPrefix, MultiTurn, File, Trace]
OPTIONS += [Agentic, Images]


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.name)
def test_an_option_file_names_its_class_and_every_length_takes_a_distribution(cls: Any) -> None:
    options = yaml.safe_load((CONF / f"{cls.name}.yaml").read_text())
    assert options == {"_target_": f"{cls.__module__}.{cls.__name__}"}
    knobs = filled(DATACLASSES[options["_target_"]], {})
    lengths = [value for value in knobs.values() if isinstance(value, dict)]
    assert all({"distribution", *NAMES} == {*length} for length in lengths)


def test_there_is_an_option_file_for_every_workload() -> None:
    made = {cls.name for cls in OPTIONS}
    assert {file.stem for file in CONF.glob("*.yaml")} == made | {Served.name}


@pytest.mark.parametrize(
    "cls", [Smoke, Chat, Summarize, Code, SharedPrefix, MultiTurn], ids=lambda cls: cls.name
)
def test_the_embedded_models_context_holds_what_it_is_asked(cls: Any) -> None:
    cls().check_lengths(2048)
    work = cls().generate(encode, 256, 2048, seed=0, decode=decode)
    assert max(request.length for request in work.requests) <= 2048
    assert all(request.text == decode(list(request.prompt_token_ids)) for request in work.requests)


@pytest.mark.parametrize("cls", OPTIONS[:7], ids=lambda cls: cls.name)
def test_lengths_can_be_set_in_every_synthetic_workload(cls: Any) -> None:
    shorter = {"prefix_len": 5} if cls is SharedPrefix else {}
    work = cls(input_len=30, output_len=3, **shorter).generate(None, 100, 200, seed=0)
    own = {len(request.prompt_token_ids) for request in work.requests}
    assert own == {40 if cls is SharedPrefix else 30} and {r.max_tokens for r in work.requests} == {
        3
    }
    with pytest.raises(BadInput, match=rf"workload={cls.name}: .*the context holds 20"):
        cls(input_len=30, output_len=3, **shorter).check_lengths(20)


def test_what_the_workloads_are_like() -> None:
    def lengths(workload: Synthetic) -> tuple[list[int], list[int]]:
        requests = workload.generate(None, 9, 40_000, seed=0).requests
        return [len(r.prompt_token_ids) for r in requests], [r.max_tokens for r in requests]

    inputs, outputs = lengths(LongDocument(num_requests=200))
    assert (
        min(inputs) < 9000 and max(inputs) > 32000 and min(inputs) >= 8192 and max(inputs) <= 32768
    )
    inputs, outputs = lengths(Summarize(num_requests=2000))
    assert statistics.mean(inputs) / statistics.mean(outputs) == pytest.approx(10, abs=1.5)
    inputs, outputs = lengths(Code(num_requests=2000))
    assert 12 < statistics.median(outputs) < 16 < statistics.mean(outputs) - 4
    assert statistics.median(inputs) > 50 * statistics.median(outputs)


# ---- shared prefixes


def test_a_tree_of_prefixes_is_shared_token_for_token() -> None:
    tree = SharedPrefix(200, input_len=8, num_prefixes=2, prefix_len=16, depth=3, branching=3)
    prompts = [
        request.prompt_token_ids for request in tree.generate(None, 5000, 100, seed=0).requests
    ]
    assert {len(prompt) for prompt in prompts} == {3 * 16 + 8}
    for level, nodes in ((1, 2), (2, 6), (3, 18)):
        assert len({tuple(prompt[: 16 * level]) for prompt in prompts}) == nodes
    assert len({tuple(prompt[48:]) for prompt in prompts}) == 200


def test_text_has_its_first_token_once(tmp_path: Path) -> None:
    """What a tokenizer puts before everything is no part of what follows on other text, or of an
    answer's length."""
    first = 250  # no character of the text

    def begun(text: str) -> list[int]:
        return [first, *encode(text), *end]

    end: list[int] = []
    for tree in (
        SharedPrefix(8, 5, prefix_len=9, depth=3),
        SharedPrefix(8, 5, prefix_len=1, depth=1),
    ):
        for request in tree.generate(begun, 256, 100, seed=0).requests:
            prompt = list(request.prompt_token_ids)
            assert prompt[0] == first and prompt.count(first) == 1 and len(prompt) in (32, 6)
    conversations = MultiTurn(3, 4, input_len=7).generate(begun, 256, 999, seed=0).requests
    assert [r.prompt_token_ids.count(first) for r in conversations] == [1, 0, 0, 0] * 3
    assert {len(r.prompt_token_ids) for r in conversations} == {7}
    (asked,) = (
        File(share_gpt(tmp_path, TALK), format="sharegpt")
        .generate(begun, 256, 100, seed=0)
        .requests
    )
    assert asked.prompt_token_ids[0] == first and asked.max_tokens == len("hello")
    end.append(251)
    further = Reader(begun, 256, 100, None).encode_further
    assert further is not None and further("hello") == encode("hello") and further("") == []


def test_prefixes_of_drawn_lengths_are_shared_too() -> None:
    sizes = {"distribution": "uniform", "min": 3, "max": 40}
    flat = SharedPrefix(60, input_len=1, num_prefixes=3, prefix_len=sizes, depth=1)
    work = flat.generate(encode, 256, 100, seed=4)
    assert len({tuple(r.prompt_token_ids[:-1]) for r in work.requests}) == 3
    assert (
        work == flat.generate(encode, 256, 100, seed=4) != flat.generate(encode, 256, 100, seed=5)
    )
    with pytest.raises(BadInput, match=r"workload=shared_prefix: .*lower workload\.prefix_len"):
        flat.check_lengths(72)
    flat.check_lengths(73)


def test_the_cache_computes_a_shared_prefix_once() -> None:
    """The first request computes 64 + 16 tokens, each later one 16: whole blocks of 16, since none
    covers a prompt."""
    config = compose(["runtime.device=cpu", "quant=fp32", "cache.prefix_caching=true"])
    engine = build(config["engine"], config=config)
    work = SharedPrefix(5, 16, 2, True, num_prefixes=1, prefix_len=64, depth=1).generate(
        None, 4000, 2048, 0
    )
    drive(engine, work, Concurrency(1), SamplingParams(), ScriptedClock())
    assert engine.liveness()["cache"]["prefix_tokens_reused"] == 4 * 64
    engine.close()


# ---- storage


def stored(path: Path) -> list[dict[str, Any]]:
    """What a stored workload holds, without what a request lacks."""
    return [
        {name: value for name, value in row.items() if value is not None}
        for row in pq.read_table(path).to_pylist()
    ]


def vars_of(request: WorkloadRequest) -> dict[str, Any]:
    """The same of a request, its token ids as a list."""
    row = {name: value for name, value in request.row().items() if value is not None}
    return {**row, "prompt_token_ids": list(request.prompt_token_ids)}


def test_a_workload_is_stored_once(tmp_path: Path) -> None:
    work = Chat(num_requests=5).generate(encode, 256, 384, seed=0, decode=decode)
    path = work.save(tmp_path / "workloads")
    assert path.name == f"{work.hash}.parquet" and len(work.hash) == 16
    assert stored(path) == [vars_of(request) for request in work.requests]
    untouched = path.stat().st_mtime_ns
    assert work.save(tmp_path / "workloads") == path
    assert path.stat().st_mtime_ns == untouched
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[:-9], lambda content: b"x" + content[1:]],
)
def test_a_damaged_file_of_a_workload_is_made_again(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = Chat(num_requests=5).generate(encode, 256, 384, seed=0).save(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    work = Chat(num_requests=5).generate(encode, 256, 384, seed=0)
    assert work.save(tmp_path) == path and stored(path) == [
        vars_of(request) for request in work.requests
    ]
    other = Chat(num_requests=5).generate(encode, 256, 384, seed=1).save(tmp_path / "other")
    path.write_bytes(other.read_bytes())
    again = Chat(num_requests=5).generate(encode, 256, 384, seed=0)
    assert stored(again.save(tmp_path)) == [vars_of(request) for request in work.requests]


def test_more_prompts_than_memory_holds_are_refused_before_any_is_made() -> None:
    for generator in (Smoke(10**8), SharedPrefix(10**7), MultiTurn(10**8)):
        with pytest.raises(
            BadInput,
            match=r"workload\.num_(requests|conversations).* at most 5,000,000 .*ask for fewer",
        ):
            generator.check_lengths(4096)


def test_a_workload_without_text_is_stored_too(tmp_path: Path) -> None:
    work = Smoke(num_requests=2).generate(None, 256, 384, seed=0)
    assert stored(work.save(tmp_path)) == [vars_of(request) for request in work.requests]


def test_the_hash_is_of_the_work_and_not_of_names() -> None:
    request = Smoke(num_requests=1).generate(encode, 256, 384, seed=0).requests[0]

    def changed(**fields: Any) -> str:
        return Workload((replace(request, **fields),)).hash

    same = changed()
    assert changed(text="other", request_id="other") == same
    assert changed(max_tokens=31) != same
    assert changed(ignore_eos=False) != same
    assert changed(prompt_token_ids=request.prompt_token_ids[1:]) != same


# ---- the file of prompts


def prompt_file(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
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
        (
            '{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}',
            "parts that are not text",
        ),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0 must be a whole number"),
        ('{"prompt": "a", "output_len": "5"}', "output_len='5' must be"),
        ('{"prompt": "a", "output_len": 5, "max_tokens": 5}', "mean the same"),
        (
            '{"prompt": "aaaa", "max_tokens": 97}',
            "4 prompt [+] 97 output = 101 tokens, and the context holds 100",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(
    tmp_path: Path, line: str | bytes, message: str
) -> None:
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
    with pytest.raises(BadInput, match="is a folder, and none that save_to_disk"):
        File(str(tmp_path)).check_lengths(100)
    with pytest.raises(BadInput, match="holds no prompts"):
        File(str(prompt_file(tmp_path, "", " "))).check_lengths(100)


def test_early_checks_of_a_file(tmp_path: Path) -> None:
    ids = prompt_file(
        tmp_path, '{"prompt_token_ids": [1, 2, 3]}', '{"prompt_token_ids": [1], "max_tokens": 9}'
    )
    File(str(ids), output_len=2).check_lengths(10)
    with pytest.raises(
        BadInput, match=r"prompts.jsonl:2: the request has 1 prompt [+] 9 output = 10"
    ):
        File(str(ids), output_len=2).check_lengths(9)
    # not known yet
    File(str(prompt_file(tmp_path, '{"prompt": "a"}')), output_len=9).check_lengths(9)


TALK = {
    "id": "x",
    "conversations": [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "hi there"},
        {"from": "gpt", "value": "hello"},
        {"from": "human", "value": "and now?"},
    ],
}


def share_gpt(folder: Path, *conversations: Any, newline: str = "\n") -> str:
    path = folder / "sharegpt.json"
    path.write_bytes(json.dumps(conversations, indent=1).replace("\n", newline).encode())
    return str(path)


def test_a_share_gpt_file_gives_questions_and_lengths(tmp_path: Path) -> None:
    asked = {
        "conversations": [
            {"from": "user", "value": "why?"},
            {"from": "assistant", "value": "because so"},
        ]
    }
    unanswered = {"conversations": [{"from": "human", "value": "hello?"}]}
    begun = {
        "conversations": [{"from": "gpt", "value": "as I said"}, {"from": "gpt", "value": "x"}]
    }
    path = share_gpt(
        tmp_path, TALK, unanswered, begun, {"conversations": []}, asked, newline="\r\n"
    )
    work = File(path).generate(encode, 256, 100, seed=0)
    assert [(r.text, r.max_tokens, r.ignore_eos) for r in work.requests] == [
        ("hi there", 5, False),
        ("why?", 10, False),
    ]
    assert work == File(path, format="sharegpt").generate(encode, 256, 100, seed=0)
    assert len(File(path, num_requests=1, ignore_eos=True).generate(encode, 256, 100, seed=0)) == 1
    File(path).check_lengths(100)


def test_what_is_too_long_can_be_left_out_and_is_counted(tmp_path: Path) -> None:
    long = {
        "conversations": [{"from": "human", "value": "x" * 95}, {"from": "gpt", "value": "y" * 6}]
    }
    path = share_gpt(tmp_path, long, TALK, TALK)
    with pytest.raises(
        BadInput,
        match=r"conversation 1: the request has 95 prompt .*or leave it out with "
        r"workload\.too_long=skip",
    ):
        File(path).generate(encode, 256, 100, seed=0)
    work = File(path, too_long="skip", num_requests=1).generate(encode, 256, 100, seed=0)
    assert [r.text for r in work.requests] == ["hi there"]
    assert work.notes == (
        "workload=file: 1 requests were left out, longer than the context of 100",
        "workload=file: 1 questions come after the first answer of their conversation and were "
        "not sent",
    )
    with pytest.raises(
        BadInput, match="no request that can be used: 3 are longer than the context of 9"
    ):
        File(path, too_long="skip").generate(encode, 256, 9, seed=0)
    ids = prompt_file(tmp_path, '{"prompt_token_ids": [1, 2, 3]}', '{"prompt_token_ids": [1]}')
    File(str(ids), too_long="skip", output_len=1, num_requests=1).check_lengths(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[\n1,\n", r"sharegpt.json:3: not valid JSON"),
        ("[]", "a ShareGPT file is one JSON list of conversations, at least one"),
        ("[3]", 'conversation 1: must be a JSON object with "conversations"'),
        ('[{"conversations": 4}]', 'conversation 1: must be a JSON object with "conversations"'),
        (
            '[{"conversations": []}, {"conversations": [{"from": "gpt"}]}]',
            r"conversation 2: conversations\[0\] must be",
        ),
        ("[\n" + "[" * 100_000, "not valid JSON"),
    ],
)
def test_a_wrong_share_gpt_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sharegpt.json").write_text(text)
    with pytest.raises(BadInput, match=message) as error:
        File(str(tmp_path / "sharegpt.json")).check_lengths(100)
    assert str(tmp_path / "sharegpt.json") in str(error.value) and "\n" not in str(error.value)


def test_a_format_can_be_forced(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, '{"prompt": "a"}')
    with pytest.raises(BadInput, match="a ShareGPT file is one JSON list"):
        File(str(path), format="sharegpt").check_lengths(200)
    with pytest.raises(
        BadInput,
        match=r"workload\.format='xml' must be auto or jsonl or sharegpt or csv or parquet",
    ):
        File(str(path), format="xml")


@pytest.mark.fuzz("prompt files")
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}")
def test_any_bytes_are_a_request_or_a_line_of_advice(
    tmp_path_factory: pytest.TempPathFactory, line: bytes
) -> None:
    path = tmp_path_factory.mktemp("f") / "prompts"
    path.write_bytes(b'{"prompt": "a"}\n' + line.replace(b"\n", b" "))
    try:
        _, *parsed = read_prompt_file(path)
    except BadInput as error:
        assert str(error).startswith(f"{path}:2: ") and "\n" not in str(error)
    else:
        assert all((entry.text is None) != (entry.token_ids is None) for entry in parsed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.fuzz("prompt files")
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "prompt_token_ids", "messages", "max_tokens", "output_len"]),
        json_values,
    )
)
def test_any_object_is_a_request_or_a_line_of_advice(row: dict[str, Any]) -> None:
    try:
        parsed = parse_entry(json.loads(json.dumps(row)), "f:1")
    except BadInput as error:
        assert str(error).startswith("f:1: ")
    else:
        assert bool(parsed.text) != bool(parsed.token_ids)
        assert parsed.max_tokens is None or parsed.max_tokens >= 1


conversations = st.recursive(
    st.none() | st.text(max_size=5) | st.sampled_from(["human", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["conversations", "from", "value"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.fuzz("prompt files")
@given(
    conversations
    | st.fixed_dictionaries(
        {
            "conversations": st.lists(
                st.fixed_dictionaries({"from": conversations, "value": conversations})
            )
        }
    )
)
def test_any_conversation_is_a_request_nothing_or_a_line_of_advice(conversation: Any) -> None:
    try:
        parsed = parse_conversation(json.loads(json.dumps(conversation)), "f: conversation 1")
    except BadInput as error:
        assert str(error).startswith("f: conversation 1: ") and "\n" not in str(error)
    else:
        assert parsed is None or (parsed.text and parsed.answer)


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5))
def test_text_prompts_come_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = prompt_file(
        tmp_path_factory.mktemp("f"), *(json.dumps({"prompt": text}) for text in texts)
    )
    lines = list(read_prompt_file(path))
    assert lines == [
        PromptLine(f"{path}:{i}", text, None, None) for i, text in enumerate(texts, start=1)
    ]
