"""The server: starts the engine, listens, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import sys
import time
from functools import partial
from typing import Any, cast

import uvicorn

from minivllm.bench.hardware.gpu import NullGpu, device_of, open_gpu
from minivllm.cluster.ray_cluster import require_ray
from minivllm.config.typed import Config
from minivllm.errors import BadInput
from minivllm.extras.vision.fit import fitting_processor
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.load.source import resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.threads import pin, validate_cores
from minivllm.serving.app import build_app
from minivllm.serving.http.connections import HttpConnection, SocketConnection, watch
from minivllm.serving.http.limits import BYTES_PER_MB
from minivllm.serving.http.logs import json_lines
from minivllm.serving.options import ServeOptions
from minivllm.serving.processes.engine_client import EngineClient
from minivllm.serving.recording import Recorder
from minivllm.serving.service import Service

INTERRUPTED = 130
SPARE_FILES = 64  # file descriptors that are no connections
SEND_BUFFER = 128 << 10  # bytes
SHUTDOWN_S = 3  # for answers that are complete to be read, once no request runs


class _Server(uvicorn.Server):
    """uvicorn's server without its handling of signals, which drain here."""

    def capture_signals(self) -> Any:
        """Capture none."""
        return contextlib.nullcontext()


async def serve(config: dict[str, Any]) -> int:
    """Serve until SIGTERM, Ctrl-C or the end of the engine.

    Args:
        config: the resolved configuration.

    Returns:
        Exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 where the engine has stopped by itself.

    Raises:
        NotInstalled: what starts its replicas is not installed.
        BadInput: the engine cannot be built, or the address cannot be listened on.
    """
    view = Config.of(config)
    options: ServeOptions = view.task
    require_ray(config["parallel"])
    source = resolve(config["model"], allow_random=False)[1]
    tokenizer = Tokenizer.load(source.folder)
    processor = fitting_processor(view.vision, source)
    pictures = None if processor is None else Pictures(processor, tokenizer, view.vision)
    name = options.served_model_name or config["choices"].get("model") or "model"
    recorder = Recorder(config, source) if options.record else None
    validate_cores({"cores": options.cores}, "task")
    listener = listen(options)
    client = EngineClient(config, options.slow_reader_pieces, options.step_timeout_s)
    try:
        begin = time.monotonic()
        info = await client.start()
        pin({"cores": options.cores}, "task")
        for warning in info.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        service = Service(options, client, info, tokenizer, name, pictures)
        if recorder is not None:
            recorder.attach(client, time.monotonic() - begin)
        server = _Server(_settings(service, open_gpu(device_of(config))))
        listener.listen()
        host, port = listener.getsockname()[:2]
        print(f"serving {name} at http://{host}:{port}/v1 (Ctrl-C ends)", flush=True)
        if options.view:
            replicas = view.parallel.replicas
            whose = f" (of one of {replicas} replicas at a time)" if replicas > 1 else ""
            print(f"live view at http://{host}:{port}/{whose}", flush=True)
        with json_lines():
            code = await _until_stopped(server, service, listener)
    finally:
        listener.close()
        await client.stop()
    if recorder is not None:
        recorder.write(service)
    return code


def _settings(service: Service, gpu: NullGpu) -> uvicorn.Config:
    """uvicorn's settings for a service."""
    options, count = service.options, service.count
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES
    return uvicorn.Config(
        build_app(service, gpu),
        http=cast(Any, partial(HttpConnection, options, count, most)),
        ws=cast(Any, partial(SocketConnection, options, count)),
        ws_max_size=int(options.max_body_mb * BYTES_PER_MB),
        ws_per_message_deflate=False,  # a token is too short for it
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client could give itself any address
        timeout_keep_alive=max(1, round(options.keep_alive_s)),
        timeout_graceful_shutdown=SHUTDOWN_S,
        lifespan="off",
    )


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


async def _until_stopped(server: _Server, service: Service, listener: socket.socket) -> int:
    """Run the server; a first signal drains it, a second one ends it at once."""
    loop = asyncio.get_running_loop()
    code, signalled = 0, asyncio.Event()

    def on_signal(number: int) -> None:
        nonlocal code
        code = INTERRUPTED if number == signal.SIGINT else code
        if service.is_draining:
            server.force_exit = server.should_exit = True
        service.is_draining = True
        signalled.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    running = asyncio.ensure_future(server.serve([listener]))
    watching = asyncio.ensure_future(watch(server.server_state.connections))
    waits = [running, *(asyncio.ensure_future(e.wait()) for e in (signalled, service.client.ended))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if service.client.ended.is_set():
            print(
                f"error: the engine has stopped: {await service.client.last_words()}",
                file=sys.stderr,
            )
            code = 1
        else:
            await _drain(server, service)
        server.should_exit = True
        await running
    finally:
        for one in (*waits, watching):
            one.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return code


async def _drain(server: _Server, service: Service) -> None:
    """Refuse new requests, and wait for running ones."""
    deadline = time.monotonic() + service.options.drain_s
    while service.client.streams and time.monotonic() < deadline and not server.force_exit:
        await asyncio.sleep(0.05)
    for stream in list(service.client.streams.values()):
        stream.close()
