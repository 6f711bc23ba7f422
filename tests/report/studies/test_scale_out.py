"""The section on several replicas: there only beside an engine alone, and true about both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minivllm.bench.records.record import Record
from minivllm.report.inputs import ReportInputs, read
from minivllm.report.studies.scale_out import (
    HEADINGS,
    ScaleOutStudy,
    headings,
    rows,
    scaled_loads,
    statements,
)
from tests.report.pagereader import build
from tests.report.synthetic import make_record, make_sweep, write

STUDY = ScaleOutStudy()


def served(
    replicas: int,
    block: int,
    speed: float,
    hits: float | None = None,
    router: str = "least_tokens",
    places: str = "0 | 1",
) -> Record:
    record = make_record("nf4", "continuous", block, 0)
    record.config["parallel"] = {"replicas": replicas, "router": router}
    record.config["cache"]["num_blocks"] = 400 // replicas
    record.arm = f"parallel.replicas={replicas},parallel.router={router}"
    record.cell_id, record.position = f"c{replicas}{router}", replicas
    record.run_id = f"{block}{replicas}{router}"[:12].ljust(12, "0")
    assert record.metrics is not None
    record.metrics.output_tokens_per_s = speed
    record.liveness = {}
    if hits is not None:
        cache = {"prefix_tokens_reused": 1000 * hits, "prefix_tokens_looked_up": 1000.0}
        record.liveness["cache"] = cache
    if replicas > 1:
        record.liveness["parallel"] = {"requests": "3 | 5", "placed_at": places}
    return record


def inputs_of(folder: Path, records: list[Record]) -> ReportInputs:
    write(folder / "runs", records)
    return read(folder / "runs")


def test_nothing_of_it_without_several_replicas(tmp_path: Path) -> None:
    page, _ = build(tmp_path, make_sweep(1))
    assert 'id="scale_out"' not in page.source


def test_speed_is_compared_with_one_replica_of_the_same_load(tmp_path: Path) -> None:
    records = [served(1, block, 100.0 + block) for block in range(4)]
    records += [served(2, block, 180.0 + block) for block in range(4)]
    inputs = inputs_of(tmp_path, records)
    (load,) = scaled_loads(inputs.cells)
    one, two = load.cells
    assert one.speedup is None and one.router == "–" and two.router == "least_tokens"
    assert two.speedup is not None and two.speedup.ratio == pytest.approx(181.5 / 101.5, 0.01)
    assert two.efficiency == pytest.approx(two.speedup.ratio / 2)
    (line,) = statements([load])
    assert re.match(r"2 replicas on 2 devices gave 1\.79× \(1\.\d+ to 1\.\d+\) the output", line)
    assert "89.4 % for each device" in line
    assert rows(load)[1][-2:] == ["3 | 5", "0 | 1"]
    assert rows(load)[1][HEADINGS.index("communication (%)")] == "–"
    assert "1.79×" in STUDY.files([load], inputs)["scale_out.md"]


def test_replicas_that_share_cores_have_no_efficiency(tmp_path: Path) -> None:
    records = [served(1, 0, 100.0), served(2, 0, 120.0, places="cpu | cpu")]
    (load,) = scaled_loads(inputs_of(tmp_path, records).cells)
    assert load.cells[1].efficiency is None and statements([load]) == []


def test_servers_of_others_stand_in_the_same_table(tmp_path: Path) -> None:
    records = [served(1, 0, 100.0), served(1, 0, 190.0)]
    for number, record in enumerate(records):
        urls = [f"http://gpu{n}:8000/v1" for n in range(number + 1)]
        del record.config["cache"]["num_blocks"]
        record.config["parallel"] = {}
        record.config["engine"] = {"url": urls, "router": "session"}
        record.arm = f"engine.url={len(urls)}"
        record.cell_id, record.run_id = f"url{number}", f"{number}".ljust(12, "0")
        record.liveness["stream"] = {"prompt_tokens_counted": 100.0}
        record.liveness["cache"] = {"cached_prompt_tokens": 40.0}
    records[1].liveness["parallel"] = {
        **{"replicas": 2.0, "requests": "3 | 5", "failures": "0 | 1", "hit_rate": "0.5 | 0.3"},
        "placed_at": "http://gpu0:8000/v1 | http://gpu1:8000/v1",
    }
    (load,) = scaled_loads(inputs_of(tmp_path, records).cells)
    one, two = rows(load)
    assert headings(load)[len(HEADINGS) :] == ["failures by replica", "hit rate by replica"]
    assert (one[0], two[0], two[2], two[-2:]) == ("1", "2", "session", ["0 | 1", "0.5 | 0.3"])
    assert one[-2:] == ["–", "–"] and two[HEADINGS.index("efficiency (%)")] == "–"
    assert two[HEADINGS.index("hit rate (%)")] == "40.0"
    assert two[HEADINGS.index("requests by replica")] == "3 | 5"


def test_hit_rates_are_those_of_one_engine_with_all_blocks(tmp_path: Path) -> None:
    records = [served(1, 0, 100.0, 0.8), served(2, 0, 90.0, 0.3, "round_robin", "cpu | cpu")]
    records.append(served(2, 1, 95.0, 0.76, "prefix_aware", "cpu | cpu"))
    page, _ = build(tmp_path / "page", records)
    assert 'id="scale_out"' in page.source
    inputs = inputs_of(tmp_path, records)
    found = STUDY.find(inputs)
    assert found is not None
    assert statements(found) == [
        "Of one engine's hit rate of 80.0 %, 2 replicas kept: round_robin 37.5 % and "
        "prefix_aware 95.0 %."
    ]


def with_blocks(record: Record, num_blocks: int) -> Record:
    """The same cell with another cache."""
    record.config["cache"]["num_blocks"] = num_blocks
    record.arm = f"{record.arm},cache.num_blocks={num_blocks}"
    record.cell_id = f"{record.cell_id}{num_blocks}"
    record.run_id = f"{num_blocks}{record.run_id}"[:12]
    return record


def test_the_engine_alone_has_the_blocks_of_all_replicas_or_of_one(tmp_path: Path) -> None:
    records = [with_blocks(served(1, 0, 100.0, 0.4), 101), with_blocks(served(1, 0, 1.0, 0.8), 201)]
    records += [with_blocks(served(2, 0, 150.0, 0.6), 101)]
    (load,) = scaled_loads(inputs_of(tmp_path / "all", records).cells)
    assert [one.cell.first("config.cache.num_blocks") for one in load.cells] == [201, 101]
    assert load.cells[1].kept == pytest.approx(0.75)
    records += [with_blocks(served(4, 0, 200.0, 0.2, "session"), 101)]
    found = scaled_loads(inputs_of(tmp_path / "one", records).cells)
    assert [load.name for load in found] == ["cache.num_blocks=201", "cache.num_blocks=101"]
    assert statements(found)[-1] == (
        "cache.num_blocks=101: of one engine's hit rate of 40.0 %, 4 replicas kept: session 50.0 %."
    )


@pytest.mark.parametrize(
    ("replicas", "ranks", "places", "efficiency"),
    [
        (1, 2, "0,1", 0.75),
        (1, 2, "0", None),  # the ranks share a core
        (2, 2, "0 | 1", None),
        (2, 2, "0,1 | 2,3", 0.375),
        (2, 2, "cuda:0,1 | cuda:2,5", 0.375),
        (2, 1, "cpu | cpu", None),
    ],
)
def test_ranks_are_devices_and_communicate(
    replicas: int, ranks: int, places: str, efficiency: float | None, tmp_path: Path
) -> None:
    several = served(replicas, 0, 150.0, places=places)
    several.config["parallel"]["tensor"] = ranks
    several.cell_id, several.arm = "ranks", f"parallel.tensor={ranks}"
    several.run_id = "0".ljust(12, "f")
    several.liveness["parallel"] = {"placed_at": places}
    assert several.breakdown is not None
    several.breakdown.collective_share = 0.25
    (load,) = scaled_loads(inputs_of(tmp_path, [served(1, 0, 100.0), several]).cells)
    found = load.cells[1]
    assert found.devices == replicas * ranks
    assert found.efficiency == (None if efficiency is None else pytest.approx(efficiency))
    assert rows(load)[1][HEADINGS.index("communication (%)")] == "25.0"
