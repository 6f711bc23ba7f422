"""/tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Response

from minivllm.errors import BadInput
from minivllm.serving.answers.chat_model import ChatModel
from minivllm.serving.errors import ApiError
from minivllm.serving.http.answers import JsonAnswer
from minivllm.serving.openai.forms import Body
from minivllm.serving.service import Service

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # whose `iterencode` lets other threads run


class TokenizeBody(Body):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


def router(service: Service) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter()
    chat_model = ChatModel(service)

    async def token_ids(body: TokenizeBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.prompt is not None:
            return await service.encode(body.prompt, body.add_special_tokens)
        if body.tools:
            chat_model.require_tools()
        variables = dict(body.chat_template_kwargs or {})
        if not body.add_generation_prompt:
            variables["add_generation_prompt"] = False
        return (await chat_model.prompt(body.messages, body.tools, variables)).token_ids

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """Write a text as token ids."""
        body.require_known()
        service.require_model(body.model)
        ids = await token_ids(body)
        fast = service.require_tokenizer().fast

        def answer() -> Response:
            wanted = body.return_token_strs
            content = {
                "count": len(ids),
                "max_model_len": service.info.max_model_len,
                "tokens": ids,
                "token_strs": [fast.id_to_token(token_id) for token_id in ids] if wanted else None,
            }
            return Response("".join(_ENCODER.iterencode(content)), media_type="application/json")

        return await asyncio.to_thread(answer)  # of a long text there may be millions

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """Write token ids as a text, special tokens included."""
        body.require_known()
        service.require_model(body.model)
        if len(body.tokens) > service.info.max_model_len:  # decoding lets no other thread run
            raise ApiError(
                400,
                f"{len(body.tokens)} token ids are more than the context of "
                f"{service.info.max_model_len}",
                param="tokens",
            )
        if any(not 0 <= token_id < service.info.vocab_size for token_id in body.tokens):
            raise ApiError(
                400, f"token ids must be in [0, {service.info.vocab_size})", param="tokens"
            )
        try:
            return JsonAnswer({"prompt": service.require_tokenizer().decode(body.tokens, False)})
        except BadInput as error:
            raise ApiError.of(error, "tokens") from None

    return routes
