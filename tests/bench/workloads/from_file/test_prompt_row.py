"""Rows of prompt files: usual names, mapped columns, lengths alone, sampling, images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.driver import request_params
from minivllm.bench.workloads.from_file.file import File
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.supported_knobs import require_line_sampling
from minivllm.errors import BadInput

PIXEL = "data:image/png;base64,iVBORw0KGgo="

WORDS = [{"role": "user", "content": "hi"}]


def generate(folder: Path, *rows: Any, takes_chat: bool = False, **knobs: Any) -> Workload:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = File(str(path), **knobs)
    made.check_lengths(400)
    return made.generate(lambda text: list(text.encode()), 256, 400, seed=0, takes_chat=takes_chat)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "why?", "answer": "so", "id": 3}, b"why?"),
        ({"Instruction": "do", "output": "done"}, b"do"),
        ({"text": "words"}, b"words"),
        ({"input_ids": [1, 2]}, b"\x01\x02"),
        ({"token_ids": [1, 2], "answer": "text"}, b"\x01\x02"),
        ({"prompt": "wins", "question": "loses"}, b"wins"),
    ],
)
def test_a_prompt_is_known_under_its_usual_names(
    tmp_path: Path, row: dict[str, Any], prompt: bytes
) -> None:
    (request,) = generate(tmp_path, row).requests
    assert bytes(request.prompt_token_ids) == prompt


def test_two_that_may_be_the_prompt_are_not_guessed_between(tmp_path: Path) -> None:
    row = {"instruction": "do", "input": "this", "output": "done"}
    with pytest.raises(
        BadInput,
        match=r":1: instruction and input may be the prompt; .*columns={prompt: instruction}",
    ):
        generate(tmp_path, row)
    work = generate(tmp_path, row, columns={"prompt": "input"})
    assert work.requests[0].text == "this"


def test_columns_win_over_usual_names(tmp_path: Path) -> None:
    row = {"prompt": "a", "q": "bc", "max_tokens": 5, "n_out": 9, "ctx": 3, "input_len": 8}
    (mapped,) = generate(tmp_path, row, columns={"prompt": "q", "output_len": "n_out"}).requests
    assert (mapped.text, mapped.max_tokens) == ("bc", 9)
    (own,) = generate(tmp_path, row, columns={"output_len": "n_out"}).requests
    assert (own.text, own.max_tokens) == ("a", 9)
    drawn = generate(tmp_path, {"ctx": 30, "n_out": 2}, columns={"input_len": "ctx"})
    assert len(drawn.requests[0].prompt_token_ids) == 30


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "none"}, ":1: there is no none, which workload.columns.prompt names; it has a"),
        ({"reply": "a"}, "must give names of columns to some of prompt, prompt_token_ids"),
        ({"prompt": 3}, "must give names of columns"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        generate(tmp_path, {"a": "b"}, columns=columns)


@pytest.mark.parametrize("name", ["input_len", "prompt_tokens_count", "ContextTokens", "isl"])
def test_a_row_with_a_length_alone_gets_a_drawn_prompt(tmp_path: Path, name: str) -> None:
    rows = [{name: 20, "output_tokens_count": 4}, {name: 30, "osl": 5}]
    work, same = generate(tmp_path, *rows), generate(tmp_path, *rows)
    assert [(len(r.prompt_token_ids), r.max_tokens) for r in work.requests] == [(20, 4), (30, 5)]
    assert work.hash == same.hash
    assert work.notes == (
        "workload=file: 2 requests have a length and no prompt: theirs was drawn",
    )
    with pytest.raises(BadInput, match=r"500 prompt \+ 1 output"):
        generate(tmp_path, {name: 500, "osl": 1})
    assert len(generate(tmp_path, {name: 500, "osl": 1}, *rows, too_long="skip")) == 2


def test_a_line_samples_for_itself(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "temperature": 0.7, "top_p": 0.9, "seed": 11, "stop": "x"},
        {"prompt": "a", "sampling_params": {"temperature": 1, "ignore_eos": True}},
        {"prompt": "a"},
    ]
    work = generate(tmp_path, *rows)
    first, second, third = request_params(SamplingParams(top_p=0.5), work.requests, seed=1)
    assert (first.temperature, first.top_p, first.seed, first.stop) == (0.7, 0.9, 11, ("x",))
    assert (second.temperature, second.top_p, second.ignore_eos) == (1, 0.5, True)
    assert (third.temperature, third.top_p, third.ignore_eos) == (0, 0.5, False)
    plain = generate(tmp_path, *rows, line_sampling=False)
    assert all(request.sampling is None for request in plain.requests)
    assert plain.hash == generate(tmp_path, *[{"prompt": "a"}] * 3).hash != work.hash
    stored = work.save(tmp_path / "stored")
    assert work.save(tmp_path / "stored") == stored and stored.is_file()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"temperature": -1}, ":1: temperature=-1"),
        ({"top_p": "high"}, ":1: "),
        ({"n": 2}, r":1: n=2: a measurement takes one completion"),
        ({"seed": 1, "sampling_params": {"seed": 2}}, ":1: seed stands beside sampling_params"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
    ],
)
def test_wrong_sampling_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        generate(tmp_path, {"prompt": "a", **row})


def test_sampling_that_an_engine_does_not_support_is_an_error(tmp_path: Path) -> None:
    work = generate(tmp_path, {"prompt": "a", "top_k": 5})
    require_line_sampling(compose([]), work)
    with pytest.raises(BadInput, match=r"request r0: its line sets top_k, .*engine=openai"):
        require_line_sampling(compose(["engine=openai", "engine.url=http://127.0.0.1:1"]), work)


def test_a_short_file_is_oversampled_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    assert len(generate(tmp_path, *rows, num_requests=5)) == 2
    work = generate(tmp_path, *rows, num_requests=5, oversample=True)
    assert [(r.request_id, r.text) for r in work.requests] == [
        ("r0", "a"),
        ("r1", "b"),
        ("r2", "a"),
        ("r3", "b"),
        ("r4", "a"),
    ]
    assert work.notes == (
        "workload=file: oversampled: its 2 requests were repeated to make 5, so that each prompt "
        "came 2.5 times on average; a prefix cache finds the repeats",
    )
    assert generate(tmp_path, *rows, num_requests=2, oversample=True).notes == ()
    with pytest.raises(BadInput, match=r"needs workload\.num_requests"):
        generate(tmp_path, *rows, oversample=True)


def test_images_and_tools_go_to_engines_that_take_messages(tmp_path: Path) -> None:
    content = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {"messages": [{"role": "user", "content": content}], "tools": tools}
    work = generate(tmp_path, row, takes_chat=True)
    assert work.requests[0].chat == row
    assert not any("tools" in note for note in work.notes)  # they are sent
    assert any("tools" in note for note in generate(tmp_path, {**row, "messages": WORDS}).notes)
    assert work.requests[0].text == "user: what is this?\nassistant:"
    with pytest.raises(BadInput, match=r":1: its messages have images, which only engine=openai"):
        generate(tmp_path, row)
    content[1]["image_url"] = {"url": "https://example.org/a.png"}
    with pytest.raises(BadInput, match=r"messages\[0\]: an image must be a data: URI"):
        generate(tmp_path, row, takes_chat=True)
