"""The table of engines side by side: rows, the best of each engine, and how far ours is ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.record import Failure, Record
from minivllm.report.inputs import ReportInputs, read
from minivllm.report.page import write_report
from minivllm.report.studies.peers import PeersStudy
from tests.analysis.test_interleaving import BUSY
from tests.report.pagereader import Page
from tests.report.synthetic import make_record, write

STUDY = PeersStudy()


def measured(
    engine: str, quant: str, batch: int, speed: float, block: int = 0, **given: Any
) -> Record:
    """A record of one engine whose tokens come at one speed."""
    absent, activations = given.pop("absent", False), given.pop("activations", "none")
    prompt = given.pop("prompt", 512)
    record = make_record("nf4", "continuous", block, 0)
    record.config["choices"] |= {"engine": engine, "quant": quant}
    record.config["arrival"] = {"concurrency": batch}
    record.config["quant"]["activations"] = activations
    record.config["workload"] = {"input_len": prompt}
    record.arm = record.cell_id = f"{engine}-{quant}-{batch}-{activations}-{prompt}"
    record.run_id = f"{record.arm}-{block}"
    record.liveness = {"quant": given.pop("quant_counters", {})}
    record.metrics.output_tokens_per_s = speed
    record.metrics.itl_ms.mean = 1e3 / speed
    record.metrics.ttft_ms.mean = 500.0
    record.metrics.num_requests, record.metrics.input_tokens = 2, 1024
    assert record.cold is not None
    record.cold.load_s = 2.0
    if absent:
        record.status, record.error = "invalid", Failure("NotInstalled", "engine=x needs y")
    return record


def inputs_of(folder: Path, records: list[Record]) -> ReportInputs:
    write(folder / "runs", records)
    return read(folder / "runs")


def lines_of(folder: Path, records: list[Record]) -> dict[tuple[str, str], list[str]]:
    inputs = inputs_of(folder, records)
    found = STUDY.find(inputs)
    assert found is not None
    return {
        (line.bits, line.question.text.partition(" (")[0]): [
            *(e.text for e in line.answers),
            line.ahead,
        ]
        for line in found.lines
    }


def test_rows_are_of_a_width_and_a_batch_and_the_best_other_engine_counts(tmp_path: Path) -> None:
    records = [
        record
        for block in range(3)
        for record in (
            measured("minivllm", "bf16", 1, 30.0, block),
            measured("llamacpp", "bf16", 1, 20.0, block),
            measured("openvino", "bf16", 1, 25.0, block),
            measured("minivllm", "int8", 8, 90.0, block),
            measured("openvino", "int8", 8, 100.0, block),
        )
    ]
    lines = lines_of(tmp_path, records)
    assert lines["16 bits", "1 at once, decode"][:3] == ["30.0", "20.0", "25.0"]
    assert lines["16 bits", "1 at once, decode"][3].startswith("1.20×")
    assert lines["16 bits", "prefill"] == ["1,020", "1,020", "1,020", "1.00× [1.00, 1.00]"]
    assert lines["16 bits", "load"][0] == "2.00"
    assert lines["8 bits", "8 at once"][:3] == ["90.0", "–", "100"]
    assert lines["8 bits", "8 at once"][3].startswith("0.900×")


def test_the_interval_is_of_pairs_of_the_same_block(tmp_path: Path) -> None:
    """The machine was twice as fast in the second block, and our lead was the same."""
    records = [
        measured(engine, quant, 8, speed * (1 + block), block)
        for block in range(4)
        for engine, speed in (("minivllm", 120.0 + block), ("vllm", 100.0))
        for quant in ("bf16", "int8")
    ]
    ahead = lines_of(tmp_path, records)["16 bits", "8 at once"][-1]
    assert ahead == "1.21× (1.19 to 1.24)"


def test_of_several_variants_of_an_engine_the_best_counts(tmp_path: Path) -> None:
    records = [
        measured("minivllm", "int4", 1, 60.0),
        measured("minivllm", "nf4", 1, 70.0),
        measured("llamacpp", "int4", 1, 50.0),
        measured("llamacpp", "int4", 8, 50.0),
    ]
    lines = lines_of(tmp_path, records)
    assert lines["4 bits", "1 at once, decode"] == ["70.0", "50.0", "1.40×"]


def test_each_length_of_the_prompts_has_rows_of_its_own(tmp_path: Path) -> None:
    speeds = {("minivllm", 8192): 40.0, ("minivllm", 32000): 20.0, ("openvino", 8192): 30.0}
    records = [measured(name, "bf16", 1, v, prompt=n) for (name, n), v in speeds.items()]
    inputs = inputs_of(tmp_path, records)
    found = STUDY.find(inputs)
    assert found is not None
    lines = {
        line.question.text: [*(e.text for e in line.answers), line.ahead] for line in found.lines
    }
    assert lines["1 at once, decode (tok/s), prompt of 8,192"] == ["40.0", "30.0", "1.33×"]
    assert lines["1 at once, decode (tok/s), prompt of 32,000"] == ["20.0", "–", "–"]


def test_an_engine_that_is_not_installed_is_a_column_that_says_so(tmp_path: Path) -> None:
    records = [
        measured("minivllm", "bf16", 1, 30.0),
        measured("minivllm", "bf16", 8, 60.0),
        measured("vllm", "bf16", 1, 1.0, absent=True),
        measured("llamacpp", "bf16", 1, 20.0, quant_counters={"activations": "int8"}),
    ]
    inputs = inputs_of(tmp_path, records)
    found = STUDY.find(inputs)
    assert found is not None
    by_engine = dict(zip(found.engines, found.lines[0].answers, strict=True))
    assert by_engine["vllm"].text == "not installed"
    said = STUDY.statements(found, inputs)
    assert said[0] == "Not installed, so not measured: vllm."
    assert "Activations of 8 bits were multiplied by llamacpp (bf16)." in said
    assert any(line.startswith("Energy is unknown: ") for line in said)
    assert "not installed" in STUDY.files(found, inputs)["peers.md"]
    lines = STUDY.conclusion(found, inputs).lines
    assert sum("Not installed" in line for line in lines) == 1
    for record in records[:2] + records[3:]:
        record.status = "invalid"
    found = STUDY.find(inputs_of(tmp_path / "none", records))
    assert found is None or not any("Energy" in line for line in found.notes)


def test_our_eight_bit_activations_have_a_column_of_their_own(tmp_path: Path) -> None:
    records = [
        measured("minivllm", "int8", 8, 80.0),
        measured("minivllm", "int8", 8, 110.0, activations="int8"),
        measured("openvino", "int8", 8, 100.0, activations="int8"),
        measured("openvino", "int8", 1, 30.0, activations="int8"),
    ]
    inputs = inputs_of(tmp_path, records)
    found = STUDY.find(inputs)
    assert found is not None
    assert found.engines == ("minivllm", "minivllm, int8 activations", "openvino")
    assert ["80.0", "110", "100"] in [[e.text for e in line.answers] for line in found.lines]
    ahead = "default (weights only) 0.800×; int8 activations 1.10×"
    assert ahead in [line.ahead for line in found.lines]


def test_the_page_answers_load_by_load_with_the_name_of_each_ratio(tmp_path: Path) -> None:
    """Loads are never ranked together, and the default is not passed over for a column that is
    faster."""
    records = [
        measured("minivllm", "int8", 1, 30.0),
        measured("minivllm", "int8", 8, 80.0),
        measured("minivllm", "int8", 8, 110.0, activations="int8"),
        measured("minivllm", "bf16", 8, 60.0),
        measured("openvino", "bf16", 8, 50.0),
        measured("openvino", "int8", 8, 100.0),
        measured("openvino", "int8", 1, 20.0),
    ]
    inputs = inputs_of(tmp_path, records)
    found = STUDY.find(inputs)
    assert found is not None
    assert STUDY.conclusion(found, inputs).headline == (
        "minivllm over the best other engine: by default (weights only) 1.50× at 1 at once and "
        "0.800× to 1.20× at 8 at once; with int8 activations 1.10× at 8 at once."
    )
    records[4].validity.notes.append(BUSY)
    busy = inputs_of(tmp_path / "busy", records)
    in_part = STUDY.find(busy)
    assert in_part is not None
    assert STUDY.conclusion(in_part, busy).headline.endswith("at once (1 of 7 blocks busy).")
    picture = STUDY.picture(found, inputs)
    assert picture is not None and [*picture.legend] == [
        "16 bits",
        "8 bits",
        "8 bits, int8 activations",
    ]
    page = Page(write_report(inputs, tmp_path / "out"))
    assert page.text.index("How fast is each engine with ") < page.text.index(
        "Engines side by side"
    )
    assert page.text.index("minivllm over the best other") < page.text.index("What was measured?")


@pytest.mark.parametrize(
    "engines", [("minivllm",), ("vllm", "llamacpp")], ids=["ours alone", "others alone"]
)
def test_there_is_no_table_without_both(tmp_path: Path, engines: tuple[str, ...]) -> None:
    records = [measured(name, "bf16", batch, 1.0) for name in engines for batch in (1, 8)]
    assert STUDY.find(inputs_of(tmp_path, records)) is None
