"""engine=openai against a small server: the stream, the counts, the start of a server, and all that
goes wrong."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm import BadInput, SamplingParams
from minivllm.analysis.rows import read_rows
from minivllm.bench.metrics.metrics import compute
from minivllm.bench.metrics.validity import Evidence, check
from minivllm.bench.workloads.synthetic import Workload
from minivllm.config.compose import compose
from minivllm.engines.openai import client
from minivllm.engines.openai.engine import OpenAIEngine
from minivllm.engines.openai.stream import Tokens
from tests.engines import fake_server
from tests.engines.driving import requests, run
from tests.engines.in_front import engines

pytest.importorskip("aiohttp")
Make = Callable[..., OpenAIEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """An engine in front of a server with these settings; both end with the test."""
    with engines() as several:

        def build_one(
            knobs: dict[str, Any] | None = None, overrides: tuple[str, ...] = (), **settings: Any
        ) -> Any:
            return several([settings], overrides, knobs or {})

        yield build_one


def workload(*lengths: int) -> Workload:
    return requests([(70, 71, 72)] * len(lengths), lengths)


def test_ids_are_taken_from_the_stream(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    engine = make(path=str(tmp_path / "asked"), step_s=0.01)
    traces = run(engine, workload(6, 3), temperature=0.5, top_p=0.9, seed=1)
    assert [trace.token_ids for trace in traces] == [[5, 6, 7, 8, 9, 10], [5, 6, 7]]
    assert {trace.finish_reason for trace in traces} == {"length"}
    assert len(set(traces[0].token_times)) > 3, "tokens came in lumps"
    assert traces[0].scheduled_s < traces[0].token_times[0] < traces[0].token_times[-1]
    counts = engine.liveness()
    assert counts["engine"] == {
        "requests": 2.0,
        "prompts": "ids",
        "chunks": 9.0,
        "tokens_counted_late": 0.0,
        "prompts_of_other_length": 0.0,
    }
    assert counts["cache"]["cached_prompt_tokens"] == 6
    probe, *asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert probe["max_tokens"] == 1 and {body["key"] for body in asked} == {"Bearer secret"}
    for body in asked:
        assert body["model"] == "small" and body["prompt"] == [70, 71, 72] and body["ignore_eos"]
        assert (body["temperature"], body["top_p"], body["return_token_ids"]) == (0.5, 0.9, True)
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert asked[0]["seed"] != asked[1]["seed"]
    assert engine.info.max_model_len == 512, "the server's, where that is shorter"


def test_a_server_without_ids_is_sent_text_and_counted_at_the_end(make: Make) -> None:
    engine = make(ids=False, per_chunk=4)
    (trace,) = run(engine, workload(10))
    assert len(trace.token_ids) == 10 and trace.status == "ok"
    # Chunks of 4, 4 and 2 count as one token each while they come, the other 7 with the last.
    assert trace.token_times[:2] != [trace.token_times[-1]] * 2
    counts = engine.liveness()["engine"]
    assert (
        counts["tokens_counted_late"] == 7 and counts["chunks"] == 3 and counts["prompts"] == "text"
    )
    assert any("sent as text" in warning for warning in engine.info.warnings)


def test_a_prompt_as_text_keeps_its_special_tokens(make: Make, tmp_path: Path) -> None:
    engine = make({"prompt": "text"}, path=str(tmp_path / "asked"))
    assert engine.tokenizer is not None
    run(engine, requests([(0, *engine.tokenizer.encode("of"), 0)], [2]))
    last = json.loads((tmp_path / "asked").read_text().splitlines()[-1])
    assert last["prompt"] == "<|endoftext|>of<|endoftext|>"


def test_a_server_that_begins_texts_itself_is_not_sent_the_beginning(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make({"prompt": "text"})
    assert engine.tokenizer is not None
    ids, encode = engine.tokenizer.encode("of"), engine.tokenizer.encode
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text: [0, *encode(text)])
    assert engine._bodies.server_text([0, *ids]) == engine._bodies.server_text(ids) == "of"
    assert engine._bodies.server_text([0, 0, *ids]) == "<|endoftext|>of"


def test_text_is_not_fallen_back_to_where_ids_are_wanted(make: Make) -> None:
    with pytest.raises(BadInput, match=r"rejects requests.*prompt must be a string"):
        make({"prompt": "ids"}, ids=False)


def test_a_server_that_refuses_is_told_before_anything_is_measured(make: Make) -> None:
    with pytest.raises(BadInput, match="HTTP 400: this model is not for you"):
        make(fault="refuse")


def test_a_server_that_gives_no_reason_for_an_end_is_told_before_anything_is_measured(
    make: Make,
) -> None:
    with pytest.raises(BadInput, match=r"rejects requests.*closed the stream before it was done"):
        make(fault="endless")


@pytest.mark.parametrize(
    ("fault", "message"),
    [("die", "closed the stream before it was done"), ("error", "the GPU fell off")],
)
def test_a_stream_that_breaks_off_is_a_request_that_failed(
    make: Make, fault: str, message: str
) -> None:
    (trace,) = run(make(fault=fault), workload(8))
    assert trace.status == "aborted" and message in str(trace.error)
    assert len(trace.token_ids) == 4


def test_reset_drops_what_is_under_way(make: Make, tmp_path: Path) -> None:
    engine = make(
        {"cache_reset": "/flush"}, reset="/flush", path=str(tmp_path / "asked"), step_s=0.02
    )
    assert not any("prefix cache was not emptied" in warning for warning in engine.info.warnings)
    engine.submit("long", [70], SamplingParams(max_tokens=400, ignore_eos=True))
    assert engine.poll(20)
    engine.reset()
    assert engine.poll(0.1) == []
    assert (tmp_path / "asked").read_text().count('"at": "/flush"') == 2
    assert [trace.token_ids for trace in run(engine, workload(2))] == [[5, 6]]


@pytest.mark.parametrize("ids", [True, False])
def test_a_later_turn_needs_the_ids_of_the_answer(make: Make, ids: bool) -> None:
    """Without them its prompt would hold zeros in the place of what was said."""
    engine = make(ids=ids)
    first = workload(3).requests[0]
    later = replace(first, request_id="later", follows=first.request_id, think_s=0.0)
    talk = Workload((first, later))
    if ids:
        assert [trace.completed for trace in run(engine, talk)] == [True, True]
    else:
        with pytest.raises(BadInput, match=r"^the prompt of later holds the answer to .*no token"):
            run(engine, talk)


def test_a_request_is_checked_without_being_sent(make: Make, tmp_path: Path) -> None:
    """What a server has seen is in its prefix cache."""
    engine = make(path=str(tmp_path / "asked"))
    before = (tmp_path / "asked").read_text()
    engine.require_servable("r0", [70, 71, 72], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(BadInput, match="leaves no room for output"):
        engine.require_servable("r0", [70] * 600, SamplingParams(max_tokens=3))
    engine.reset()
    assert (tmp_path / "asked").read_text() == before


@pytest.mark.parametrize(("connections", "waiting"), [(2, 6), (8, 0)])
def test_what_waits_in_the_client_is_said(make: Make, connections: int, waiting: int) -> None:
    engine = make({"max_connections": connections}, step_s=0.01)
    work = workload(*[3] * 8)
    traces = run(engine, work)
    stream = engine.liveness()["stream"]
    assert stream["requests_queued_in_client"] == waiting
    notes = check(Evidence(traces, work, compute(traces, {}, 8), liveness=engine.liveness())).notes
    words = f"of 8 requests waited .* in the client for one of engine.max_connections={connections}"
    assert any(re.search(words, note) for note in notes) == bool(waiting)
    engine.reset()
    assert engine.liveness()["stream"]["requests_queued_in_client"] == 0


def test_a_cache_that_cannot_be_emptied_is_noted(make: Make) -> None:
    assert any("engine.cache_reset" in warning for warning in make().info.warnings)
    with pytest.raises(BadInput, match="HTTP 404"):
        make({"cache_reset": "/nowhere"})


def test_a_server_that_says_that_its_cache_was_left_is_asked_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    make({"cache_reset": "/flush"}, reset="/flush", path=str(asked), kept=2)
    assert asked.read_text().count('"at": "/flush"') == 3
    monkeypatch.setattr(client, "EMPTYING_S", 0.01)
    with pytest.raises(BadInput, match=r'did not empty its prefix cache.*{"success": false}'):
        make({"cache_reset": "/flush"}, reset="/flush", kept=1000)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"url": "http://127.0.0.1:9/v1"}, "no server answers there"),
        ({"model": "large"}, "does not serve it; it serves small"),
        ({"command": ""}, "engine.command is empty"),
        ({"command": "no-such-program --port 1"}, "there is no program no-such-program"),
    ],
)
def test_a_server_that_is_not_there(make: Make, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make(knobs)


@pytest.mark.parametrize(
    "override", ["quant=nf4", "batching.max_num_seqs=2", "runtime.threads=2", "decoding.top_k=5"]
)
def test_what_only_the_server_decides_is_refused(make: Make, override: str) -> None:
    with pytest.raises(BadInput, match=r"is not supported by engine=openai"):
        make(overrides=(override,))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(**settings: Any) -> dict[str, Any]:
    port = settings.setdefault("port", free_port())
    words = f"{sys.executable} {fake_server.__file__} '{json.dumps(settings)}'"
    return {"url": f"http://127.0.0.1:{port}/v1", "command": words}


def test_a_server_is_started_waited_for_and_stopped(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = make(command(delay_s=1.5), ("runtime.threads=2",))
    assert engine._child is not None
    process = psutil.Process(engine._child.process.pid)
    assert engine.info.load_s > 1
    (trace,) = run(engine, workload(3))
    assert trace.status == "ok"
    engine._child.stop(5)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert "starting up" in capfd.readouterr().err


def test_a_server_that_never_answers(make: Make) -> None:
    with pytest.raises(
        BadInput, match=r"did not answer within engine.start_timeout_s=5 .*starting up"
    ):
        make({**command(delay_s=600), "start_timeout_s": 5.0})


def test_a_server_that_ends_while_it_starts(make: Make) -> None:
    with pytest.raises(
        BadInput, match=r"exit code 4; it printed last: starting up \| no GPU found"
    ):
        make(command(fault="exit"))


def test_a_server_that_is_killed_ends_the_measurement(make: Make) -> None:
    engine = make(command(step_s=0.05))
    assert engine._child is not None
    engine.submit("a", [70], SamplingParams(max_tokens=400, ignore_eos=True))
    assert engine.poll(20)
    engine._child.process.kill()
    outputs = []
    with pytest.raises(RuntimeError, match="exit code -9"):
        while True:
            outputs += engine.poll(5)
    assert outputs[-1].finish_reason == "abort"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(BadInput, match=r"engine\.url"):
        compose(["engine=openai", f"engine.url={url}"])


def test_tokens_of_one_stream_are_never_delivered_after_its_end() -> None:
    outputs: list[Any] = []
    tokens = Tokens("a", outputs.append)
    tokens.take({"choices": [{"text": "x", "token_ids": [1, 2]}]})
    tokens.take({"choices": [{"text": "", "token_ids": [], "finish_reason": "content_filter"}]})
    tokens.end()
    tokens.fail("too late")
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [((1, 2), None), ((), "abort")]
    assert outputs[1].error == "content_filter"


@pytest.mark.parametrize("here", [True, False])
def test_a_cell_from_the_command_line(cli: Any, here: bool) -> None:
    """Its energy is nobody's to read here, and no other device is like its own, unless it is said
    to be this one."""
    # long beside what a busy machine takes to submit
    server, url = fake_server.in_thread(step_s=0.05)
    result = cli(
        *(
            "engine=openai",
            f"engine.url={url}",
            "name=peer",
            f"runtime.device={'cpu' if here else 'auto'}",
        ),
        *(
            "workload=smoke",
            "workload.num_requests=4",
            "workload.input_len=20",
            "workload.output_len=8",
        ),
    )
    server.shutdown()
    assert result.code == 0, result.err
    (path,) = Path("runs/peer").glob("*/record.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok" and record["metrics"]["output_tokens"] == 32
    assert record["metrics"]["queue_ms"]["n"] == 0 and record["breakdown"]["steps"] == 0
    device = record["provenance"]["device"]
    assert (device["name"] == f"server at {url}") != here and (device["kind"] == "server") != here
    assert ("may be another machine" in str(record["energy"]["reason"])) != here


def judged(engine: OpenAIEngine, load: Workload) -> tuple[Any, Any]:
    """The figures of a load, and whether they may be quoted."""
    traces = run(engine, load)
    figures = compute(traces, {}, 8)
    return figures, check(Evidence(traces, load, figures, liveness=engine.liveness()))


@pytest.mark.parametrize("continuous", ["usage", "timings"])
def test_a_server_that_counts_on_each_chunk_is_asked_to(
    make: Make, tmp_path: Path, continuous: str
) -> None:
    engine = make(
        ids=False, per_chunk=5, step_s=0.05, continuous=continuous, path=str(tmp_path / "asked")
    )
    figures, verdict = judged(engine, workload(20))
    # Five tokens come every 50 ms or more; none of three pauses is longer than the whole.
    assert figures.output_tokens == 20 and 5 < figures.itl_ms.p50 < figures.e2e_ms.mean / 5
    counts = engine.liveness()
    assert counts["engine"]["tokens_counted_late"] == counts["stream"]["tokens_misplaced"] == 0
    # The fake counts characters as tokens of the prompt.
    assert [reason for reason in verdict.reasons if "prompt tokens" not in reason] == []
    last = json.loads((tmp_path / "asked").read_text().splitlines()[-1])
    assert last["stream_options"].get("continuous_usage_stats", False) == (continuous == "usage")
    assert last.get("timings_per_token", False) == (continuous == "timings")


def test_a_server_that_refuses_to_count_is_not_asked_again(make: Make, tmp_path: Path) -> None:
    engine = make(ids=False, continuous="strict", path=str(tmp_path / "asked"))
    (trace,) = run(engine, workload(5))
    assert trace.status == "ok"
    last = json.loads((tmp_path / "asked").read_text().splitlines()[-1])
    assert last["stream_options"] == {"include_usage": True} and "timings_per_token" not in last


def test_tokens_that_cannot_be_counted_or_placed_are_not_ok(make: Make) -> None:
    load = requests([(70, 71, 72)], (40,), ignore_eos=False)
    _, verdict = judged(make(ids=False, per_chunk=5, usage=False), load)
    assert not verdict.ok and "the number of tokens is unknown" in str(verdict.reasons)
    engine = make(ids=False, per_chunk=5)
    engine.tokenizer.encode = lambda *_: [0]  # type: ignore[method-assign,union-attr]
    figures, verdict = judged(engine, load)
    assert figures.output_tokens == 40 and "the arrival time is unknown" in str(verdict.reasons)


def test_the_end_of_a_request_is_its_last_token(make: Make) -> None:
    figures, verdict = judged(make(end_s=1.5, step_s=0.02), workload(5, 5))
    assert figures.e2e_ms.mean < 1500 and verdict.reasons == []
    assert any("after their last token on average" in note for note in verdict.notes)


def test_a_prompt_that_the_server_counts_otherwise_is_other_work(make: Make) -> None:
    _, verdict = judged(make(extra_prompt=1), workload(3, 3))
    assert [reason[:64] for reason in verdict.reasons] == [
        "the server counts 8 prompt tokens where 6 were meant, in 2 of 2 "
    ]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (["data: {not json\n\n"], "not valid JSON"),
        (["data: \xff\xfe\x00\n\n"], "not UTF-8"),
        (["data: " + "[" * 100_000 + "\n\n"], "nested too deeply"),
        ([{"choices": "abc"}], "choices is 'abc'"),
        ([{"error": {"message": "\x1b[31mgone\x1b[0m"}}], "tokens: gone"),
        (
            [
                {
                    "choices": [{"text": "a", "finish_reason": "length"}],
                    "usage": {"completion_tokens": 10**9},
                }
            ],
            "1000000000",
        ),
        ([{"choices": [{"text": "a"}]}, "..."], "the stream holds"),
        (["A" * (1 << 20), "..."], "a line of the stream is longer than 8 MiB"),
        ([": still here\n\n", "..."], "no token of any request for engine.idle_timeout_s=3 s"),
        ([{"choices": []}, "..."], "no token of any request"),
        (["silence"], "no token of any request"),
        ([], "closed the stream before it was done"),
    ],
)
def test_what_a_stream_may_hold_instead_of_tokens(
    make: Make, events: list[Any], message: str
) -> None:
    patience_s = 3.0 if "no token" in message else 60.0
    (trace,) = run(make({"idle_timeout_s": patience_s}, events=events), workload(8))
    assert trace.status == "aborted" and message in str(trace.error)
    assert (
        "\x1b" not in str(trace.error)
        and "\n" not in str(trace.error)
        and len(str(trace.error)) < 500
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"models": "[1, 2]"}, "lists no model"),
        ({"models": '{"data": null}'}, "lists no model"),
        ({"models": '{"data": [{"x": 1}]}'}, "no model with an id"),
        ({"models": '{"data": [{"id": "m", "max_model_len": -5}]}'}, "max_model_len=-5"),
        ({"models": "<html>"}, "not valid JSON"),
        ({"models": "endless"}, "longer than 4 MiB"),
        ({"redirect": "http://localhost:1/v1/models"}, "redirects to http://localhost:1/v1/models"),
    ],
)
def test_what_a_server_may_list_instead_of_models(
    make: Make, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=rf"no server answers there as it should .*{said}"):
        make(**settings)


def test_a_probe_that_gets_no_answer_has_an_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.engines.openai.engine.PATIENCE_S", 0.5)
    with pytest.raises(BadInput, match=r"no whole answer to a request for 1 token within 0\.5 s"):
        make(step_s=5.0)


def test_a_record_and_its_page_say_only_what_is_known_of_the_server(cli: Any) -> None:
    """No precision, batching, cache, memory or threads of this side, and the server's own name of
    the model."""
    server, url = fake_server.in_thread()
    load = ("workload.num_requests=2", "workload.input_len=4", "workload.output_len=4")
    done = cli("engine=openai", f"engine.url={url}", *load, "name=served")
    server.shutdown()
    assert done.code == 0, done.err
    (folder,) = (path.parent for path in Path("runs/served").glob("*/record.json"))
    record = json.loads((folder / "record.json").read_text())
    assert folder.name == f"openai-{record['run_id']}" and record["arm"] == "openai"
    assert record["served_model"] == "small" and record["weights"] is None
    memory = record["memory"]
    assert "server's memory is not known" in memory.pop("reason") and set(memory.values()) == {None}
    assert record["config"]["quant"]["dtype"] == "bfloat16", "the configuration is whole"
    (row,) = read_rows(folder)[0]
    assert row["choices.model"] == "small" and row["provenance.threads"] is None
    unsaid = ("quant", "pruning", "attention", "batching", "cache", "speculative", "parallel")
    assert not [key for key in row if key.startswith(tuple(f"config.{name}." for name in unsaid))]
    assert not [name for name in unsaid if f"choices.{name}" in row]
    page = Path("reports/served/index.html").read_text()
    assert "<title>How fast is small · openai?" in page
    for word in ("bf16", "continuous", "tiny", "Host peak", "bfloat16", "PagedCache"):
        assert word not in page + done.out, word
