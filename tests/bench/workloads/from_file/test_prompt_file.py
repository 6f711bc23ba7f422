"""Files of prompts: whatever is legal becomes a request, and nothing is lost uncounted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.workloads.from_file.file import File
from minivllm.bench.workloads.from_file.prompt_file import (
    parse_conversation,
    parse_entry,
    read_prompt_file,
)
from minivllm.bench.workloads.from_file.tables import Tally
from minivllm.bench.workloads.workload import Workload
from minivllm.errors import BadInput


def encode(text: str) -> list[int]:
    return [byte for byte in text.encode()]


def generate(path: Path, **knobs: Any) -> Workload:
    return File(str(path), **knobs).generate(encode, 256, 400, seed=0)


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(*pairs: tuple[Any, Any], names: tuple[str, str] = ("from", "value")) -> dict[str, Any]:
    return {"conversations": [dict(zip(names, pair, strict=True)) for pair in pairs]}


# ---- conversations


@pytest.mark.parametrize(
    ("conversation", "question", "answer"),
    [
        (turns(("Human", "why?"), ("GPT", "so")), "why?", "so"),
        (turns((" USER", "why?"), ("Assistant", "so")), "why?", "so"),
        (turns(("user", "why?"), ("assistant", "so"), names=("role", "content")), "why?", "so"),
        ({"conversation": turns(("user", "why?"), ("bot", "so"))["conversations"]}, "why?", "so"),
        (turns(("human", ""), ("human", "why?"), ("gpt", "so")), "why?", "so"),
        (turns(("human", None), ("gpt", ""), ("human", "why?"), ("gpt", "so")), "why?", "so"),
        (turns(("human", "well"), ("human", "why?"), ("gpt", "so")), "well\nwhy?", "so"),
        (
            turns(("system", "be kind"), ("human", "why?"), ("system", " "), ("gpt", "so")),
            "why?",
            "so",
        ),
    ],
)
def test_a_conversation_is_its_first_question_and_the_answer(
    conversation: Any, question: str, answer: str
) -> None:
    line = parse_conversation(conversation, "f")
    assert line is not None and (line.text, line.answer) == (question, answer)
    assert parse_entry(conversation, "f") == line


def test_what_conversations_do_not_give_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    conversations = [
        turns(
            ("Human", "How?"),
            ("GPT", "Thus."),
            ("human", "Why?"),
            ("gpt", "So."),
            ("human", "Oh?"),
            ("human", " "),
        ),
        turns(("human", ""), ("human", "And?"), ("human", "Well?"), ("gpt", "So.")),
        turns(("human", "hello?")),
        turns(("human", "hello?"), ("gpt", " ")),
        turns(("human", "hello?"), ("tool", "x"), ("gpt", "y")),
        turns(("alice\x1b[31m", "hello?"), ("gpt", "y")),
        turns(),
    ]
    path.write_text(json.dumps(conversations))
    work = generate(path, num_requests=5)
    assert [(r.text, r.max_tokens) for r in work.requests] == [("How?", 5), ("And?\nWell?", 3)]
    assert work.notes == (
        "workload=file: 3 conversations were left out, no answer follows their first question",
        "workload=file: 2 conversations were left out, no user asks anything in them",
        "workload=file: 2 turns of conversations were blank and passed over",
        "workload=file: 1 questions are of several turns of the user in a row, joined by line "
        "breaks",
        "workload=file: 2 questions come after the first answer of their conversation and were "
        "not sent",
        "workload=file: 1 turns are of 'alice', who is known neither as user nor as assistant",
        "workload=file: workload.num_requests=5, and the file gives 2",
    )
    path.write_text(json.dumps(conversations[2:]))
    with pytest.raises(
        BadInput, match="no request that can be used: 3 conversations were left out, no answer"
    ):
        generate(path)


def test_a_list_may_hold_what_lines_hold(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(
        json.dumps([{"prompt": "a", "max_tokens": 3}, turns(("user", "b"), ("gpt", "cd"))])
    )
    assert [(r.text, r.max_tokens) for r in generate(path).requests] == [("a", 3), ("b", 2)]
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": 3}]))
    with pytest.raises(
        BadInput, match=r"prompts\.json: entry 2: prompt must be a non-empty string"
    ):
        generate(path)


# ---- the output's length


@pytest.mark.parametrize(
    "name",
    [
        *(
            "max_tokens",
            "output_tokens",
            "max_completion_tokens",
            "output_tokens_count",
            "max_new_tokens",
        ),
        *(
            "output_length",
            "n_predict",
            "num_predict",
            "maxTokens",
            "max-output-tokens",
            "output_len",
        ),
        "MAX_TOKENS",
    ],
)
def test_the_output_length_is_known_under_its_usual_names(name: str) -> None:
    row = {"prompt": "a", "stop": None, name: 16.0}
    line = parse_entry(row, "f")
    assert line is not None and line.max_tokens == 16 and type(line.max_tokens) is int
    with pytest.raises(BadInput, match=f"f: {name}=16.5 must be a whole number of at least 1"):
        parse_entry({**row, name: 16.5}, "f")
    if name != "max_tokens":
        with pytest.raises(BadInput, match=f"f: {name} and max_tokens mean the same; give one"):
            parse_entry({**row, "max_tokens": 5}, "f")
        assert parse_entry({**row, "max_tokens": None}, "f") == line


def test_a_number_that_may_be_meant_is_named(tmp_path: Path) -> None:
    other = {
        "temperature": 0.5,
        "seed": 3,
        "prompt_tokens": 9,
        "input_length": 9,
        "total_tokens": 12,
        "id": 1,
    }
    path = lines(
        tmp_path,
        {"prompt": "a", "reply_len": 9, **other},
        {"prompt": "b", "reply_len": 8, "max_tokens": 5},
        {"prompt": "c", "sampling_params": {"max_tokens": 7, "temperature": 1}},
    )
    work = generate(path)
    assert [r.max_tokens for r in work.requests] == [128, 5, 128]
    assert [note.partition(", which")[0] for note in work.notes] == [
        "workload=file: 1 lines have reply_len",
        "workload=file: 1 lines have sampling_params.max_tokens",
    ]


# ---- forms of a line


def test_legal_messages_are_requests(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
    path = lines(
        tmp_path,
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "found"},
                {"role": "user"},
            ],
            "max_completion_tokens": 8,
        },
        {
            "messages": [
                {"role": "user", "content": ""},
                {"role": "user", "content": "two in a row"},
            ]
        },
        {"prompt": "def f():", "messages": None, "max_tokens": 16.0},
        {"prompt": [1, 2, 3], "prompt_token_ids": None},
        {"prompt": ["one"]},
        {"prompt": [{"role": "user", "content": "hi"}]},
        {
            "custom_id": "1",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        },
    )
    texts = [line.text for line in read_prompt_file(path)]
    assert texts == [
        'developer: Be brief.\nuser: go\nassistant: {"name": "find", "arguments": {"q": "x"}}\n'
        "tool: found\nuser: \nassistant:",
        "user: \nuser: two in a row\nassistant:",
        "def f():",
        None,
        "one",
        "user: hi\nassistant:",
        "user: hi\nassistant:",
    ]
    work = generate(path)
    assert [r.max_tokens for r in work.requests] == [8, 128, 16, 128, 128, 128, 3]
    assert work.notes == (
        "workload=file: 4 requests are messages, written as lines of `role: content`, since the "
        "model has no chat template",
    )


def test_messages_are_written_by_the_chat_template_where_there_is_one(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "system", "content": "no"}, {"role": "user", "content": "hi"}]},
        {"prompt": "plain"},
    )

    def render(messages: Any) -> tuple[str, tuple[int, ...]]:
        if messages[0]["role"] == "system":
            raise BadInput("system role is not supported")
        return f"<u>{messages[0]['content']}<a>", (7, 8)

    work = File(str(path)).generate(encode, 256, 400, 0, None, render)
    assert [r.text for r in work.requests] == [
        "<u>hi<a>",
        "system: no\nuser: hi\nassistant:",
        "plain",
    ]
    assert work.requests[0].prompt_token_ids == (7, 8)
    assert (
        len(work.notes) == 1
        and "1 requests are messages that the model's chat template rejects" in work.notes[0]
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ["a", "b"]}, "prompt holds 2 prompts; give each a line of its own"),
        ({"prompt": []}, "prompt must be a non-empty string"),
        ({"prompt": [1, "a"]}, "prompt must be a non-empty list of whole numbers"),
        (
            {"messages": [{"role": "user", "content": ""}]},
            r"messages\[0\]\.content must be a non-empty string",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "must be a string, a list of parts or null",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": 3}]},
            "tool_calls must be a list of objects",
        ),
        ({"messages": None, "prompt": None}, "it has none of them"),
    ],
)
def test_what_is_not_legal_is_named(row: Any, message: str) -> None:
    with pytest.raises(BadInput, match=f"^f: .*{message}"):
        parse_entry(row, "f")


def test_a_long_output_is_told_before_the_prompt_is_counted(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a" * 99, "max_tokens": 4000})
    with pytest.raises(
        BadInput, match="has 4000 output tokens beside its prompt, and the context holds 2048"
    ):
        File(str(path)).check_lengths(2048)
    with pytest.raises(BadInput, match=r"99 prompt \+ 4000 output = 4099 tokens"):
        generate(path)


def test_a_file_that_stays_as_it_is_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = lines(tmp_path, {"prompt": "a"}), 0

    def counted(*arguments: Any) -> Any:
        nonlocal read
        read += 1
        return read_prompt_file(*arguments)

    monkeypatch.setattr("minivllm.bench.workloads.from_file.file.read_prompt_file", counted)
    for _ in range(3):
        File(str(path)).check_lengths(200)
    assert read == 1
    File(str(path), output_len=5).check_lengths(200)
    path.write_text('{"prompt": "longer"}\n')
    File(str(path)).check_lengths(200)
    assert read == 3


@pytest.mark.parametrize("place", ["pipe", "/dev/zero"])
def test_what_never_ends_is_no_file_of_prompts(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is a pipe or a device, not a regular file"):
        File(str(tmp_path / place)).check_lengths(100)


# ---- nothing is lost

words = st.sampled_from(["hi", "", " ", "why so?"]) | st.none()
speakers = st.sampled_from(["human", "GPT", "user", "assistant", "system", "tool", "alice"])
conversations = st.builds(
    lambda pairs, names: turns(*pairs, names=names),
    st.lists(st.tuples(speakers, words), max_size=4),
    st.sampled_from([("from", "value"), ("role", "content")]),
)
messages = st.fixed_dictionaries(
    {
        "role": speakers,
        "content": words
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words})),
    }
)
lengths = st.sampled_from([None, 1, 5.0, 300, 0, "5", 2.5])
rows = st.fixed_dictionaries(
    {},
    optional={
        "prompt": words | st.lists(st.integers(0, 300), max_size=3),
        "messages": st.none() | st.lists(messages, max_size=3),
        "prompt_token_ids": st.none() | st.lists(st.integers(0, 300), min_size=1, max_size=3),
        "max_tokens": lengths,
        "max_new_tokens": lengths,
        "reply_len": lengths,
    },
)


@pytest.mark.fuzz("prompt files")
@given(st.lists(conversations | rows, min_size=1, max_size=6), st.booleans())
def test_every_entry_is_a_request_or_counted(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Any], listed: bool
) -> None:
    path = tmp_path_factory.mktemp("f") / "prompts"
    path.write_text(json.dumps(entries) if listed else "\n\n".join(map(json.dumps, entries)))
    tally = Tally()
    try:
        found = list(read_prompt_file(path, "auto", tally))
        work = generate(path, too_long="skip")
    except BadInput as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    assert tally.read == len(entries) == len(found) + sum(tally.left_out.values())
    left_out = sum(int(note.split()[1]) for note in work.notes if "were left out" in note)
    assert len(work) + left_out == len(entries)


@pytest.mark.fuzz("prompt files")
@given(
    st.binary(max_size=60) | st.text(alphabet='[]{}",: \n1a', max_size=40).map(str.encode),
    st.sampled_from([b"", b"["]),
)
def test_any_bytes_are_requests_or_a_line_of_advice(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes
) -> None:
    path = tmp_path_factory.mktemp("f") / "prompts"
    path.write_bytes(start + content)
    try:
        list(read_prompt_file(path))
    except BadInput as error:
        assert str(path) in str(error) and "\n" not in str(error)
