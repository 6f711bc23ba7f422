"""The section on agents' jobs: there only for sessions, and true about the cliff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.feature_figures import JobFigures
from minivllm.bench.records.figures import Percentiles
from minivllm.bench.records.record import Record
from minivllm.report.inputs import ReportInputs, read
from minivllm.report.studies.agents import AgentsStudy, cliffs, ladders
from tests.report.pagereader import build
from tests.report.synthetic import make_record, make_sweep, write

STUDY = AgentsStudy()


def working(blocks: int, hit: float | None, index: int = 0, caching: bool = True) -> Record:
    figures = JobFigures(
        sessions=8,
        num_jobs=8,
        latency_s=Percentiles(mean=5.25, n=8),
        jobs_per_hour=2400.0,
        hit_rate=hit,
        optimal_hit_rate=0.8,
        live_tokens=6500,
    )
    record = make_record("nf4", "continuous", 0, index, jobs=figures)
    record.config["cache"] |= {"num_blocks": blocks, "prefix_caching": caching}
    record.arm = f"cache.num_blocks={blocks},{caching}"
    record.run_id, record.cell_id = f"{index}".ljust(12, "0"), f"c{index}"
    record.position = index
    return record


def inputs_of(folder: Path, records: list[Record]) -> ReportInputs:
    write(folder / "runs", records)
    return read(folder / "runs")


def test_nothing_of_it_without_sessions(tmp_path: Path) -> None:
    page, _ = build(tmp_path, make_sweep(1))
    assert 'id="agents"' not in page.source


def test_a_lone_run_is_told_in_one_line(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path, [working(513, 0.75)])
    found = STUDY.find(inputs)
    assert found is not None and STUDY.tables(found, inputs) == []
    assert STUDY.statements(found, inputs) == [
        "8 jobs of 8 sessions: 5.25 s a job, 2,400 an hour; the prefix cache had 75.0 % of the "
        "prompt tokens, of 80.0 % that it could have had; sessions under way held 6,500 tokens at "
        "most."
    ]


@pytest.mark.parametrize(
    ("hits", "words"),
    [
        # 256 tokens lose 20 points, 512 half a point
        (
            {17: 0.55, 33: 0.745, 65: 0.75},
            "A cache of 512 tokens is large enough; one of 256 loses 20 points of the hit rate: "
            "the best hit rate is 75.0 %, of 80.0 % that prompts share",
        ),
        ({17: 0.745, 33: 0.75}, "A cache of 256 tokens is large enough: the best hit rate is 75"),
        ({17: 0.75, 33: 0.5}, "No cache is large enough: the best hit rate is 75.0 %"),
    ],
)
def test_the_cliff(hits: dict[int, float], words: str, tmp_path: Path) -> None:
    records = [working(blocks, hit, i) for i, (blocks, hit) in enumerate(hits.items())]
    inputs = inputs_of(tmp_path, records)
    (text,) = cliffs(ladders(STUDY.find(inputs) or []))
    assert text.startswith(words) and "held 6,500 tokens at most" in text


def test_a_ladder_is_of_caches_for_prefixes_that_differ_in_size_alone(tmp_path: Path) -> None:
    records = [
        working(17, 0.5, 0),
        working(33, 0.75, 1),
        working(65, 0.0, 2, caching=False),
        working(129, None, 3),
    ]
    (ladder,) = ladders(STUDY.find(inputs_of(tmp_path, records)) or [])
    assert [cell.mean("config.cache.num_blocks") for cell in ladder.cells] == [17, 33]


def test_the_page_has_a_row_a_cell_and_a_figure(tmp_path: Path) -> None:
    page, out = build(tmp_path, [working(17, 0.5, 0), working(33, 0.75, 1)])
    assert 'id="agents"' in page.source and (out / "agents.png").exists()
    text = page.source
    table = (out / "agents.md").read_text().splitlines()
    assert len(table) == 4 and "Hit rate (%)" in table[0] and "| 50.0 | 80.0 | 6,500 |" in table[2]
    figures: Any = ("Job latency", "5.25", "6,500", "A cache of 512 tokens is large enough")
    assert all(one in text for one in figures)


def test_engines_are_compared_in_pairs_of_one_block(tmp_path: Path) -> None:
    records = []
    for block, machine in enumerate((1.0, 1.1, 0.9, 1.2, 1.0, 0.8)):
        for engine, latency_s in (("minivllm", 2.0), ("vllm_server", 3.0)):
            index = 0 if engine == "minivllm" else 1
            record = working(513, 0.75, index)
            record.config["choices"] = {**record.config["choices"], "engine": engine}
            record.arm, record.block = f"engine={engine}", block
            record.run_id = f"{index}{block}".ljust(12, "0")
            record.provenance["started_at"] = f"2025-03-04T10:{2 * block + index:02d}:00+0000"
            assert record.jobs is not None
            record.jobs.latency_s = Percentiles(mean=latency_s * machine, n=8)
            records.append(record)
    inputs = inputs_of(tmp_path, records)
    found = STUDY.find(inputs)
    assert found is not None
    (sentence,) = STUDY.statements(found, inputs)
    assert sentence == (
        "A job takes 1.50× as long with vllm_server as with minivllm (95 %: 1.50 to 1.50, 6 "
        "blocks)."
    )
    table = STUDY.files(found, inputs)["agents.md"].splitlines()
    assert "| Job latency, × first | 95 % |" in table[0]
    assert table[2].endswith("| – | – |") and table[3].endswith("| 1.50× | 1.50 to 1.50 |")
    few = inputs_of(tmp_path / "few", [record for record in records if record.block < 3])
    assert STUDY.statements(STUDY.find(few) or [], few) == []
    assert "× first" not in STUDY.files(STUDY.find(few) or [], few)["agents.md"]
    for record in records[1::2]:  # the second engine after the first, on a day of its own
        record.provenance["started_at"] = record.provenance["started_at"].replace("-04T", "-05T")
    apart = inputs_of(tmp_path / "apart", records)
    assert STUDY.statements(STUDY.find(apart) or [], apart) == [
        "A job takes 1.50× as long with vllm_server as with minivllm (measured apart, so without "
        "an interval)."
    ]
    assert "| 1.50× | apart |" in STUDY.files(STUDY.find(apart) or [], apart)["agents.md"]
