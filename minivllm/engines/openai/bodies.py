"""The bodies of requests, as each API of OpenAI takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.models.load.tokenizer import Tokenizer

# Where each API is.
PATHS = {"completions": "completions", "chat": "chat/completions", "responses": "responses"}
_MESSAGES = (
    "prompts were sent as messages, which the server's own chat template writes: input tokens are "
    "those of the template known here"
)
# What a record says of prompts that were not sent as ids.
SENT = {
    "completions": "prompts were sent as text: the server may cut them into other tokens",
    "chat": _MESSAGES,
    "responses": f"{_MESSAGES}; no seeds were sent, which this API has not",
}
# Parameters that /v1/responses has not.
NOT_OF_RESPONSES = ("presence_penalty", "frequency_penalty", "stop")
# Tried on a server that tells no ids: with these it may tell on each chunk how many tokens there
# are so far.
COUNTING: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},  # vLLM, SGLang
    {"timings_per_token": True},  # llama.cpp
)


class Bodies:
    """Makes the bodies of requests to one API.

    Args:
        api: `engine.api`.
        tokenizer: writes prompts as text; None where there is none.

    Attributes:
        as_text: whether the completions API is sent prompts as text and not as ids.
        past_end: whether `ignore_eos` is sent at all, which is not of OpenAI's.
    """

    def __init__(self, api: str, tokenizer: Tokenizer | None) -> None:
        self._api, self._tokenizer = api, tokenizer
        self.as_text, self.past_end = False, True

    def require_sendable(self, request_id: str, params: SamplingParams) -> None:
        """Raise BadInput for what the API has no field for."""
        for name in NOT_OF_RESPONSES if self._api == "responses" else ():
            if getattr(params, name):
                raise BadInput(
                    f"request {request_id}: /v1/responses has no {name}: leave it out, or use "
                    "engine.api=chat"
                )

    def body(
        self,
        prompt: list[int],
        max_tokens: int,
        params: SamplingParams,
        chat: Mapping[str, Any] | None = None,
        content: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """A request, but for the model's name.

        Args:
            prompt: token ids.
            max_tokens: to generate.
            params: everything else about decoding.
            chat: of a request that has messages of its own; None makes one message.
            content: of that message, where the prompt has images; None is the prompt's text.
        """
        if not self.past_end:
            params = replace(params, ignore_eos=False)
        if self._api == "completions":
            words = self.server_text(prompt) if self.as_text else prompt
            return completions_body(words, max_tokens, params)
        if chat is None:
            assert self._tokenizer is not None
            text = self._tokenizer.decode(prompt) if content is None else content
            chat = {"messages": [{"role": "user", "content": text}]}
        make = chat_body if self._api == "chat" else responses_body
        return make(chat, max_tokens, params)

    def server_text(self, prompt: list[int]) -> str:
        """A prompt as text from which a server makes the same tokens: special tokens are written
        out, but for those that it puts in front of every text."""
        assert self._tokenizer is not None
        added = self._tokenizer.encode("")
        own = prompt[len(added) :] if prompt[: len(added)] == added else prompt
        return self._tokenizer.decode(own, skip_special_tokens=False)


def completions_body(
    prompt: str | Sequence[int], max_tokens: int, params: SamplingParams
) -> dict[str, Any]:
    """A request of /v1/completions, but for the model's name."""
    return {"prompt": prompt, "max_tokens": max_tokens, **_streamed(), **_sampling(params)}


def chat_body(chat: Mapping[str, Any], max_tokens: int, params: SamplingParams) -> dict[str, Any]:
    """A request of /v1/chat/completions: messages and what goes with them as they are."""
    return {**chat, "max_tokens": max_tokens, **_streamed(), **_sampling(params)}


def responses_body(
    chat: Mapping[str, Any], max_tokens: int, params: SamplingParams
) -> dict[str, Any]:
    """A request of /v1/responses, made of what the chat API would be sent but for NOT_OF_RESPONSES
    and the seed."""
    further = {name: chat[name] for name in ("parallel_tool_calls",) if name in chat}
    if tools := chat.get("tools"):
        further["tools"] = [_flat(tool) for tool in tools]
    if (choice := chat.get("tool_choice")) is not None:
        further["tool_choice"] = _flat(choice)
    items = [item for message in chat["messages"] for item in _items(message)]
    return {
        "input": items,
        **further,
        "max_output_tokens": max_tokens,
        "stream": True,
        "store": False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        **({"ignore_eos": True} if params.ignore_eos else {}),
    }


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    optional = {
        "seed": None if params.greedy else params.seed,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
        "stop": list(params.stop) or None,
        "ignore_eos": params.ignore_eos or None,
    }
    known = {"temperature": params.temperature, "top_p": params.top_p}
    return known | {name: value for name, value in optional.items() if value is not None}


def _flat(tool: Any) -> Any:
    """A tool, or the choice of one, with its function's fields beside its type."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return {"type": "function", **function} if isinstance(function, Mapping) else tool


def _items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of one message: what it says, and each tool that it calls; or a tool's answer."""
    role, content = message["role"], message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) else _text(content)
        call_id = message.get("tool_call_id")
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    items: list[dict[str, Any]] = []
    if content:
        kind = "output_text" if role == "assistant" else "input_text"
        parts = content if isinstance(content, str) else [_part(part, kind) for part in content]
        items.append({"type": "message", "role": role, "content": parts})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        names = {"name": function.get("name"), "arguments": function.get("arguments")}
        items.append({"type": "function_call", "call_id": call.get("id"), **names})
    return items


def _part(part: Any, kind: str) -> Any:
    """A part of a content: text, or an image whose URL is no object here."""
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "image_url":
        image = part["image_url"]
        image = image if isinstance(image, Mapping) else {"url": image}
        detail = {"detail": image["detail"]} if image.get("detail") else {}
        return {"type": "input_image", "image_url": image["url"], **detail}
    return {"type": kind, "text": part["text"]} if "text" in part else part


def _text(content: Any) -> str:
    parts = content if isinstance(content, Sequence) else ()
    return "".join(part.get("text") or "" for part in parts if isinstance(part, Mapping))
