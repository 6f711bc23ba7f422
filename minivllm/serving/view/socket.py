"""/ws/events: what the engine does, as it happens, to those who watch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

from fastapi import WebSocket, WebSocketDisconnect

from minivllm.serving.errors import ApiError
from minivllm.serving.http.access import ApiKeys
from minivllm.serving.http.calls import CALL, CLIENT_LEFT, log_call
from minivllm.serving.service import Service
from minivllm.serving.view.outlet import INTERVAL_S
from minivllm.serving.view.viewers import Viewer, Viewers
from minivllm.serving.websocket import POLICY_VIOLATION, MalformedMessage, authorize, parsed

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
