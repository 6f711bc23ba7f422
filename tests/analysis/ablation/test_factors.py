"""The verdict on two knobs is that of the interval, never of the figures alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.ablation.factors import sentences
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import Row
from minivllm.bench.records.reading import flatten
from minivllm.experiments.ending import conclude
from minivllm.report.verdict import verdict
from tests.report.synthetic import make_record, write

BATCHINGS = ("sequential", "continuous")
ALONE = {"int8": 1.5, "nf4": 1.2, "continuous": 4.0}
# of a cell's blocks, each begins elsewhere
WOBBLE = (0.0, 0.6, -1.0, 0.3, 0.9, -0.7, 0.2, -0.4, 1.0, -0.8)


def swept(
    blocks: int,
    together: Mapping[str, float] | None = None,
    noise: float = 0.01,
    quants: tuple[str, ...] = ("fp16", "int8"),
    alternate: bool = True,
    drift: float = 0.0,
) -> list[Row]:
    """Rows of every quant with either batching; `together` is what continuous batching adds beyond
    the product."""
    rows = []
    places = [(quant, batching) for quant in quants for batching in BATCHINGS]
    for block in range(blocks):
        for index, (quant, batching) in enumerate(places):
            speed = 100.0 * ALONE.get(quant, 1.0) * ALONE.get(batching, 1.0)
            if batching == "continuous":
                speed *= (together or {}).get(quant, 1.0)
            wobble = WOBBLE[(block + 3 * index) % len(WOBBLE)] * noise + drift * block
            record = make_record(quant, batching, block, index)
            record.metrics.output_tokens_per_s = speed * math.exp(wobble)
            minute = block * len(places) + index if alternate else index * blocks + block
            record.provenance["started_at"] = f"2025-01-01T00:{minute:02d}:00+0000"
            record.position = index
            rows.append(flatten(record.to_dict()))
    return rows


def sentence(*args: Any, **changes: Any) -> str:
    (sentence,) = sentences(gather(swept(*args, **changes)))
    return sentence


@pytest.mark.parametrize("blocks", [2, 3, 7])
def test_the_answer_follows_from_the_interval(blocks: int) -> None:
    begins = {
        "The effects of quant and batching do not multiply": ({"int8": 0.5}, 0.01),
        "The effects of quant and batching multiply, to within 5 %": ({}, 0.002),
        "Not told apart, whether the effects of quant and batching multiply": ({"int8": 0.9}, 0.2),
    }
    for begin, (together, noise) in begins.items():
        assert sentence(blocks, together, noise).startswith(f"{begin}: ")


@pytest.mark.parametrize("blocks", [2, 3, 7])
def test_cells_that_were_measured_apart_tell_nothing_apart(blocks: int) -> None:
    text = sentence(blocks, {"int8": 0.5}, alternate=False)
    assert text.startswith("Not told apart, whether the effects of quant and batching multiply: ")
    assert text.endswith(" of it (measured apart, so without an interval).")


def test_what_both_give_stands_beside_the_product() -> None:
    text = sentence(3, {"int8": 0.5}, noise=0.0)
    assert "int8 with continuous gives 3.00× the output tokens/s of the first cell" in text
    assert (
        "alone they give 1.50× and 4.00×, whose product is 6.00×: 0.500× [0.500, 0.500] of it."
        in text
    )


def test_a_single_block_tells_nothing_apart() -> None:
    text = sentence(1, {"int8": 0.1}, noise=0.0)
    assert text.startswith("Not told apart, ") and text.endswith(
        "0.100× of it, and a single block has no interval."
    )


def test_what_a_block_has_in_common_is_no_scatter() -> None:
    assert "do not multiply" in sentence(3, {"int8": 0.8}, drift=0.3)
    assert "Not told apart" in sentence(3, {"int8": 0.8}, drift=0.3, alternate=False)


def test_the_farthest_from_the_product_is_told_first() -> None:
    text = sentence(4, {"nf4": 0.5}, noise=0.002, quants=("fp16", "int8", "nf4"))
    assert "do not multiply: nf4 with continuous gives" in text and text.endswith(" (multiply).")
    assert text.count("int8 with continuous") == 1


def test_one_knob_three_knobs_and_cells_that_lack_have_none() -> None:
    rows = swept(2)
    assert sentences(gather([row for row in rows if row["choices.quant"] == "int8"])) == []
    assert sentences(gather(rows[:3])) == []  # no square
    third = [
        row
        | {
            "config.cache.block_size": 32,
            "cell_id": f"{row['cell_id']}-32",
            "run_id": f"{row['run_id']}-32",
        }
        for row in rows
    ]
    assert sentences(gather([*rows, *third])) == []


def test_what_follows_from_a_knob_is_none_of_its_own() -> None:
    rows = [
        row
        | {"config.quant.dtype": row["choices.quant"], "attention_backend": row["choices.batching"]}
        for row in swept(3)
    ]
    assert len(sentences(gather(rows))) == 1


def test_other_work_is_not_divided() -> None:
    rows = [row | {"workload_hash": row["choices.batching"]} for row in swept(3)]
    assert sentences(gather(rows)) == []


def test_page_and_terminal_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = gather(swept(3, {"int8": 0.5}))
    (sentence,) = sentences(cells)
    assert sentence in verdict(cells).lines
    written = [
        make_record(quant, batching, b)
        for quant in ("fp16", "int8")
        for batching in BATCHINGS
        for b in (0, 1)
    ]
    folder = write(tmp_path / "runs", written, parquet=False)
    conclude(folder, tmp_path / "out", {})
    assert "effects of quant and batching multiply" in capsys.readouterr().out
