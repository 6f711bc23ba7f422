"""A page in headless Chromium, over its debugging protocol: what it drew, and what it complained
about."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.request
from pathlib import Path
from shutil import which
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = next(
    (path for name in ("chromium", "google-chrome", "chrome") if (path := which(name))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--remote-debugging-port=0"
)
PATIENCE_S = 120.0
COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded")


def visit(page: Path, profile: Path, done: str, width: int = 390) -> tuple[Any, list[str]]:
    """Open a page, wait until it has loaded and the expression `done` is true; return that with its
    errors.

    Args:
        page: the file.
        profile: a new folder for the browser's data.
        done: JavaScript; the last value is returned where it never becomes true.
        width: of the window, in pixels.
    """
    size, data = f"--window-size={width},20000", f"--user-data-dir={profile}"
    command = [str(CHROMIUM), *FLAGS.split(), size, data, "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_visit(page.as_uri(), profile / "DevToolsActivePort", done))
    finally:
        browser.kill()
        browser.wait()


async def _visit(url: str, port_file: Path, done: str) -> tuple[Any, list[str]]:
    deadline = time.monotonic() + PATIENCE_S
    while not port_file.exists() or not port_file.read_text().strip():
        assert time.monotonic() < deadline, "the browser did not start"
        await asyncio.sleep(0.1)
    port = port_file.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        target = next(t for t in json.load(answer) if t["type"] == "page")
    socket = await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=1 << 26)
    errors: list[str] = []
    for method in ("Runtime.enable", "Log.enable", "Page.enable"):
        await _call(socket, errors, method)
    await _call(socket, errors, "Page.navigate", url=url)
    # An expression asked for while the page is read would see elements whose scripts have not run
    # yet.
    loaded = f"location.href !== 'about:blank' && document.readyState === 'complete' && ({done})"
    value = None
    while not value and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        found = await _call(
            socket, errors, "Runtime.evaluate", expression=loaded, returnByValue=True
        )
        value = found["result"].get("value")
    socket.close()
    return value, errors


async def _call(
    socket: WebSocketClientConnection, errors: list[str], method: str, **params: Any
) -> Any:
    """Send a command and return its result; errors of the page that arrive meanwhile are noted."""
    await socket.write_message(json.dumps({"id": 1, "method": method, "params": params}))
    while True:
        text = await socket.read_message()
        assert text is not None, "the browser is gone"
        message = json.loads(text)
        complaint = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled" and complaint["type"] in (
            "error",
            "assert",
        ):
            errors.append(str(complaint["args"]))
        elif message.get("method") == COMPLAINTS[0] or (
            message.get("method") == COMPLAINTS[1] and complaint["entry"]["level"] == "error"
        ):
            errors.append(str(complaint))
        if message.get("id") == 1:
            assert "error" not in message, message
            return message["result"]
