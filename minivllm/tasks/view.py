"""task=view: recorded runs, or a running server, step by step."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from minivllm.analysis.format import count
from minivllm.config.groups import Config
from minivllm.errors import BadInput, NotInstalled, install
from minivllm.tasks.options import ViewOptions, ViewTaskOptions
from minivllm.tasks.report import find_runs, joined_name

EVENTS_PATH = "/ws/events"
OPEN_S = 10.0  # for a server to answer
TURNED_AWAY = (1008, 1013)  # codes with which a server closes: the key is wrong, too many viewers


def run(config: dict[str, Any]) -> int:
    """Write a page of each recorded run below `reports_dir` and print its path, or show one in the
    terminal.

    Args:
        config: the resolved configuration; uses `task`, `view`, `runs`, `runs_dir`, `reports_dir`
            and `name`.

    Returns:
        0.

    Raises:
        BadInput: no record of `runs` has events, they are damaged, or the server of `task.url`
            cannot be seen.
        KeyboardInterrupt: Ctrl-C, which ends a view in the terminal.
    """
    view = Config.of(config)
    task: ViewTaskOptions = view.task
    settings: ViewOptions = view.view
    if task.url is not None:
        return _follow(task, task.url, settings, view.runs)
    from minivllm.analysis.rows import read_rows
    from minivllm.report.view.recording import is_recorded, items_of, title_of

    folders = find_runs(view.runs, Path(view.runs_dir))
    rows, _ = read_rows(folders)
    recorded = [row for row in rows if is_recorded(row)]
    if not recorded:
        raise BadInput(
            f"runs: no record of {', '.join(map(str, folders))} has events: measure again with "
            "measure.events=true, which keeps them"
        )
    if settings.tui:
        if len(recorded) > 1:
            raise BadInput(
                f"view.tui=true shows one record, and runs has {len(recorded)} with events: name "
                f"one, such as 'runs=[{recorded[0]['directory']}]'"
            )
        from rich.console import Console

        from minivllm.report.view.terminal import replay

        (row,) = recorded
        replay(title_of(row), items_of(row), settings.speed, Console())
        return 0
    _write(recorded, Path(view.reports_dir) / str(view.name or joined_name(folders)), settings)
    if others := len(rows) - len(recorded):
        print(
            f"left out: {count(others, 'record')} measured without measure.events=true",
            file=sys.stderr,
        )
    return 0


def _write(rows: list[dict[str, Any]], out_dir: Path, settings: ViewOptions) -> None:
    """Pages, and traces where they are wanted."""
    from minivllm.report.html import make_folder
    from minivllm.report.view.recording import items_of, write_page, write_trace

    make_folder(out_dir)
    for row in rows:
        items = items_of(row)
        print(f"view: {write_page(row, out_dir, items)}")
        if settings.trace:
            print(f"trace: {write_trace(row, out_dir, items)}")


def _follow(task: ViewTaskOptions, url: str, settings: ViewOptions, runs: list[str]) -> int:
    """Show a running server until it ends."""
    if not settings.tui:
        raise BadInput(
            f"task.url={url} is shown in the terminal: add view.tui=true, or open the server's "
            "own page in a browser"
        )
    if runs or settings.trace:
        raise BadInput("task.url is of a running server: leave out runs and view.trace")
    from rich.console import Console

    from minivllm.report.view.terminal import follow

    follow(url, _batches(url, os.environ.get(task.api_key_env)), Console())
    print("the server has closed the connection", file=sys.stderr)
    return 0


def events_url(url: str) -> str:
    """The WebSocket of a server's events, from it or from the address of the server or of its API.

    Raises:
        ValueError: it is no URL.
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/v1") or EVENTS_PATH
    return parts._replace(scheme=parts.scheme.replace("http", "ws"), path=path).geturl()


def _batches(url: str, key: str | None) -> Iterator[list[dict[str, Any]]]:
    """The messages of a server. Raises BadInput if it cannot be reached, or turns viewers away."""
    try:
        from websockets.exceptions import ConnectionClosedError, WebSocketException
        from websockets.sync.client import connect
    except ImportError:
        raise NotInstalled(f"task.url needs websockets: {install('serve')}") from None
    try:
        socket = connect(events_url(url), open_timeout=OPEN_S, max_size=None)
    except (OSError, ValueError, WebSocketException) as error:  # ValueError: it is no URL
        raise BadInput(f"task.url={url}: no events are to be had there ({error})") from None
    with socket:
        try:
            # One that needs no key does not look at it, and one that does answers at once.
            socket.send(json.dumps({"type": "auth", "api_key": key or ""}))
            for message in socket:
                yield json.loads(message)
        except ConnectionClosedError as error:
            if error.rcvd is not None and error.rcvd.code in TURNED_AWAY:
                raise BadInput(f"task.url={url}: {error.rcvd.reason}") from None
