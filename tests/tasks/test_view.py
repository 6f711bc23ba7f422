"""task=view from the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.events import write_events
from minivllm.bench.records.record import RecordedEvents
from minivllm.tasks.view import events_url
from tests.report.synthetic import make_record, write
from tests.report.view.recording import ENGINE

BUNDLES: list[dict[str, Any]] = [
    {
        "time_s": 1.0,
        "end_s": 1.0,
        "engine": ENGINE,
        "num_waiting": 0,
        "num_used_blocks": 0,
    },
    {
        "step": 0,
        "time_s": 1.1,
        "end_s": 1.2,
        "new": [[0, "first", 6, 10, 0, 1.05, None]],
        "states": [[1.1, 0, "prefill", None]],
        "scheduled": [[0, 0, 4, "budget"]],
        "sizes": [[0, 6, 4]],
        "tables": [[0, 0, [1]]],
        "num_waiting": 0,
        "num_used_blocks": 1,
    },
]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A sweep of two records, the first with events."""
    events = RecordedEvents(len(BUNDLES), 0, 1.7e9)
    records = [make_record(sweep="old", run_id="0", events=events, arm="default")]
    records.append(make_record(sweep="old", run_id="1"))
    folder = write(tmp_path / "records", records, parquet=False)
    (seen,) = folder.glob("*-0")
    write_events(seen, [json.dumps(bundle).encode() for bundle in BUNDLES])
    return folder


def test_a_page_is_written_for_each_run_with_events(cli: Callable[..., Any], runs: Path) -> None:
    done = cli("task=view", f"runs=[{runs}]", "view.trace=true", "name=seen")
    page, trace = "view-nf4-continuous-0.html", "view-nf4-continuous-0.trace.json"
    assert (
        done.code == 0 and done.out == f"view: reports/seen/{page}\ntrace: reports/seen/{trace}\n"
    )
    assert done.err == "left out: 1 record measured without measure.events=true\n"
    text = (Path("reports/seen") / page).read_text()
    assert "<title>old</title>" in text
    events = json.loads((Path("reports/seen") / trace).read_text())["traceEvents"]
    assert {"step 0", "first", "prefill"} <= {event["name"] for event in events}


def test_a_run_without_events_names_the_knob(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "records", [make_record(sweep="old", run_id="1")], parquet=False)
    done = cli("task=view", f"runs=[{folder}]")
    assert done.code == 2 and done.err.count("\n") == 1
    assert "has events: measure again with measure.events=true" in done.err


def test_one_run_is_shown_in_the_terminal(cli: Callable[..., Any], runs: Path) -> None:
    done = cli("task=view", f"runs=[{runs}]", "view.tui=true")
    assert done.code == 0 and "old  step 0  1 running" in done.out and not Path("reports").exists()
    (seen,) = runs.glob("*-0")
    write_events(next(runs.glob("*-1")), [json.dumps(BUNDLES[0]).encode()])
    done = cli("task=view", f"runs=[{runs}]", "view.tui=true")
    assert done.code == 2 and f"name one, such as 'runs=[{seen}]'" in done.err


def test_damaged_events_are_one_line(cli: Callable[..., Any], runs: Path) -> None:
    (path,) = runs.glob("*/events.jsonl.zst")
    path.write_bytes(path.read_bytes()[:-4])
    done = cli("task=view", f"runs=[{runs}]")
    assert done.code == 2 and str(path) in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.url=ftp://x"], "must begin with ws://, wss://, http:// or https://"),
        (["task.url=http://x"], "add view.tui=true"),
        (["task.url=ws://x"], "add view.tui=true"),
        (["task.url=ws://x", "view.tui=true", "runs=[a]"], "leave out runs"),
        (["task.url=http://127.0.0.1:1", "view.tui=true"], "no events are to be had"),
        (["task.url=ws://127.0.0.1:1/ws/events", "view.tui=true"], "no events are to be had"),
        (["task.url=ws://127.0.0.1:99999/x", "view.tui=true"], "no events are to be had"),
        (["task.url='ws://['", "view.tui=true"], "no events are to be had"),
        (["task.url=ws://:1", "view.tui=true"], "no events are to be had"),
        (["view.speed=0"], "view.speed"),
        ([], "runs is empty"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    cli: Callable[..., Any], overrides: list[str], message: str
) -> None:
    done = cli("task=view", *overrides)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1
    assert not done.out


@pytest.mark.parametrize(
    ("url", "events"),
    [
        ("http://host:8000", "ws://host:8000/ws/events"),
        ("https://host/v1/", "wss://host/ws/events"),
        ("ws://host:1/", "ws://host:1/ws/events"),
        ("wss://host/proxy/ws/events?a=b", "wss://host/proxy/ws/events?a=b"),
    ],
)
def test_the_address_of_a_server_leads_to_its_events(url: str, events: str) -> None:
    assert events_url(url) == events


@pytest.mark.parametrize("key", ["abcdef123", None])
def test_a_running_server_is_shown_until_it_ends(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """A server of the same form as ours, with a key."""
    from websockets.sync.server import ServerConnection, serve

    def answer(socket: ServerConnection) -> None:
        if json.loads(socket.recv()) == {"type": "auth", "api_key": "abcdef123"}:
            socket.send(json.dumps(BUNDLES))
        else:
            socket.close(1008, "a key is needed")

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    with serve(answer, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws/events"
        done = cli("task=view", f"task.url={url}", "view.tui=true")
        server.shutdown()
        thread.join()
    if key is None:
        said = f"error: task.url={url}: a key is needed\n"
        assert (done.code, done.out, done.err) == (2, "", said)
    else:
        assert done.code == 0 and f"{url}  step 0  1 running" in done.out, done.err
        assert "the server has closed the connection" in done.err
