"""preset=scaling: ladders of steps, the least that they can cost, and where they cost more than
that explains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.records.storage import write_record
from minivllm.config.compose import compose
from minivllm.report.inputs import read
from minivllm.report.studies import scaling
from tests.report.pagereader import build_report
from tests.report.synthetic import make_record

WEIGHTS, TOKEN, OPERATIONS = (
    1e9,
    1e5,
    2e9,
)  # bytes of the weights, of a token of context; operations of a token
BANDWIDTH, RATE, STEPS = 1e10, 1e12, 20


def rung(
    folder: Path,
    batch: int,
    context: int,
    ms: float,
    block: int = 0,
    preset: str = "scaling",
    overlapped: bool = False,
    **choices: str,
) -> None:
    """One record of steps that take so long each, and a prompt that takes twice its least time.

    Where steps overlap, two more decode and have no time of their own.
    """
    quant = choices.get("quant", "int8")
    record = make_record(quant, block=block, run_id=f"{quant}-{batch}-{context}-{block}")
    record.cell_id, record.arm, record.position = (
        f"{quant}-{batch}-{context}",
        f"{quant} {batch} {context}",
        batch + context,
    )
    record.config = {
        **record.config,
        "choices": {**record.config["choices"], "preset": preset},
        "workload": {"num_requests": batch, "input_len": context},
    }
    record.metrics.num_requests, record.metrics.input_tokens = batch, batch * context
    record.roofline = Roofline(
        bandwidth_bytes_per_s=BANDWIDTH,
        matrix_flops_per_s=RATE,
        decode_bytes=STEPS * (WEIGHTS + TOKEN * batch * context),
        decode_flops=STEPS * OPERATIONS * batch,
        decode_s=STEPS * ms / 1e3,
        prefill_bytes=batch * WEIGHTS,
        prefill_flops=batch * OPERATIONS * context,
        prefill_s=batch * 2 * max(WEIGHTS / BANDWIDTH, OPERATIONS * context / RATE),
    )
    prompts = {
        "num_requests": batch,
        "num_tokens": 64,
        "num_prefill_tokens": 64,
        "context_tokens": 64,
    }
    decode = {"num_requests": batch, "num_tokens": batch, "num_prefill_tokens": 0}
    if overlapped:
        record.liveness = {"runtime": {"overlap_steps": STEPS + 1.0}}
    decode |= {"context_tokens": batch * context, "gap_ms": 0.1}
    steps = [prompts, *(decode for _ in range(STEPS + 2 * overlapped))]
    write_record(
        folder / record.run_id,
        record,
        steps=[{"start_s": float(i), **s} for i, s in enumerate(steps)],
    )


def found(folder: Path) -> list[scaling.Ladder]:
    return scaling.ladders(gather(read_rows(folder)[0]))


def test_ladders_with_what_a_step_has_to_cost(tmp_path: Path) -> None:
    for batch, ms in ((1, 110.0), (4, 115.0), (256, 1100.0)):
        rung(tmp_path, batch, 128, ms)
    rung(tmp_path, 1, 1024, 130.0)
    by_batch, by_context, by_prompt = found(tmp_path)
    assert [r.batch for r in by_batch.rungs] == [1, 4, 256] and by_batch.kind == "batch"
    least = [r.least_ms for r in by_batch.rungs]
    bytes_ms = [(WEIGHTS + TOKEN * 128 * batch) / BANDWIDTH * 1e3 for batch in (1, 4, 256)]
    assert least == [
        pytest.approx(bytes_ms[0]),
        pytest.approx(bytes_ms[1]),
        pytest.approx(2e9 * 256 / 1e9),
    ]
    assert [r.limit for r in by_batch.rungs] == ["memory", "memory", "matrix"]
    assert [r.ms.mean for r in by_batch.rungs] == pytest.approx([110.0, 115.0, 1100.0])
    assert [(r.batch, r.context) for r in by_context.rungs] == [(1, 128), (1, 1024)]
    assert [r.context for r in by_prompt.rungs] == [128, 1024]
    assert [r.ms.mean for r in by_prompt.rungs] == pytest.approx([512.0, 4096.0])
    assert by_prompt.rungs[1].least_ms == pytest.approx(2048.0)


def test_where_steps_overlap_those_count_that_have_a_time_of_their_own(tmp_path: Path) -> None:
    for batch, ms in ((1, 110.0), (4, 115.0)):
        rung(tmp_path, batch, 128, ms, overlapped=True)
    rung(tmp_path, 1, 1024, 130.0, overlapped=True)
    by_batch, by_context = found(tmp_path)  # no prompt has one
    assert [r.ms.mean for r in by_batch.rungs] == pytest.approx([110.0, 115.0])
    assert [r.ms.mean for r in by_context.rungs] == pytest.approx([110.0, 130.0])
    assert by_batch.rungs[0].least_ms == pytest.approx((WEIGHTS + TOKEN * 128) / BANDWIDTH * 1e3)


def test_a_ladder_is_named_by_what_tells_it_from_the_others(tmp_path: Path) -> None:
    """Not by what only cells of other studies beside them vary in."""
    for quant in ("int8", "nf4"):
        for batch in (1, 2):
            rung(tmp_path, batch, 128, 100.0, quant=quant)
    rung(tmp_path, 1, 64, 100.0, preset="peers", quant="fp16")
    assert [ladder.series for ladder in found(tmp_path)] == ["quant=int8", "quant=nf4"]


@pytest.mark.parametrize(
    ("ms", "steep"),
    [
        ((110.0, 120.0, 130.0), []),  # weights are read once whatever the batch: nearly flat
        ((110.0, 200.0, 350.0), []),  # slower than the limits grow, but no faster than the work
        ((110.0, 200.0, 900.0), [(2.0, 4.0)]),
    ],
)
def test_only_what_passes_work_and_limits_is_super_linear(
    ms: tuple[float, ...], steep: list[tuple[float, float]], tmp_path: Path
) -> None:
    for batch, each in zip((1, 2, 4), ms, strict=True):
        rung(tmp_path, batch, 128, each)
    (ladder,) = found(tmp_path)
    assert [(before.batch, after.batch) for before, after, *_ in ladder.steep()] == steep
    (words,) = scaling.statements([ladder])
    assert ("Super-linear beyond the limits from 2 to 4 (4.50× the time" in words) == bool(steep)
    assert ("Nowhere super-linear" in words) == (not steep)


def test_a_block_that_was_slow_before_takes_a_finding_away(tmp_path: Path) -> None:
    for block, (before, after) in enumerate(((100.0, 260.0), (130.0, 260.0))):
        rung(tmp_path, 1, 128, before, block)
        rung(tmp_path, 2, 128, after, block)
    (ladder,) = found(tmp_path)
    assert ladder.rungs[1].ms.mean / ladder.rungs[0].ms.mean > 2 * scaling.MARGIN
    assert ladder.steep() == []


def test_what_else_varies_makes_ladders_of_its_own(tmp_path: Path) -> None:
    for quant in ("int8", "nf4"):
        for batch in (1, 8):
            rung(tmp_path, batch, 128, 100.0 + batch, quant=quant)
    assert [ladder.series for ladder in found(tmp_path)] == ["quant=int8", "quant=nf4"]


def test_records_of_other_presets_have_none(tmp_path: Path) -> None:
    for batch in (1, 8):
        rung(tmp_path, batch, 128, 100.0, preset="none")
    assert scaling.ScalingStudy().finding(read(tmp_path)) is None
    build_report(tmp_path, tmp_path / "report")
    assert not (tmp_path / "report" / "scaling.md").exists()


def test_page_plot_and_markdown(tmp_path: Path) -> None:
    for batch, ms in ((1, 110.0), (4, 115.0), (16, 2200.0)):
        rung(tmp_path / "runs", batch, 128, ms)
    page = build_report(tmp_path / "runs", tmp_path / "report").read_text()
    assert (
        "How does the cost grow with the work?" in page and "A decode step by its requests" in page
    )
    assert (
        "Super-linear beyond the limits: A decode step by its requests." in page
        and "Fastest" not in page
    )
    assert (tmp_path / "report" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report" / "scaling.md").read_text()
    assert "Super-linear beyond the limits from 4 to 16" in text
    assert "| 16 | 128 | 2,200 | " in text


@pytest.mark.slow
def test_the_study_on_the_embedded_model(cli: Callable[..., Any]) -> None:
    """Real records have what the ladders are made of: steps that only decode, with a full batch."""
    rungs = '[{workload.num_requests: "1,8"}, {workload.input_len: "512"}]'
    done = cli(
        "preset=scaling",
        f"sweep.params={rungs}",
        "sweep.name=s",
        "workload.output_len=8",
        "measure.repeats=1",
    )
    assert done.code == 0, done.err
    ladders = {ladder.kind: ladder for ladder in found(Path("runs/s"))}
    assert [rung.batch for rung in ladders["batch"].rungs] == [1, 8]
    assert [round(rung.context) for rung in ladders["prompt"].rungs] == [128, 512]
    assert all(
        rung.least_ms and rung.ms.mean > 0 for ladder in ladders.values() for rung in ladder.rungs
    )


def test_the_preset_measures_batches_of_decode_alone() -> None:
    config = compose(["preset=scaling"])
    assert config["batching"]["prefill_first"] and config["batching"]["max_num_seqs"] == 256
    assert config["batching"]["max_num_batched_tokens"] % config["workload"]["input_len"] == 0
