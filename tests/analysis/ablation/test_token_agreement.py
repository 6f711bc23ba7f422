"""The share of requests whose output an optimisation leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.ablation.design import AGAIN, Design
from minivllm.analysis.ablation.effects import analyse
from minivllm.analysis.ablation.findings import Analysis
from minivllm.analysis.ablation.token_agreement import TokenAgreement
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.figures import Metrics
from minivllm.bench.records.record import Ablation, Record, Validity
from minivllm.bench.records.storage import write_record
from minivllm.report.studies.effects import markdown_text

DESIGN = Design("leave_one_out", {"a": (), "b": ()})


def measured(
    folder: Path, changed: dict[str, int], lossless: list[str], with_ids: bool = True
) -> Analysis:
    """Two blocks of four requests. changed: by arm, how many of them have another token in block
    1."""
    arms = [(DESIGN.label(chosen), chosen) for chosen in DESIGN.arms] + [(AGAIN, DESIGN.baseline)]
    for block in range(2):
        for position, (name, chosen) in enumerate(arms):
            on = [n for n in DESIGN.names if n in chosen]
            record = Record(
                run_id=f"{name}-{block}",
                cell_id="+".join(on),
                sweep="planted",
                arm=name,
                block=block,
                status="ok",
                config={"choices": {}, "batching": {f"knob_{n}": n in on for n in DESIGN.names}},
                ablation=Ablation(
                    "leave_one_out",
                    "output_tokens_per_s",
                    list(DESIGN.names),
                    {},
                    on,
                    lossless=lossless,
                ),
                provenance={
                    "code_hash": "c",
                    "host": "h",
                    "started_at": f"2025-01-01T0{block}:0{position}:00+0000",
                },
                liveness={"batching": {f"used_{n}": float(n in on) for n in DESIGN.names}},
                metrics=Metrics(output_tokens_per_s=100.0 + position + block, output_tokens=8),
                validity=Validity(ok=True),
            )
            others = changed.get(name, 0) * block
            requests: list[dict[str, Any]] = [
                {"request_id": f"r{i}", "token_ids": [1, 2, 9 if i < others else 3]}
                for i in range(4)
            ]
            rows = requests if with_ids else [{"request_id": row["request_id"]} for row in requests]
            write_record(folder / record.run_id, record, requests=rows)
    found = analyse(read_rows(folder)[0])
    assert found is not None
    return found


def test_outputs_are_compared_request_by_request_within_blocks(tmp_path: Path) -> None:
    found = measured(tmp_path, {"without a": 1}, [])
    assert [effect.same_tokens for effect in found.effects] == [pytest.approx(7 / 8), 1.0]
    assert found.noise is not None and found.noise.same_tokens == 1.0
    lines = markdown_text(found).splitlines()
    assert "| same outputs |" in lines[0] and "| 87 % |" in lines[2] and "| 100 % |" in lines[3]
    assert not any("lossless" in note for note in found.notes)


def test_what_is_declared_lossless_and_is_not_is_said(tmp_path: Path) -> None:
    found = measured(tmp_path, {"without a": 1}, ["a", "b"])
    (note,) = (note for note in found.notes if "lossless" in note)
    assert note.startswith("a is declared lossless, and only 87 % of the outputs")


def test_an_engine_that_does_not_repeat_itself_shows_in_the_copy(tmp_path: Path) -> None:
    found = measured(tmp_path, {AGAIN: 4}, [])
    assert found.noise is not None and found.noise.same_tokens == 0.5


def test_without_tokens_nothing_is_said(tmp_path: Path) -> None:
    found = measured(tmp_path, {}, ["a"], with_ids=False)
    assert {effect.same_tokens for effect in found.effects} == {None}
    with_ids = markdown_text(measured(tmp_path / "with", {}, ["a"]))
    assert "same outputs" in with_ids and "same outputs" not in markdown_text(found)
    assert not any("lossless" in note for note in found.notes)


def test_tokens_whose_ids_a_server_did_not_tell_are_not_compared(tmp_path: Path) -> None:
    """Such a token is recorded as UNKNOWN_TOKEN, in every arm."""
    for name, tokens in (("one", [0, 0, 0]), ("other", [0, 0, 0])):
        rows = [{"request_id": "r0", "token_ids": tokens}]
        record = Record(
            run_id=name, cell_id=name, sweep="s", arm=name, block=0, status="ok",
            config={"choices": {}}, metrics=Metrics(output_tokens_per_s=1.0),
            validity=Validity(ok=True),
        )  # fmt: skip
        write_record(tmp_path / name, record, requests=rows)
    cells = gather(read_rows(tmp_path)[0])
    assert len(cells) == 2 and TokenAgreement().share([(cells[0], cells[1])]) is None
