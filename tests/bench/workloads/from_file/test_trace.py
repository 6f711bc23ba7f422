"""Traces: the published formats, lazy prompts with really shared prefixes, and the replay of their
times."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minivllm.bench.driver import drive
from minivllm.bench.workloads.arrivals import Offline, Replay, check_times
from minivllm.bench.workloads.from_file.trace import Trace
from minivllm.bench.workloads.from_file.trace_file import read_trace
from minivllm.bench.workloads.lazy_prompt import LazyPrompt, joined
from minivllm.bench.workloads.synthetic import Smoke
from minivllm.bench.workloads.workload import Workload
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from tests.bench.scripted import ScriptedClock, ScriptedEngine, workload

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01+00:00,2399,6\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "50,GPT-4,17,0,17,API log\n"  # failed
    "118,GPT-4,417,276,693,Conversation log\n"
)
BURSTGPT_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "7.5,3,2.1,ChatGPT,12,5,17,Conversation log\n"
)
BLOCKS = [
    (0, 1000, 20, [0, 1]),
    (250, 1100, 7, [0, 1, 2]),
    (250, 512, 1, [0]),
    (900, 700, 3, [5, 6]),
]
MOONCAKE = "".join(
    json.dumps({"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": ids}) + "\n"
    for ms, n, m, ids in BLOCKS
)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode())  # as it is, CRLF included
    return path


def lengths(work: Workload) -> list[tuple[int, int]]:
    return [(len(r.prompt_token_ids), r.max_tokens) for r in work.requests]


def generate(path: Path, vocab_size: int = 1000, seed: int = 0, **knobs: Any) -> Workload:
    return Trace(str(path), **knobs).generate(None, vocab_size, 10_000, seed)


# ---- files


@pytest.mark.parametrize(
    ("text", "format", "rows"),
    [
        (AZURE, "azure", [(0, 374, 44), (4.314579, 396, 109), (4.541877, 879, 55)]),
        (AZURE_2024, "azure", [(0, 2162, 5), (0.99007, 2399, 6)]),
        (BURSTGPT, "burstgpt", [(0, 472, 18), (40, 1087, 230), (113, 417, 276)]),
        (BURSTGPT_2, "burstgpt", [(0, 12, 5)]),
        (MOONCAKE, "mooncake", [(0, 1000, 20), (0.25, 1100, 7), (0.25, 512, 1), (0.9, 700, 3)]),
        ("\ufeff" + BURSTGPT_2.replace("\n", "\r\n"), "burstgpt", [(0, 12, 5)]),
    ],
)
def test_the_published_formats(
    tmp_path: Path, text: str, format: str, rows: list[tuple[Any, ...]]
) -> None:
    path = write(tmp_path, text)
    read, failed = read_trace(path)
    assert (read, failed) == read_trace(path, format) and failed == text.count(",0,")
    assert [(r.input_tokens, r.output_tokens) for r in read] == [row[1:] for row in rows]
    assert [r.time_s for r in read] == pytest.approx([row[0] for row in rows], abs=1e-6)


def test_times_without_a_zone_are_read_alike_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the night in which clocks were put forward, too."""
    rows = "".join(f"2024-03-10 0{hour}:30:00.0,{10 + hour},1\n" for hour in (1, 2, 3))
    path = write(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    monkeypatch.setenv("TZ", "America/Los_Angeles")
    time.tzset()
    try:
        read, _ = read_trace(path)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [(r.time_s, r.input_tokens) for r in read] == [(0, 11), (3600, 12), (7200, 13)]


def test_requests_come_in_order_of_time(tmp_path: Path) -> None:
    text = "Timestamp,Request tokens,Response tokens\n9,1,1\n4,2,2\n9,3,3\n"
    read, _ = read_trace(write(tmp_path, text))
    assert [(r.line, r.time_s, r.input_tokens) for r in read] == [(3, 0, 2), (2, 5, 1), (4, 5, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace holds no requests"),
        (
            "a,b\n1,2\n",
            "trace:1: neither a header nor a JSON object with the columns .* as TIMESTAMP",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (AZURE.replace("396", "many"), "trace:3: ContextTokens='many' is not a number of tokens"),
        (AZURE.replace("396", "-1"), "trace:3: ContextTokens='-1' is not a number of tokens"),
        (AZURE.replace("396", "1.5"), "trace:3: ContextTokens='1.5' is not"),
        (
            AZURE.replace("2023-11-16 18:15:50", "yesterday"),
            "trace:3: TIMESTAMP='yesterday.9951690' is not a date, or a number",
        ),
        (AZURE[:-3], "trace:4: 2 of 3 columns; is the file cut off?"),
        (BURSTGPT.replace("45,", "nan,"), "trace:3: Timestamp='nan' is not a time"),
        (
            '{"timestamp": 1, "input_length": 5}',
            "trace:1: neither a header nor a JSON object with the columns of a known format",
        ),
        (MOONCAKE + "{", "trace:5: the line is not valid JSON"),
        (
            MOONCAKE + "[1]",
            "trace:5: a trace of format mooncake needs the columns .*; timestamp is missing",
        ),
        (
            MOONCAKE.replace("[0, 1]", "[0, -1]"),
            "trace:1: hash_ids must be a list of whole numbers",
        ),
        (MOONCAKE.replace("[0, 1]", "[0, true]"), "trace:1: hash_ids must be"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_trace(write(tmp_path, text))


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"there is no such file; docs/guides/traces\.md says where"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="binary:1: not UTF-8, so it cannot be read as text"):
        read_trace(tmp_path / "binary")
    with pytest.raises(BadInput, match=r"set workload\.path="):
        Trace()


@pytest.mark.parametrize("format", ["azure", "burstgpt", "mooncake"])
def test_another_format_than_the_file_has_is_one_line(tmp_path: Path, format: str) -> None:
    texts = {"azure": AZURE, "burstgpt": BURSTGPT, "mooncake": MOONCAKE}
    del texts[format]
    for text in texts.values():
        path = write(tmp_path, text)
        with pytest.raises(BadInput, match=r"trace:1: ") as error:
            read_trace(path, format)
        assert "\n" not in str(error.value)


@pytest.mark.fuzz("traces")
@given(st.sampled_from([AZURE, BURSTGPT, MOONCAKE]), st.integers(0, 400), st.text(max_size=8))
@example(MOONCAKE, 0, "[" * 5000)
@example(AZURE, 0, "\r")
@example(AZURE, 0, "a" * 200_000)
@example(AZURE, 60, "\r")
@example(BURSTGPT, 0, '"')
def test_any_damage_is_rows_or_one_line(
    tmp_path_factory: Any, text: str, at: int, damage: str
) -> None:
    path = tmp_path_factory.mktemp("damage") / "trace"
    path.write_text(text[:at] + damage + text[at:], encoding="utf-8", errors="replace")
    try:
        rows, failed = read_trace(path)
    except BadInput as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert failed >= 0 and all(
            row.time_s >= 0 and row.input_tokens > 0 and row.output_tokens > 0 for row in rows
        )


# ---- the workload


def test_a_trace_is_its_lengths_and_times(tmp_path: Path) -> None:
    work = generate(write(tmp_path, AZURE))
    assert lengths(work) == [(374, 44), (396, 109), (879, 55)]
    assert [r.due_s for r in work.requests] == pytest.approx([0, 4.314579, 4.541877], abs=1e-6)
    ids = [token for request in work.requests for token in request.prompt_token_ids]
    assert len(ids) == 374 + 396 + 879 and min(ids) >= 0 and max(ids) < 1000 and len(set(ids)) > 750
    assert (
        list(work.requests[0].prompt_token_ids)[:9] != list(work.requests[1].prompt_token_ids)[:9]
    )


def test_large_hash_ids_stay_distinct(tmp_path: Path) -> None:
    """Of 64 bits, and equal in their last 45, 44 and 4."""
    ids = [3, 3 + 2**44, 3 + 2**45, 3 + 2**63, 2**64 - 1, 2**44 + 2**63]
    row = {"timestamp": 0, "input_length": 512, "output_length": 4}
    lines = (json.dumps({**row, "hash_ids": [one]}) + "\n" for one in (*ids, ids[3]))
    path = write(tmp_path, "".join(lines))
    prompts = [tuple(request.prompt_token_ids) for request in generate(path).requests]
    assert len(set(prompts)) == len(ids) and prompts[-1] == prompts[3]


def test_equal_hash_ids_are_equal_tokens(tmp_path: Path) -> None:
    a, b, c, d = (tuple(r.prompt_token_ids) for r in generate(write(tmp_path, MOONCAKE)).requests)
    assert a[:512] == b[:512] == c and a == b[:1000] and d[:512] != a[:512]
    assert a[512:600] != a[:88]


@pytest.mark.parametrize("scale", [0.01, 0.1, 0.37, 1.0, 1.7])
def test_scaled_prompts_still_share(tmp_path: Path, scale: float) -> None:
    work = generate(write(tmp_path, MOONCAKE), length_scale=scale)
    assert lengths(work) == [(round(n * scale), max(1, round(m * scale))) for _, n, m, _ in BLOCKS]
    a, b, c, d = (tuple(r.prompt_token_ids) for r in work.requests)
    block = round(512 * scale)
    assert a[:block] == b[:block] == c and len(a) > block
    assert len(set(a)) > 0.5 * min(len(a), 1000) * 0.6  # no block repeats another
    assert d[:block] != a[:block]


def test_slices_and_limits(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE)
    assert [r.due_s for r in generate(path, start_s=0.25).requests] == [0, 0, pytest.approx(0.65)]
    assert lengths(generate(path, start_s=0.25, duration_s=0.65)) == [(1100, 7), (512, 1)]
    assert lengths(generate(path, num_requests=2)) == [(1000, 20), (1100, 7)]
    assert [r.request_id for r in generate(path, start_s=0.9).requests] == ["r0"]
    assert (
        generate(path, start_s=0.9).requests[0].prompt_token_ids
        == generate(path).requests[3].prompt_token_ids
    )
    with pytest.raises(BadInput, match=r"no request from workload\.start_s=2 on"):
        generate(path, start_s=2.0)


@pytest.mark.parametrize("text", [MOONCAKE, AZURE])
def test_copies_are_users_of_their_own_side_by_side(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    once, thrice = generate(path), generate(path, copies=3)
    assert sorted(lengths(thrice)) == sorted(lengths(once) * 3)
    times = [request.due_s or 0 for request in thrice.requests]
    assert times == sorted(times) and max(times) <= max(r.due_s or 0 for r in once.requests)
    assert len(set(times)) > len({r.due_s for r in once.requests})
    beginnings = Counter(tuple(r.prompt_token_ids[:300]) for r in thrice.requests)
    before = Counter(tuple(r.prompt_token_ids[:300]) for r in once.requests)
    assert sorted(beginnings.values()) == sorted([*before.values()] * 3)


def test_what_does_not_fit_is_refused_early(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE)
    with pytest.raises(
        BadInput, match=r"trace:4: the request has 879 prompt \+ 55 output.*length_scale"
    ):
        Trace(str(path)).check_lengths(933)
    Trace(str(path)).check_lengths(934)
    with pytest.raises(
        BadInput, match=r"trace:1: 1000 prompt tokens are 4 blocks .*has 2 hash ids"
    ):
        generate(write(tmp_path, MOONCAKE), block_tokens=256)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    work = generate(write(tmp_path, BURSTGPT), too_long="skip", num_requests=2, start_s=1.0)
    assert lengths(work) == [(1087, 230), (417, 276)]
    assert work.notes == (
        "workload=trace: 1 requests of the file were left out, they failed when the trace was "
        "taken",
    )
    skipping = Trace(str(tmp_path / "trace"), too_long="skip", num_requests=2)
    skipping.check_lengths(700)
    work = skipping.generate(None, 9, 700, 0)
    assert lengths(work) == [(472, 18), (417, 276)] and [r.due_s for r in work.requests] == [0, 113]
    assert (
        work.notes[1] == "workload=trace: 1 requests were left out, longer than the context of 700"
    )
    with pytest.raises(BadInput, match=r"from workload\.start_s=0 on that the context of 20 holds"):
        skipping.check_lengths(20)
    for knob, value in (("format", "csv"), ("too_long", "cut")):
        with pytest.raises(BadInput, match=rf"workload\.{knob}='{value}' must be \w+ or \w+"):
            Trace("somewhere", **{knob: value})


def test_a_workload_of_lazy_prompts_is_content_addressed(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE)
    work = generate(path)
    stored = work.save(tmp_path / "workloads")
    assert stored.stat().st_size < 10_000  # runs, not tokens
    runs = pq.read_table(stored).column("prompt_runs").to_pylist()
    assert runs == [
        [[run.start, run.stop] for run in r.prompt_token_ids.runs] for r in work.requests
    ]
    assert generate(path).hash == work.hash
    others = [
        generate(path, seed=1),
        generate(path, vocab_size=9),
        generate(path, length_scale=0.5),
    ]
    others += [
        generate(path, num_requests=3),
        generate(path, ignore_eos=False),
        generate(path, start_s=0.1),
    ]
    assert len({work.hash, *(other.hash for other in others)}) == 7


# ---- lazy prompts


@given(
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_a_lazy_prompt_is_a_sequence(parts: list[tuple[int, int]], seed: int) -> None:
    runs = joined([range(start, start + length) for start, length in parts])
    prompt = LazyPrompt(runs, 50, seed)
    ids = list(prompt)
    assert len(prompt) == len(ids) == sum(length for _, length in parts)
    assert [prompt[i] for i in range(len(ids))] == ids and prompt[-1] == ids[-1]
    assert prompt[1:3] == tuple(ids[1:3])
    assert prompt == LazyPrompt(runs, 50, seed) and hash(prompt) == hash(LazyPrompt(runs, 50, seed))
    assert all(type(token) is int and 0 <= token < 50 for token in ids)


def test_runs_that_follow_on_are_one() -> None:
    assert joined([range(0, 4), range(4, 9), range(2, 2), range(20, 21)]) == (
        range(0, 9),
        range(20, 21),
    )


# ---- replay


def test_replay_keeps_the_traces_times(tmp_path: Path) -> None:
    work = generate(write(tmp_path, MOONCAKE))
    clock = ScriptedClock()
    engine = ScriptedEngine(clock, step_s=0.001)
    engine.info.max_model_len = 10_000
    traces = drive(engine, work, Replay(rate_scale=2.0), SamplingParams(), clock)
    assert [trace.scheduled_s for trace in traces] == pytest.approx([0, 0.125, 0.125, 0.45])
    assert all(trace.completed for trace in traces)


def test_replay_needs_times() -> None:
    message = "arrival=replay needs a workload whose requests have times"
    with pytest.raises(BadInput, match=message):
        Replay().due(workload((3, 2)).requests, 0)
    with pytest.raises(BadInput, match=message):
        check_times(Replay(), Smoke())
    check_times(Offline(), Smoke())
    check_times(Replay(), Trace("somewhere"))


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), "2", True, None])
def test_a_wrong_scale_is_named(scale: Any) -> None:
    with pytest.raises(BadInput, match=r"arrival\.rate_scale="):
        Replay(scale)
    with pytest.raises(BadInput, match=r"workload\.length_scale="):
        Trace("somewhere", length_scale=scale)
