"""The page that shows the engine at work, its commands, and /ws/events, which has what the engine
does as it happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from functools import cache
from typing import Any

from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import HTMLResponse
from pydantic import Field

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.report.view.page import live_page
from minivllm.serving.errors import ApiError
from minivllm.serving.http.access import Access, ApiKeys, access
from minivllm.serving.http.calls import CALL, CLIENT_LEFT, log_call
from minivllm.serving.openai.forms import Body
from minivllm.serving.service import EngineService, Service
from minivllm.serving.view.load import LoadBody, SyntheticLoad
from minivllm.serving.view.outlet import INTERVAL_S
from minivllm.serving.view.viewers import Gauges, Viewer, Viewers
from minivllm.serving.websocket import POLICY_VIOLATION, MalformedMessage, authorize, parsed

# The page's own policy, in its head, allows its scripts by their digests. A head cannot say who may
# frame the page, and a frame would let another page steer clicks.
HEADERS = {
    "Content-Security-Policy": (
        "frame-ancestors 'none'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "connect-src 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class ReplicaBody(Body):
    """The replica that is to be watched."""

    number: int = Field(ge=0)


def router(service: EngineService, gpu: NullGpu) -> APIRouter:
    """The routes of the live view.

    Args:
        service: of the engine that is watched.
        gpu: of the engine, or a null object.
    """
    routes = APIRouter()
    options, keys, text = service.options, ApiKeys(service.options.api_keys), cache(live_page)
    gauges = Gauges(lambda: service.client.replicas.pids, lambda: service.api_servers, gpu)
    viewers = Viewers(service, gauges)
    load = SyntheticLoad(service)
    viewers.on_empty.append(load.stop)

    @access(Access.OPEN)  # it knows nothing, and asks for the key
    async def page() -> HTMLResponse:
        """Show the engine at work."""
        return HTMLResponse(text(), headers=HEADERS)

    for path in ("/", "/view"):
        routes.add_api_route(path, page, include_in_schema=False)

    @routes.get("/view/info")
    @access(Access.OPEN)
    async def info(request: Request) -> dict[str, Any]:
        """Describe the server; without a key that is needed, say only that it is."""
        if keys and not any([keys.fit(key) for key in keys.given(request.headers)]):
            return {"key": True}
        tokenizer, replicas = service.tokenizer, service.client.replicas
        count = len(replicas.links)
        several = {"replicas": count, "replica": replicas.watched} if count > 1 else {}
        return {
            **several,
            "key": bool(keys),
            "model": service.model,
            "block_size": service.info.block_size,
            "max_model_len": service.info.max_model_len,
            "load": options.allows_load,
            "text": tokenizer is not None,
            "chat": tokenizer is not None and tokenizer.chat_template is not None,
        }

    _add_commands(routes, service, viewers, load)

    @routes.websocket(PATH)
    async def events(socket: WebSocket) -> None:
        """Send what happens, as it happens."""
        await serve_viewer(socket, service, viewers, keys)

    return routes


def _add_commands(
    routes: APIRouter, service: EngineService, viewers: Viewers, load: SyntheticLoad
) -> None:
    """Add what loads the server, and what chooses one of several replicas."""

    @routes.post("/view/load")
    @access(Access.COMMAND)
    async def set_load(body: LoadBody) -> dict[str, Any]:
        """Change the synthetic load; a rate of 0 ends it."""
        body.require_known()
        if not service.options.allows_load:
            raise ApiError(403, "this server sends no load to itself: see task.view_load")
        if body.rate and not viewers:
            raise ApiError(409, "nobody watches: the load ends with the last viewer")
        load.set(body)
        return body.model_dump()

    @routes.post("/view/replica")
    @access(Access.COMMAND)
    async def choose_replica(body: ReplicaBody) -> dict[str, Any]:
        """Let all who watch see another replica."""
        body.require_known()
        if body.number >= (count := len(service.client.replicas.links)):
            raise ApiError(400, f"number: {count} replicas count from 0", param="number")
        if not viewers:
            raise ApiError(409, "nobody watches")
        viewers.choose(body.number)
        return {"replica": service.client.replicas.watched}


TRY_AGAIN = 1013  # IANA's registry of close codes
PATH = "/ws/events"


async def serve_viewer(
    socket: WebSocket, service: Service, viewers: Viewers, keys: ApiKeys
) -> None:
    """Send what happens to one viewer until either side closes."""
    await socket.accept()
    viewer, status = None, 200
    try:
        await authorize(socket, service, keys)
        viewer = viewers.join()
        await _until_either_ends(_send(socket, viewer), _listen(socket, service))
    except ApiError as error:
        status = error.status
        code = TRY_AGAIN if status == 503 else POLICY_VIOLATION
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await socket.close(code, error.message[:100])
    except (WebSocketDisconnect, RuntimeError):
        status = CLIENT_LEFT  # which a write may notice before a read
    finally:
        frames, losses = 0, 0
        if viewer is not None:
            viewers.leave(viewer)
            frames, losses = viewer.num_frames, viewer.num_losses
        if (call := CALL.get()) is not None:
            words = {"method": "WEBSOCKET", "path": PATH, "status": status}
            log_call(call, {**words, **call.summary(), "frames": frames, "losses": losses})


async def _until_either_ends(*parts: Coroutine[None, None, None]) -> None:
    """Run both; what one raises is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _send(socket: WebSocket, viewer: Viewer) -> None:
    while True:
        await socket.send_text(await viewer.next())
        await asyncio.sleep(INTERVAL_S)


async def _listen(socket: WebSocket, service: Service) -> None:
    """Wait until the client leaves. Raises ApiError where it sends anything but a key."""
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        try:
            kind = parsed(message, service.options.max_depth).get("type")
        except MalformedMessage as error:
            kind = str(error)
        if kind != "auth":  # it has been opened with a key, or needs none
            service.count("malformed_frames")
            raise ApiError(400, "nothing is taken here: commands go by POST")
