"""Engines that lie, each measured as a sweep measures it: what the record or the report says of the
lie, and does not say of the same run without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cells import gather
from minivllm.analysis.rows import Row
from minivllm.bench import supervisor
from minivllm.bench.hardware import clock as clocks
from minivllm.bench.records import identity, storage
from minivllm.bench.records.reading import flatten
from minivllm.bench.records.record import Validity
from minivllm.bench.session import Session
from minivllm.config.compose import compose
from minivllm.report.verdict import verdict
from tests.bench.test_supervisor import make_config, record_of
from tests.engines.fake_server import in_thread
from tests.forked import fork_known

Change = Callable[[Path], None]


def config_of(kind: str, knobs: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    """A configuration of four requests on one of the engines that lie, or on the honest one."""
    load = {"num_requests": 4, "input_len": 16, "output_len": 8}
    parts = {"workload": load, "measure": {"roofline": False}, **parts}
    config = {**make_config(), "cache": {}}
    for group, values in parts.items():
        config[group] = {**config[group], **values}
    config["engine"] = {"_target_": f"tests.bench.lying.{kind}", **(knobs or {})}
    return config


def measured(
    folder: Path,
    *configs: dict[str, Any],
    blocks: int = 1,
    isolated: bool = False,
    between: Change = lambda folder: None,
) -> list[dict[str, Any]]:
    """Records of the configurations' blocks, in the order in which sweeps make them.

    Args:
        folder: for records.
        configs: one an arm.
        blocks: of each.
        isolated: a session for each block, as `measure.isolation=run` has it.
        between: what happens to the folder after each block.
    """
    records = []
    for place, config in enumerate(configs):
        arm = identity.expand(config, "s", f"arm{place}", folder / "runs", "f", place, blocks)
        session = None
        for measurement in arm:
            storage.prepare(measurement.path, measurement.config)
            session = session or Session(config, lambda event, **details: None)
            record = session.measure(measurement).record.to_dict()
            facts = {"started_at": f"2026-01-01T00:{measurement.block:02}:{place:02}+0000"}
            record["provenance"] = {**(record["provenance"] or {}), **facts}
            records.append(record)
            between(folder)
            if isolated or measurement is arm[-1]:
                session.close()
                session = None
    return records


def validity(record: dict[str, Any]) -> Validity:
    return Validity(**record["validity"])


def said(records: list[dict[str, Any]]) -> str:
    """The report's verdict on the records."""
    rows: list[Row] = [flatten(record) for record in records]
    found = verdict(gather(rows))
    return " ".join([found.headline, *found.lines])


@pytest.mark.parametrize(
    ("kind", "knobs", "words"),
    [
        ("LongAnswers", {}, "4 outputs are not as long as asked"),
        ("RememberedAnswers", {}, "answers came from elsewhere than its steps"),
        ("CutPrompts", {}, "the engine computed 16 prompt tokens and found 0 in its prefix cache"),
    ],
)
def test_a_lie_about_the_work_makes_the_record_invalid(
    tmp_path: Path, kind: str, knobs: dict[str, Any], words: str
) -> None:
    (honest,) = measured(tmp_path / "honest", config_of("CountingEngine"))
    assert validity(honest).ok and not validity(honest).reasons
    (lie,) = measured(tmp_path / "lie", config_of(kind, knobs))
    seen = validity(lie)
    assert not seen.ok and any(words in reason for reason in seen.reasons)


@pytest.mark.parametrize(
    ("kind", "knobs", "words"),
    [
        ("Bursts", {}, "tokens came 4.0 at a time, 32 at 8 moments"),
        (
            "CountingEngine",
            {"cached": 12},
            "the prefix cache was not cold: 48 of 64 prompt tokens came from it",
        ),
        ("MadeUpHits", {}, "it computed some twice, or found fewer"),
        ("Keeper", {"simulated": True}, "it keeps prompts or answers"),
    ],
)
def test_a_lie_about_how_it_was_done_is_a_note(
    tmp_path: Path, kind: str, knobs: dict[str, Any], words: str
) -> None:
    honest = measured(tmp_path / "honest", config_of("CountingEngine"))
    lie = measured(tmp_path / "lie", config_of(kind, knobs))
    told = [" ".join(validity(record).notes) for (record,) in (honest, lie)]
    assert words in told[1] and words not in told[0]


