"""/v1/completions, asked by the openai package over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import jsonschema
import pytest

from minivllm import LLM, SamplingParams
from tests.later import Later
from tests.serving.running import RunningServer

openai = Later("openai")

# More than llguidance follows at a time, which it notices at the first token.
MANY = {"grammar": "start: " + " | ".join(f'"r{number}"' for number in range(3000))}
PROMPTS = ["def add(a, b):\n", "# naïve façade – 値\nx = '", "class Node:"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", device="cpu", overrides=["runtime.threads=1"]) as one:
        yield one


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_that_of_generate_streamed_or_not(
    llm: LLM, client: openai.OpenAI, temperature: float
) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=7)
    for prompt in PROMPTS:
        expected = llm.generate(prompt, params)[0].outputs[0]
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "seed": 7}
        asked |= {"temperature": temperature, "extra_body": {"return_token_ids": True}}
        whole = client.completions.create(**asked).choices[0]
        assert whole.text == expected.text and whole.finish_reason == expected.finish_reason
        assert whole.token_ids == expected.token_ids
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert [i for chunk in chunks for i in chunk.token_ids] == expected.token_ids
        assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == expected.finish_reason


def test_several_prompts_and_samples_are_choices_in_order(llm: LLM, client: openai.OpenAI) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=2)
    expected = [output.text for one in llm.generate(PROMPTS, params) for output in one.outputs]
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS, max_tokens=8, temperature=1.0, seed=3, n=2
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None and answer.usage.completion_tokens == 48


def test_echo_with_logprobs_scores_the_prompt(llm: LLM, client: openai.OpenAI) -> None:
    ids = llm.encode(PROMPTS[0])
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = answer.choices
    assert choice.text == PROMPTS[0] and choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0 and answer.usage.total_tokens == len(ids)
    logprobs = llm.logits(ids).log_softmax(-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=0.1)
    assert choice.logprobs.text_offset == [0, *map(len, _prefixes(choice.logprobs.tokens or []))]


def test_every_sample_echoes_the_prompt_with_logprobs(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 2, "n": 3}
    fields |= {"echo": True, "logprobs": 1, "temperature": 0}
    first, *others = client.completions.create(**fields).choices
    assert first.text.startswith(PROMPTS[0]) and first.logprobs is not None
    assert all(one.logprobs == first.logprobs for one in others)
    found: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for chunk in client.completions.create(**fields, stream=True):
        for one in chunk.choices:
            assert one.logprobs is not None
            found[one.index] += one.logprobs.tokens or []
    assert list(found.values()) == [first.logprobs.tokens] * 3


def test_tokens_of_split_characters_have_names_and_places(client: openai.OpenAI) -> None:
    prompt = "值 = 'é😀' # ok"
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 5}
    choice = client.completions.create(max_tokens=3, **fields).choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert any(token.startswith("bytes:\\x") for token in found.tokens)
    place = found.text_offset[found.tokens.index(" #")]
    assert choice.text[place : place + 2] == " #"
    chunks = list(
        client.completions.create(
            max_tokens=3, stream=True, extra_body={"return_token_ids": True}, **fields
        )
    )
    streamed = [chunk.choices[0] for chunk in chunks]
    assert [t for c in streamed if c.logprobs for t in c.logprobs.tokens or []] == found.tokens
    assert [o for c in streamed if c.logprobs for o in c.logprobs.text_offset or []] == (
        found.text_offset
    )
    assert [hasattr(c, "prompt_token_ids") for c in streamed] == [True, False, False]


def _prefixes(tokens: list[str]) -> list[str]:
    return ["".join(tokens[:end]) for end in range(1, len(tokens))]


def test_prefixes_that_were_computed_are_counted_as_cached(client: openai.OpenAI) -> None:
    prompt = f"# {uuid4()}\n" + "import os\n" * 60  # others ask the same server
    for expected in (False, True):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == expected


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "unknown field 'temprature'"),
        ({"stream_options": {"a": 1}}, "stream_options.a", "unknown field 'stream_options.a'"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens=-1 must be at least 1"),
        ({"temperature": 9}, "temperature", "temperature"),
        ({"top_p": 9}, "top_p", "top_p=9"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must be at least one id"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", "stop_token_ids must be in"),
        ({"prompt": []}, "prompt", "prompt"),
        ({"prompt": [1, 10**9]}, "prompt", "token ids must be in"),
        ({"prompt": "x" * 100_000}, "prompt", "there is no room for an answer"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias"),
        ({"stop": [""]}, "stop", "stop"),
        ({"suffix": "}"}, "suffix", "suffix"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type must"),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "strin"}}},
            "response_format",
            "response_format: Invalid type: strin",
        ),
        (
            {"structured_outputs": {"json": {"type": "strin"}}},
            "structured_outputs.json",
            "structured_outputs.json: Invalid type: strin",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "outputs.regex: "),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs",
            "must hold exactly one of",
        ),
        ({"echo": False, "max_tokens": 0}, "max_tokens", "max_tokens=0 needs echo=true"),
        ({"stop": ["x"] * 1025}, "stop", "stop: at most 1024"),
        ({"bad_words": ["x"] * 1025}, "bad_words", "bad_words: at most 1024"),
        (
            {"structured_outputs": MANY},
            "structured_outputs",
            "structured_outputs: the grammar cannot go on",
        ),
    ],
)
def test_a_wrong_field_is_a_clear_400(
    client: openai.OpenAI, wrong: dict[str, object], param: str, words: str
) -> None:
    body = {"model": "tiny", "prompt": "x", **wrong}
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(
            model=body.pop("model"), prompt=body.pop("prompt"), extra_body=body
        )
    assert words in error.value.message and error.value.type == "invalid_request_error"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")


def test_answers_have_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    def ask(**body: object) -> list[str]:
        sampled = {"max_tokens": 400, "temperature": 1.0, "seed": 1, "n": 3}
        answer = client.completions.create(model="tiny", prompt="x = ", **sampled, extra_body=body)
        return [choice.text for choice in answer.choices if choice.finish_reason == "stop"]

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 20]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"structured_outputs": {"json": schema}},
    ):
        texts = ask(**body)
        assert texts
        for text in texts:
            jsonschema.validate(json.loads(text), schema)
    for text in ask(response_format={"type": "json_object"}):
        assert isinstance(json.loads(text), dict)
    assert set(ask(structured_outputs={"choice": ["yes", "no"]})) <= {"yes", "no"}
    assert all(len(text) == 3 for text in ask(structured_outputs={"regex": "[a-c]{3}"}))


def test_requests_go_on_while_a_grammar_is_compiled(client: openai.OpenAI) -> None:
    """And one that cannot be compiled is a 400 of its own request."""
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=200, stream=True)
    next(stream)
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.completions.create(
            model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "(a"}}
        )
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
