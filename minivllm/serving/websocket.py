"""/ws/generate: several requests at a time on one WebSocket, their tokens as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import Field, ValidationError

from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import RequestInputs
from minivllm.processes.messages import Piece
from minivllm.serving.answers.chat_model import ChatModel
from minivllm.serving.errors import ApiError, internal, naming
from minivllm.serving.http.access import ApiKeys, unauthorized
from minivllm.serving.http.calls import CALL, CLIENT_LEFT, Call, log_call, request_id_of
from minivllm.serving.http.limits import require_form
from minivllm.serving.openai.forms import (
    DEFAULT_MAX_TOKENS,
    MOST_LOGPROBS,
    SamplingFields,
    error_body,
    finish_reason,
    usage,
)
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import Service, merged

logger = logging.getLogger("minivllm.serving")

MOST_MALFORMED = 8  # messages, after which the socket is closed
MOST_ID = 128  # characters
PROMPTS = ("prompt", "prompt_token_ids", "messages")  # fields, of which a message has one
POLICY_VIOLATION = 1008  # RFC 6455, section 7.4.1


class GenerateMessage(SamplingFields):
    """A message that asks for tokens."""

    type: str
    id: str = Field(min_length=1, max_length=MOST_ID)
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def paths(self, **forms: Any) -> dict[str, str]:
        given = [name for name in PROMPTS if getattr(self, name) is not None]
        return super().paths(**forms) | ({"prompt": given[0]} if given else {})

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """How to decode. Raises ApiError for a wrong value."""
        if self.stream is False:
            raise ApiError(400, "stream=false: a WebSocket always streams", param="stream")
        if self.stream_options is not None:
            words = "stream_options: the last message always has the usage, no other has it"
            raise ApiError(400, words, param="stream_options")
        default = defaults.max_tokens or DEFAULT_MAX_TOKENS
        most = default if self.max_tokens is None else self.max_tokens
        return self.params(defaults, max_tokens=most, logprobs=self.logprobs)


class MalformedMessage(Exception):
    """A message that is none of this protocol; its second argument is the field that is wrong."""


class Socket:
    """One WebSocket, while it is open.

    Args:
        service: answers its requests.
        chat_model: writes conversations as prompts.
        keys: of clients.
        socket: an accepted WebSocket.
    """

    def __init__(
        self, service: Service, chat_model: ChatModel, keys: ApiKeys, socket: WebSocket
    ) -> None:
        self.service, self.chat_model, self.keys, self.socket = service, chat_model, keys, socket
        self._running: dict[str, asyncio.Task[None]] = {}  # by the client's id
        self._cancelled: set[str] = set()
        self._num_malformed = 0

    async def serve(self) -> None:
        """Serve messages until either side closes."""
        try:
            await authorize(self.socket, self.service, self.keys)
            while (message := await self.socket.receive())["type"] == "websocket.receive":
                try:
                    await self._handle(parsed(message, self.service.options.max_depth))
                except MalformedMessage as error:
                    await self._note_malformed(*error.args)
        except ApiError as error:
            await self._send_error(None, error)
            await self.socket.close(POLICY_VIOLATION, error.message[:100])
        except (WebSocketDisconnect, RuntimeError):
            pass  # the client has left, which a write may notice before a read
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _note_malformed(self, words: str, field: str | None = None) -> None:
        self.service.count("malformed_frames")
        self._num_malformed += 1
        await self._send_error(None, ApiError(400, words, param=field))
        if self._num_malformed >= MOST_MALFORMED:
            raise ApiError(400, "too many malformed messages")

    async def _handle(self, message: dict[str, Any]) -> None:
        kind, number = message.get("type"), message.get("id")
        if kind == "auth":
            return  # the socket has been opened with a key, or needs none
        if not isinstance(number, str):
            raise MalformedMessage("id must be a text", "id")
        if kind == "cancel":
            if number in self._running:
                self._cancelled.add(number)
                self._running[number].cancel()
        elif kind == "generate":
            try:
                body = GenerateMessage.model_validate(message)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(map(str, first["loc"]))[:100]
                raise MalformedMessage(f"{where}: {first['msg']}"[:500], where) from None
            await self._begin(body)
        else:
            raise MalformedMessage('type must be "generate" or "cancel"', "type")

    async def _begin(self, body: GenerateMessage) -> None:
        """Start a request, unless too many run."""
        most = self.service.options.max_socket_reqs
        error = None
        if body.id in self._running:
            error = ApiError(400, "a request with this id is running", param="id")
        elif len(self._running) >= most:
            words = f"task.max_socket_reqs={most} requests run on this socket"
            error = ApiError(429, words, kind="rate_limit_error", code="rate_limit_exceeded")
        if error is not None:
            await self._send_error(body.id, error)
            return
        self._running[body.id] = asyncio.create_task(self._run(body))
        # A task that is cancelled before its first line never ends its request: it begins here, as
        # the cancellation may have been read with the request.
        await asyncio.sleep(0)

    async def _run(self, body: GenerateMessage) -> None:
        """Serve one request, with a line in the log of its own."""
        outer = CALL.get()
        assert outer is not None
        call = Call(
            f"{outer.request_id}/{request_id_of(body.id)}",
            outer.client,
            outer.connection,
            key=outer.key,
        )
        CALL.set(call)
        status = 200
        try:
            await self._generate(body, call)
        except ApiError as error:
            status = error.status
            await self._send_error(body.id, error)
        except (WebSocketDisconnect, RuntimeError):
            status = CLIENT_LEFT
        except asyncio.CancelledError:
            call.leave()
            if body.id not in self._cancelled:
                raise
            await self._send_done(body.id, call.streams, "cancelled")
        except Exception as error:
            status = 500
            logger.error("a request failed: %s", call.request_id, exc_info=error)
            await self._send_error(body.id, internal("the server made a mistake; see its log"))
        finally:
            call.end()
            self._cancelled.discard(body.id)
            self._running.pop(body.id, None)
            words = {"method": "WEBSOCKET", "path": "/ws/generate", "status": status}
            prompts = {"body": body.model_dump(exclude_none=True)}
            logged = prompts if self.service.options.log_prompts else {}
            log_call(call, {**words, **call.summary(), **logged})

    async def _generate(self, body: GenerateMessage, call: Call) -> None:
        body.require_known()
        self.service.require_model(body.model)
        self.service.admit()
        with naming(body.paths()):
            params = body.sampling(self.service.info.default_params)
            params = await self.service.with_checked(params)
            ids, inputs = await self._prompt(body)
            streams = self.service.start([ids], params, inputs)
            async for _, pieces in merged(streams):
                for piece in pieces:
                    await self._send(token_message(body, piece))
        await self._send_done(body.id, streams, "done")

    async def _prompt(self, body: GenerateMessage) -> tuple[list[int], RequestInputs | None]:
        """Token ids of what a request gives, and the images of its messages. Raises ApiError where
        that is not one thing."""
        given = [name for name in PROMPTS if getattr(body, name) is not None]
        if len(given) != 1:
            raise ApiError(400, f"give one of {', '.join(PROMPTS)}", param="prompt")
        if body.chat_template_kwargs is not None and body.messages is None:
            raise ApiError(400, "chat_template_kwargs needs messages", param="chat_template_kwargs")
        if body.prompt is not None:
            return await self.service.encode(body.prompt), None
        if body.prompt_token_ids is not None:
            return body.prompt_token_ids, None
        variables = self.chat_model.variables(body.chat_template_kwargs, None)
        prompt = await self.chat_model.prompt(body.messages, None, variables)
        return prompt.token_ids, prompt.inputs

    # ---- to the client

    async def _send(self, message: dict[str, Any]) -> None:
        await self.socket.send_text(json.dumps(message, separators=(",", ":")))

    async def _send_done(self, number: str, streams: list[TokenStream], kind: str) -> None:
        await self._send({"type": kind, "id": number, "usage": usage(streams)})

    async def _send_error(self, number: str | None, error: ApiError) -> None:
        details = {**error_body(error)["error"], "status": error.status}
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._send({"type": "error", "id": number, "error": details})


async def authorize(socket: WebSocket, service: Service, keys: ApiKeys) -> None:
    """Wait for the message with the key, where a key is needed and no header had it. Raises
    ApiError where the key does not come or fit."""
    if socket.scope["state"].get("has_key", True):
        return
    options, message = service.options, None
    with contextlib.suppress(TimeoutError, MalformedMessage):
        async with asyncio.timeout(options.client_timeout_s):
            message = parsed(await socket.receive(), options.max_depth)
    key = message.get("api_key") if message and message.get("type") == "auth" else None
    if not isinstance(key, str) or not keys.fit(key):
        service.count("unauthorized")
        raise unauthorized()


def token_message(body: GenerateMessage, piece: Piece) -> dict[str, Any]:
    """One token of one completion, or its end without one."""
    message = {
        "type": "token",
        "id": body.id,
        "index": piece.completion,
        "token_id": piece.token_id,
        "text": piece.text,
        "finish_reason": finish_reason(piece),
    }
    if piece.logprobs is not None:
        message["logprobs"] = {str(token): value for token, value in piece.logprobs.items()}
    return message


def parsed(message: Any, most_levels: int) -> dict[str, Any]:
    """A message of a client.

    Raises:
        MalformedMessage: it is no JSON object.
        WebSocketDisconnect: the client has left.
    """
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    text = message.get("text")
    if text is None:
        raise MalformedMessage("messages are texts of JSON")
    try:
        require_form(text.encode("utf-8", "replace"), most_levels)
        value = json.loads(text)
    except (ApiError, ValueError) as error:
        raise MalformedMessage(f"not JSON: {error}"[:200]) from None
    if not isinstance(value, dict):
        raise MalformedMessage("a message is an object of JSON")
    return value


def router(service: Service) -> APIRouter:
    """The route of the WebSocket."""
    routes = APIRouter()
    chat_model, keys = ChatModel(service), ApiKeys(service.options.api_keys)

    @routes.websocket("/ws/generate")
    async def generate(socket: WebSocket) -> None:
        """Serve requests that come as messages."""
        await socket.accept()
        await Socket(service, chat_model, keys, socket).serve()

    return routes