def test_more_tokens_than_text_are_a_note(tmp_path: Path) -> None:
    """A server counts a token in each chunk, of which every fourth alone has text."""
    told = []
    for lies in (False, True):
        chunks = [{"text": " a" if i % 4 == 0 or not lies else ""} for i in range(8)]
        chunks[-1]["finish_reason"] = "length"
        usage = {"prompt_tokens": 16, "completion_tokens": 8}
        events = [*({"choices": [chunk]} for chunk in chunks), {"choices": [], "usage": usage}]
        server, url = in_thread(events=events, step_s=0)
        load = [f"workload.{knob}" for knob in ("num_requests=4", "input_len=16", "output_len=8")]
        config = compose(["engine=openai", f"engine.url={url}", "measure.roofline=false", *load])
        (record,) = measured(tmp_path / str(lies), config)
        server.shutdown()
        server.server_close()
        told.append(" ".join(validity(record).notes))
    assert "the server counts 32 tokens in answers whose text has 8" in told[1]
    assert "more tokens than text" not in told[0]


def coarse_clock(tick_s: float) -> Iterator[float]:
    """Readings of a clock that shows each value three thousand times."""
    reads = 0
    while True:
        reads += 1
        yield tick_s * (reads // 3000)


def test_a_coarse_clock_makes_the_record_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "the clock moves every 100 ms, and a time below 20 of its ticks is no reading"
    (honest,) = measured(tmp_path / "honest", config_of("CountingEngine"))
    assert not any("the clock moves" in reason for reason in validity(honest).reasons)
    readings = coarse_clock(0.1)
    monkeypatch.setattr(clocks.Clock, "now", staticmethod(lambda: next(readings)))
    (lie,) = measured(tmp_path / "lie", config_of("CountingEngine"))
    assert any(words in reason for reason in validity(lie).reasons)


def test_memory_that_is_made_up_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor saw how much was resident."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    fork_known(monkeypatch)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    told = []
    for kind in ("CountingEngine", "MadeUpMemory"):
        plan = identity.expand(config_of(kind), "s", kind, tmp_path / "runs", "f")
        supervisor.run(plan)
        told.append(json.dumps(record_of(plan[0])["validity"]["notes"]))
    words = "the engine says that its weights take 64 GB, and no more than "
    assert words in told[1] and words not in told[0]


def overwrite(folder: Path) -> None:
    """Change a byte that a fingerprint of each tensor's beginning does not see."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


CACHE_ON = {"cache": {"prefix_caching": True}}


@pytest.mark.parametrize(
    ("kind", "arms", "words"),
    [
        (
            "SlowAtFirst",
            [({"simulated": True}, {})],
            "the first block lies apart from the others, 2.00 against 4.00 output tokens/s",
        ),
        (
            "UnreadKnob",
            [({"turbo": False}, {}), ({"turbo": True}, {})],
            "Not counted: engine.turbo=true in ",
        ),
        (
            "TurnsAnother",
            [({}, {}), ({}, CACHE_ON)],
            "Moved although nobody set it: batching.largest_batch is 1 against 4 in ",
        ),
        (
            "OneSetting",
            [({}, {"cache": {"offload_gb": size}}) for size in (0, 2, 4)],
            "they may have run as one configuration",
        ),
    ],
)
def test_a_lie_that_several_records_show_is_in_the_verdict(
    tmp_path: Path, kind: str, arms: list[tuple[dict[str, Any], dict[str, Any]]], words: str
) -> None:
    told = []
    for engine in ("Honest", kind):
        configs = [config_of(engine, knobs, **parts) for knobs, parts in arms]
        told.append(said(measured(tmp_path / engine, *configs, blocks=3)))
    assert words in told[1] and words not in told[0]


def test_weights_that_change_between_blocks_are_in_the_verdict(tmp_path: Path) -> None:
    config = config_of("OnDisk", model={"path": str(tmp_path)})
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    words = "The weights changed between blocks of "
    assert words not in said(measured(tmp_path, config, blocks=2, isolated=True))
    assert words in said(measured(tmp_path, config, blocks=2, isolated=True, between=overwrite))
