"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm import LLM
from tests.serving.plain import call_json
from tests.serving.running import RunningServer

TEXT = "def f(x):\n    return 'naïve 値 😀'\n"


def test_a_text_becomes_the_engines_ids_and_text_again(server: RunningServer) -> None:
    with LLM("tiny", device="cpu", overrides=["runtime.threads=1"]) as llm:
        ids = llm.encode(TEXT)
    asked = {"model": "tiny", "prompt": TEXT, "return_token_strs": True}
    status, body = call_json(f"{server.url}/tokenize", asked)
    assert status == 200 and body["tokens"] == ids and body["count"] == len(ids)
    assert len(body["token_strs"]) == len(ids) and body["max_model_len"] == 2048
    back = call_json(f"{server.url}/detokenize", {"model": "tiny", "tokens": ids})
    assert back == (200, {"prompt": TEXT})


def test_a_conversation_becomes_the_ids_that_chat_computes(chat_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, body = call_json(f"{chat_server.url}/tokenize", {"messages": messages})
    asked = {"model": "talker", "messages": messages, "return_token_ids": True, "max_tokens": 1}
    _, answer = call_json(f"{chat_server.url}/v1/chat/completions", asked)
    assert body["tokens"] == answer["prompt_token_ids"] and body["token_strs"] is None
    asked = {"messages": messages, "add_generation_prompt": False}
    _, shorter = call_json(f"{chat_server.url}/tokenize", asked)
    assert shorter["tokens"] == body["tokens"][:-1]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    _, longer = call_json(f"{chat_server.url}/tokenize", {"messages": messages, "tools": [tool]})
    assert longer["count"] > body["count"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("tokenize", {}, "either prompt or messages"),
        ("tokenize", {"prompt": "x", "messages": []}, "either prompt or messages"),
        ("tokenize", {"prompt": "\ud800"}, "no character"),
        ("tokenize", {"prompt": "x", "promt": 1}, "unknown field 'promt'; did you mean prompt?"),
        ("tokenize", {"messages": [{"role": "user"}], "tools": [3]}, "tools[0]: Input should"),
        ("detokenize", {"tokens": [-1]}, "token ids must be in"),
        ("detokenize", {"tokens": [10**30]}, "token ids must be in"),
        ("detokenize", {"tokens": "x"}, "tokens"),
        ("detokenize", {"tokens": [5] * 2049}, "2049 token ids are more than the context of 2048"),
    ],
)
def test_a_wrong_body_is_a_clear_400(
    server: RunningServer, path: str, body: dict[str, Any], words: str
) -> None:
    status, answer = call_json(f"{server.url}/{path}", body)
    assert status == 400 and words in answer["error"]["message"]
