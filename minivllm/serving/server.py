"""The server: starts the engine, listens, drains and stops."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import time
from typing import Any, Protocol

from minivllm.bench.hardware.gpu import device_of, open_gpu
from minivllm.config import plug_ins
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.platform.threads import pin, validate_cores
from minivllm.processes.ray_cluster import require_ray
from minivllm.serving.api_servers.api_servers import ApiServers
from minivllm.serving.app import build_app
from minivllm.serving.errors import unavailable
from minivllm.serving.http.http_server import HttpServer
from minivllm.serving.http.logs import json_lines
from minivllm.serving.model_files import read_model_files
from minivllm.serving.options import ServeOptions
from minivllm.serving.parsing.tool_forms import described
from minivllm.serving.processes.engine_client import EngineClient
from minivllm.serving.recording import Recorder
from minivllm.serving.service import EngineService

INTERRUPTED = 130
SEND_BUFFER = 128 << 10  # bytes


class FrontEnd(Protocol):
    """What answers clients."""

    async def serve(self) -> None:
        """Serve until `end`, or until it cannot."""

    def drain(self) -> None:
        """Take no further requests."""

    def end(self, at_once: bool = False) -> None:
        """End once the answers that are complete are read, or at once."""

    async def stop(self) -> None:
        """Free what is left."""


class _ThisProcess(HttpServer):
    """The server's own process, where it answers clients itself."""

    def drain(self) -> None:
        """Take no further requests: here the service refuses them, by its `is_draining`."""

    async def stop(self) -> None:
        """Free what is left: nothing, since `serve` closes its connections when it ends."""


async def serve(config: dict[str, Any]) -> int:
    """Serve until SIGTERM, Ctrl-C or the end of the engine.

    Args:
        config: the resolved configuration.

    Returns:
        Exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 where the engine has stopped by itself.

    Raises:
        NotInstalled: what starts its replicas is not installed.
        BadInput: a user's own class does not take its knobs, the engine cannot be built, or the
            address cannot be listened on.
    """
    plug_ins.check(config)
    view = Config.of(config)
    options: ServeOptions = view.task
    require_ray(config["parallel"])
    source, tokenizer, pictures = read_model_files(config)
    name = options.served_model_name or config["choices"].get("model") or "model"
    recorder = Recorder(config, source) if options.record else None
    validate_cores({"cores": options.cores}, "task")
    listener = listen(options)
    client = EngineClient(config, options.slow_reader_pieces, options.step_timeout_s)
    front: FrontEnd | None = None
    try:
        begin = time.monotonic()
        info = await client.start()
        pin({"cores": options.cores}, "task")
        for warning in info.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        service = EngineService(options, client, info, tokenizer, name, pictures)
        if recorder is not None:
            recorder.attach(client, time.monotonic() - begin)
        front = await _front(config, service, listener)
        host, port = listener.getsockname()[:2]
        print(f"serving {name} at http://{host}:{port}/v1 (Ctrl-C ends)", flush=True)
        if tools := described(tokenizer):
            print(tools, flush=True)
        if options.view:
            replicas = view.parallel.replicas
            whose = f" (of one of {replicas} replicas at a time)" if replicas > 1 else ""
            print(f"live view at http://{host}:{port}/{whose}", flush=True)
        with json_lines():
            code = await _until_stopped(front, service)
    finally:
        if front is not None:
            await front.stop()
        listener.close()
        await client.stop()
    if recorder is not None:
        recorder.write(service)
    return code


async def _front(
    config: dict[str, Any], service: EngineService, listener: socket.socket
) -> FrontEnd:
    """What answers clients, ready to do so: this process, or several others.

    Raises:
        BadInput: an API server cannot be built.
        Crashed: its process failed.
    """
    app = build_app(service, open_gpu(device_of(config)))
    if service.options.api_server_count == 1:
        listener.listen()
        return _ThisProcess(app, service, listener)
    servers = ApiServers(config, service, app, app.state.of_the_whole)
    try:
        await servers.start(listener)
    except BaseException:
        await servers.stop()
        raise
    listener.listen()
    return servers


def listen(options: ServeOptions) -> socket.socket:
    """A socket with its address, taken before the weights are loaded.

    Raises:
        BadInput: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where a socket says that it is TCP: with it a small
    # event waits some 40 ms for the acknowledgement of the one before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections have these, too: what waits for a slow reader is bounded in the kernel, and a
    # client whose machine is gone is noticed.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        listener.bind((options.host, options.port))
    except (OSError, UnicodeError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        advice = "task.port=0 takes a free port" if taken else "give an address of this machine"
        raise BadInput(
            f"task.host={options.host} task.port={options.port}: cannot listen there ({error}); "
            f"{advice}"
        ) from None
    return listener


async def _until_stopped(front: FrontEnd, service: EngineService) -> int:
    """Serve until a signal, of which the first drains and the second ends at once, or until the
    engine or all API servers have stopped; returns the exit code."""
    loop = asyncio.get_running_loop()
    code, signalled, forced = 0, asyncio.Event(), asyncio.Event()

    def on_signal(number: int) -> None:
        nonlocal code
        code = INTERRUPTED if number == signal.SIGINT else code
        if service.is_draining:
            forced.set()
            front.end(at_once=True)
        service.is_draining = True
        front.drain()
        signalled.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    running = asyncio.ensure_future(front.serve())
    waits = [running, *(asyncio.ensure_future(e.wait()) for e in (signalled, service.client.ended))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        ended = service.client.ended.is_set()
        if signalled.is_set() and not ended:
            await _drain(service, forced)
        else:
            reason = await service.client.exit_reason() if ended else "no API server is left"
            print(
                f"error: the {'engine' if ended else 'server'} has stopped: {reason}",
                file=sys.stderr,
            )
            code = 1
        front.end()
        await running
    finally:
        for one in waits:
            one.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return code


async def _drain(service: EngineService, forced: asyncio.Event) -> None:
    """Wait for running requests; new ones are refused."""
    most_s, left = service.options.drain_s, len(service.client.streams)
    deadline = time.monotonic() + most_s
    if left:
        print(
            f"draining: requests that run or wait ({left}) go on for at most "
            f"task.drain_s={most_s:g} s; a second signal ends at once",
            file=sys.stderr,
        )
    while service.client.streams and time.monotonic() < deadline and not forced.is_set():
        await asyncio.sleep(0.05)
    for stream in list(service.client.streams.values()):
        stream.end(unavailable("the server has ended before the request: see task.drain_s"))
