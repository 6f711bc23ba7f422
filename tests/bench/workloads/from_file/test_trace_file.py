"""Reading traces: units that are told apart, no further than needed, and no row that is neither
taken nor counted."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.workloads.from_file import trace
from minivllm.bench.workloads.from_file.trace import Trace
from minivllm.bench.workloads.from_file.trace_file import read_trace
from minivllm.bench.workloads.from_file.trace_format import FORMATS
from minivllm.bench.workloads.workload import Workload
from minivllm.errors import BadInput

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "trace"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def bailian(
    chat: int, time_s: float, length: int, parent: int = -1, **changes: Any
) -> dict[str, Any]:
    ids = list(range(chat, chat + -(-length // 16)))
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": time_s,
        "input_length": length,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
        **changes,
    }


def generate(path: Path, **knobs: Any) -> Workload:
    return Trace(str(path), **knobs).generate(None, 1000, 10_000, 0)


# ---- Bailian


def test_bailians_times_are_seconds_and_its_blocks_have_16_tokens(tmp_path: Path) -> None:
    first, second = bailian(1, 0.0, 40), bailian(2, 30.5, 60, parent=1, hash_ids=[1, 2, 3, 4])
    path = write(tmp_path, first, second, bailian(9, 61, 33, type="image"))
    work = generate(path)
    assert work == generate(path, format="bailian")
    assert [request.due_s for request in work.requests] == [0, 30.5, 61]
    prompts = [list(request.prompt_token_ids) for request in work.requests]
    assert [len(prompt) for prompt in prompts] == [40, 60, 33]
    assert prompts[1][:40] == prompts[0] and prompts[2][:16] != prompts[0][:16]
    assert work.notes == (
        "workload=trace: 1 requests are later turns of conversations: they come at the trace's "
        "times, not after an answer",
        "workload=trace: 1 requests are of type 'image': random text as long stands for them",
    )


def test_the_last_block_may_have_no_hash(tmp_path: Path) -> None:
    path = write(tmp_path, bailian(1, 0, 40, hash_ids=[1, 2]), bailian(2, 1, 40, hash_ids=[1, 2]))
    a, b = (list(request.prompt_token_ids) for request in generate(path).requests)
    assert len(a) == len(b) == 40 and a[:32] == b[:32] and a[32:] != b[32:]
    assert [len(r.prompt_token_ids) for r in generate(path, length_scale=0.3).requests] == [12, 12]


def test_hashes_of_64_bits_are_blocks_too(tmp_path: Path) -> None:
    ids = [2**64 - 1, 2**63 + 5]
    path = write(tmp_path, bailian(1, 0, 32, hash_ids=ids), bailian(2, 0, 32, hash_ids=ids[::-1]))
    a, b = (list(request.prompt_token_ids) for request in generate(path, length_scale=30).requests)
    assert len(a) == 960 and a[:480] == b[480:] and a[480:] == b[:480]


@pytest.mark.parametrize(
    ("row", "format", "message"),
    [
        (
            {"timestamp": 1, "input_length": 5, "output_length": 5},
            "auto",
            "the unit of times that are no dates is not known",
        ),
        (
            bailian(1, 0, 40),
            "mooncake",
            "chat_id and parent_chat_id are columns of Bailian's traces",
        ),
        (
            bailian(1, 0, 40, hash_ids=[1]),
            "auto",
            "40 prompt tokens are 3 blocks .*block_tokens=16, and the line has 1",
        ),
        (
            {"timestamp": 1, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]},
            "auto",
            r"=512, and the line has 3 hash ids; blocks of 16 are those of "
            r"workload\.format=bailian",
        ),
        (
            {"timestamp": 0.5, "input_length": 40, "output_length": 5, "hash_ids": [1]},
            "auto",
            "timestamp=0.5 is a fraction, where Mooncake's times are whole milliseconds",
        ),
        (
            bailian(1, 0, 40, hash_ids=[2**64] * 3),
            "auto",
            "hash_ids must be a list of whole numbers",
        ),
        (bailian(1, 0, 40, timestamp="noon"), "auto", "timestamp='noon' is not a time in s"),
    ],
)
def test_a_unit_that_cannot_be_known_is_not_guessed(
    tmp_path: Path, row: Any, format: str, message: str
) -> None:
    path = write(tmp_path, row)
    with pytest.raises(BadInput, match=f"trace:1: .*{message}"):
        generate(path, format=format)


@pytest.mark.parametrize(("format", "time_s"), [("mooncake", 0.0025), ("bailian", 2.5)])
def test_a_format_that_is_named_says_the_unit(tmp_path: Path, format: str, time_s: float) -> None:
    rows = [{"timestamp": t, "input_length": 5, "output_length": 5} for t in (1, 3.5)]
    assert [row.time_s for row in read_trace(write(tmp_path, *rows), format)[0]] == [0, time_s]


# ---- tables


def test_blank_lines_are_nothing_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    rows = ("", HEADER, "2023-11-16 18:17:03.97,374,44", " ", "", "2023-11-16 18:17:04.03,396,109")
    read, failed = read_trace(write(tmp_path, *rows))
    assert [(row.line, row.input_tokens) for row in read] == [(3, 374), (6, 396)] and not failed
    with pytest.raises(BadInput, match="trace:8: ContextTokens='x'"):
        read_trace(write(tmp_path, *rows, "\t", "2023-11-16 18:17:05,x,1"))


def test_a_column_that_is_there_twice_is_not_chosen_from(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="trace:1: the header has ContextTokens twice"):
        read_trace(write(tmp_path, f"{HEADER},ContextTokens", "2023-11-16 18:17:03.97,374,44,5"))


@pytest.mark.parametrize(
    "rows",
    [
        (HEADER, "2023-11-16 18:17:03.97,374,44,"),
        (HEADER, "2023-11-16 18:17:03.97,374,44,5,6"),
        (f"{HEADER},Region", "2023-11-16 18:17:03.97,374,44"),
        (f"{HEADER},Region,Region", "2023-11-16 18:17:03.97,374,44,a,b"),
        (f"{HEADER},Region", '2023-11-16 18:17:03.97,374,44,"a"b'),
        ("TIMESTAMP, ContextTokens, GeneratedTokens", '2023-11-16 18:17:03.97, "374", 44'),
        ("time, input_tokens,output_tokens", '2023-11-16 18:17:03.97, "374",44,'),
    ],
)
def test_cells_that_a_trace_has_no_use_for_need_not_fit(
    tmp_path: Path, rows: tuple[str, ...]
) -> None:
    (row,), failed = read_trace(write(tmp_path, *rows))
    assert (row.time_s, row.input_tokens, row.output_tokens, row.kind) == (0, 374, 44, "text")
    assert not failed


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((HEADER, "2024-05-01,374,"), "trace:2: GeneratedTokens='' is not a number of tokens"),
        ((HEADER, "2024-05-01,374"), "trace:2: 2 of 3 columns; is the file cut off?"),
        ((HEADER, ","), "trace:2: 2 of 3 columns; is the file cut off?"),
        (("ts,isl,osl,ts", "2024-05-01,3,4,5"), "trace:1: the header has ts twice; leave one"),
    ],
)
def test_a_cell_that_a_trace_needs_must_be_there(
    tmp_path: Path, rows: tuple[str, ...], message: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        read_trace(write(tmp_path, *rows))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"isl": 3, "osl": 4}, "trace:2: a value is missing; is the file cut off?"),
        ({}, "trace:2: a value is missing; is the file cut off?"),
    ],
)
def test_names_of_a_file_are_shown_without_control_characters(
    tmp_path: Path, second: dict[str, Any], message: str
) -> None:
    title = "\x1b]0;title\x07ts"
    path = write(tmp_path, {title: "2024-05-01", "isl": 3, "osl": 4}, second)
    with pytest.raises(BadInput) as caught:
        read_trace(path, columns={"timestamp": title})
    assert str(caught.value) == f"{path.parent}/{message}"
    path = write(tmp_path, f"{title},isl,osl", "x,3,4")
    with pytest.raises(BadInput) as caught:
        read_trace(path, columns={"timestamp": title})
    assert str(caught.value).isprintable() and "ts='x' is not a date" in str(caught.value)


def test_a_format_that_nobody_set_is_no_knob(tmp_path: Path) -> None:
    path = write(tmp_path, bailian(1, 0.0, 40), {"chat_id": 2, "timestamp": 3})
    with pytest.raises(BadInput) as caught:
        read_trace(path)
    assert str(caught.value) == (
        f"{path}:2: a trace of format bailian needs the columns timestamp, input_length, "
        "output_length; input_length is missing"
    )


def test_a_damaged_packed_trace_says_where_traces_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n".encode())[:-6])
    with pytest.raises(BadInput, match=r"cannot be read: .*; docs/guides/traces\.md says where"):
        read_trace(path)


def test_images_of_a_table_are_counted(tmp_path: Path) -> None:
    rows = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
        "2024-05-01,2,9,1",
        "2024-05-02,0,9,1",
    )
    (note,) = generate(write(tmp_path, *rows)).notes
    assert (
        note
        == "workload=trace: 1 requests are of type 'image': random text as long stands for them"
    )


@pytest.mark.parametrize("place", ["pipe", "/dev/zero", "."])
def test_only_regular_files_are_traces(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match=r"not a regular file; docs/guides/traces\.md says where"):
        Trace(str(tmp_path / place)).check_lengths(100)


# ---- no further than needed


def seconds(*times: float) -> list[str]:
    return [
        "Timestamp,Request tokens,Response tokens",
        *(f"{time},{i + 1},1" for i, time in enumerate(times)),
    ]


def test_a_trace_is_read_no_further_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "LOOK_AHEAD", 3)
    path = write(tmp_path, *seconds(0, 2, 1, 3, 5, 4, 6, 7), "broken")
    assert [r.due_s for r in generate(path, num_requests=4).requests] == [0, 1, 2, 3]
    assert [r.due_s for r in generate(path, duration_s=3.0).requests] == [0, 1, 2]
    for knobs in ({}, {"num_requests": 9}, {"duration_s": 99.0}):
        with pytest.raises(BadInput, match="trace:10: 1 of 3 columns"):
            generate(path, **knobs)


def test_disorder_beyond_the_look_ahead_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "LOOK_AHEAD", 3)
    path = write(tmp_path, *seconds(5, 6, 7, 8, 9, 1, 10))
    with pytest.raises(
        BadInput, match="trace:7: earlier than requests more than 3 lines above it; sort"
    ):
        generate(path, num_requests=7)
    # a whole trace is sorted
    assert [r.due_s for r in generate(path).requests] == [0, 4, 5, 6, 7, 8, 9]


def test_only_what_is_taken_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, *seconds(*range(50)))
    rows, _ = read_trace(path, "auto", lambda row: row.time_s % 10 == 0, look_ahead=5)
    assert [row.time_s for row in rows] == [0, 10, 20, 30, 40]
    monkeypatch.setattr("minivllm.bench.workloads.lengths.MOST_REQUESTS", 20)
    with pytest.raises(
        BadInput, match=r": 21 requests .* at most 20 .*; take fewer with workload\.num_requests"
    ):
        generate(path)
    assert len(generate(path, num_requests=20)) == 20


# ---- nothing is lost

counts = st.sampled_from([0, 1, 5, 30, 3000])
times = st.integers(0, 60)
tables = st.lists(st.tuples(times, counts, counts), max_size=12)
objects = st.fixed_dictionaries(
    {
        "timestamp": times | st.floats(0, 9),
        "input_length": counts,
        "output_length": counts | st.just(7.0),
    },
    optional={
        "chat_id": st.integers(),
        "parent_chat_id": st.integers(-1, 1),
        "type": st.sampled_from(["text", "file", None, 3]),
        "hash_ids": st.none() | st.lists(st.integers(-1, 2**64), max_size=3),
    },
)


@pytest.mark.fuzz("traces")
@given(
    tables.map(
        lambda rows: [HEADER, *(f"2024-05-01 00:00:{t:02}.5,{n},{m}" for t, n, m in rows if t < 60)]
    )
    | tables.map(lambda rows: seconds()[:1] + [f"{t},{n},{m}" for t, n, m in rows])
    | st.lists(objects, max_size=6).map(lambda rows: list(map(json.dumps, rows))),
    st.sampled_from(["auto", *FORMATS]),
    st.none() | st.integers(1, 5),
)
def test_every_row_is_a_request_or_counted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], format: str, asked: int | None
) -> None:
    path = write(tmp_path_factory.mktemp("t"), *rows)
    told = len(rows) - (not rows or not rows[0].startswith("{"))
    knobs = {"format": format, "too_long": "skip", "length_scale": 1.0, "num_requests": asked}
    try:
        taken, failed = read_trace(path, format)
        work = Trace(str(path), **knobs).generate(None, 50, 100, 0)
    except BadInput as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    assert len(taken) + failed == told
    left_out = sum(int(note.split()[1]) for note in work.notes if "left out" in note)
    assert len(work) == asked or len(work) + left_out == told
    assert all(a.due_s <= b.due_s for a, b in zip(work.requests, work.requests[1:], strict=False))  # type: ignore[operator]


@pytest.mark.fuzz("traces")
@given(
    st.binary(max_size=80)
    | st.text(alphabet='{}[]",:\r\n 019.TIMESAP', max_size=60).map(str.encode)
)
def test_any_bytes_are_rows_or_a_line_of_advice(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("t") / "trace"
    for start in (
        b"",
        HEADER.encode() + b"\n",
        b'{"timestamp": 1, "input_length": 1, "output_length": 1}\n',
    ):
        path.write_bytes(start + content)
        for format in ("auto", "bailian"):
            try:
                read_trace(path, format)
            except BadInput as error:
                assert str(path) in str(error) and "\n" not in str(error)
