"""Records of ablations as the harness would have written them, with planted effects and noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.analysis.ablation.design import AGAIN, Design
from minivllm.analysis.rows import Row
from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.records.figures import Metrics, Percentiles
from minivllm.bench.records.reading import flatten
from minivllm.bench.records.record import Ablation, Record

SPEED = 100.0


def ablation_rows(
    design: Design,
    effects: Mapping[str, float],
    blocks: int = 8,
    noise: float = 0.01,
    seed: int = 0,
    together: Mapping[tuple[str, str], float] | None = None,
    idle: Sequence[str] = (),
    **changes: Any,
) -> list[Row]:
    """Rows of every arm and block: throughput is a product of effects, drift of the block, and
    noise.

    Args:
        design: which arms there are.
        effects: by optimisation, the ratio that it gives; 1 where it is missing.
        blocks: how many.
        noise: standard deviation of the logarithm.
        seed: of the noise.
        together: the further ratio that two give together.
        idle: optimisations whose counters do not move.
        changes: fields of the records.
    """
    rng = np.random.default_rng(seed)
    rows = []
    arms = [(design.label(chosen), chosen) for chosen in design.arms] + [(AGAIN, design.baseline)]
    for block in range(blocks):
        drift = rng.normal(0, 0.1)  # what a block has in common, and pairing takes out
        for position, (name, chosen) in enumerate(arms):
            logarithm = (
                drift + rng.normal(0, noise) + sum(math.log(effects.get(n, 1.0)) for n in chosen)
            )
            logarithm += sum(
                math.log(r) for two, r in (together or {}).items() if set(two) <= chosen
            )
            speed = SPEED * math.exp(logarithm)
            on = [n for n in design.names if n in chosen]
            record = Record(
                run_id=f"{name}-{block}",
                cell_id="+".join(on) or "nothing",
                sweep="planted",
                arm=name,
                block=block,
                status="ok",
                config={"choices": {n: str(n in on) for n in ("quant", "batching")}, "quant": {}}
                | {"batching": {f"knob_{n}": n in on for n in design.names}},
                position=position,
                ablation=Ablation(
                    design.kind,
                    "output_tokens_per_s",
                    list(design.names),
                    {n: list(needed) for n, needed in design.requires.items() if needed},
                    on,
                ),
                provenance={"code_hash": "c0de", "host": "here", "device": {"name": "cpu"}}
                | {"started_at": f"2025-01-01T{block:02d}:{position:02d}:00+0000"},
                metrics=Metrics(
                    output_tokens_per_s=speed,
                    ttft_ms=Percentiles(p50=1e4 / speed),
                    itl_ms=Percentiles(p50=1e3 / speed),
                ),
                roofline=Roofline(),
                liveness={
                    "batching": {
                        f"work_{n}": float(n in on and n not in idle) for n in design.names
                    }
                },
            )
            for key, value in changes.items():
                setattr(record, key, value)
            rows.append(flatten(record.to_dict()))
    return rows
