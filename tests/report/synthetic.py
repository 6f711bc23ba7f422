"""Synthetic records: a sweep as the harness would have written it, without running an engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from minivllm.bench.hardware.readings import Energy, Roofline
from minivllm.bench.records.figures import Breakdown, Cold, Memory, Metrics, Percentiles, Window
from minivllm.bench.records.record import Failure, Record, Validity
from minivllm.bench.records.storage import write_record

WEIGHTS = {"fp16": 1.19e9, "int8": 0.75e9, "nf4": 0.55e9}
SPEED = {"fp16": 11.0, "int8": 17.5, "nf4": 14.2}


def spread(p50: float, n: int) -> Percentiles:
    """Percentiles with a tail; null where the harness would have too few samples."""
    tail = {"p50": 1.0, "p90": 1.6, "p95": 1.9, "p99": 2.6}
    needed = {"p50": 2, "p90": 10, "p95": 20, "p99": 100}
    return Percentiles(
        mean=1.1 * p50, n=n, **{p: f * p50 if n >= needed[p] else None for p, f in tail.items()}
    )


def make_config(quant: str, batching: str, **choices: str) -> dict[str, Any]:
    """A resolved configuration of the main groups."""
    knobs: dict[str, Any] = {
        "_target_": f"minivllm.engine.batching.{batching.title()}",
        "max_num_batched_tokens": 2048,
    }
    if batching == "continuous":
        knobs["max_num_seqs"] = 64
    return {
        "choices": {
            "task": "bench",
            "model": "qwen3",
            "quant": quant,
            "attention": "auto",
            "batching": batching,
            "cache": "paged",
            "decoding": "greedy",
            "workload": "chat",
            "arrival": "offline",
            "engine": "minivllm",
            "preset": "none",
            **choices,
        },
        "model": {"path": "Qwen/Qwen3-0.6B", "weights": "auto", "max_model_len": 2048},
        "quant": {
            "_target_": f"minivllm.quant.{quant}",
            "dtype": "float16" if quant == "fp16" else "bfloat16",
        },
        "batching": knobs,
        "cache": {"_target_": "minivllm.cache.paged.PagedCache", "block_size": 16},
        "measure": {"repeats": 3, "seed": 0},
        "name": None,
        "sweep": {"name": None},
    }


def make_record(
    quant: str = "nf4", batching: str = "continuous", block: int = 0, index: int = 0, **changes: Any
) -> Record:
    """A plausible ok record; `changes` replace its fields."""
    wobble = 1 + 0.02 * math.sin(7 * block + 3 * index)
    speed = SPEED[quant] * (4.4 if batching == "continuous" else 1.0) * wobble
    n = 48
    itl = 1000 / SPEED[quant] * (1.7 if batching == "continuous" else 1.0)
    forward = itl * 0.97
    arm = f"quant={quant},batching={batching}"
    fields: dict[str, Any] = dict(
        run_id=f"{quant}{batching}{block}".ljust(12, "0"),
        cell_id=f"{quant}-{batching}",
        sweep="f3a9c01e",
        arm=arm,
        block=block,
        status="ok",
        config=make_config(quant, batching),
        workload_hash="a1b2c3d4",
        weights="random",
        attention_backend="sdpa",
        provenance={
            "git_sha": "0123456789abcdef",
            "dirty_hash": None,
            "code_hash": "c0de",
            "host": "bench-1",
            "command": "/opt/venv/bin/python run.py -m model=qwen3 quant=fp16,int8,nf4 "
            "batching=sequential,continuous workload=chat measure.repeats=3",
            "device": {"name": "AMD EPYC 7R13", "kind": "cpu"},
            "driver": None,
            "threads": 2,
            "seed": 0,
            "cpu": {"model": "AMD EPYC 7R13", "physical_cores": 2, "usable_cores": 2},
            "packages": {
                "python": "3.11.9",
                "torch": "2.13.0",
                "bitsandbytes": "0.50.2",
                "vllm": None,
            },
            "started_at": f"2025-03-04T10:{10 * block + index:02d}:07+0000",
        },
        cold=Cold(load_s=3.4, first_batch_s=0.8),
        metrics=Metrics(
            ttft_ms=spread(n * 64 / speed * 250 * wobble, n),
            itl_ms=spread(itl / wobble, n * 63),
            tpot_ms=spread(itl, n),
            e2e_ms=spread(n * 64 / speed * 500, n),
            queue_ms=spread(n * 64 / speed * 240, n),
            output_tokens_per_s=speed,
            total_tokens_per_s=5 * speed,
            requests_per_s=speed / 64,
            duration_s=n * 64 / speed,
            num_requests=n,
            input_tokens=n * 256,
            output_tokens=n * 64,
            steady=Window(1.0, 1.1 * speed, 5.2 * speed, speed / 60),
        ),
        memory=Memory(
            weights=int(WEIGHTS[quant]),
            weights_16bit=int(1.19e9),
            kv_pool=int(0.94e9),
            kv_waste=0.08,
            host_rss_peak=int(WEIGHTS[quant] + 1.72e9),
        ),
        energy=Energy(reason="no RAPL counter is readable on this machine", window_s=60.0),
        roofline=Roofline(
            bandwidth_bytes_per_s=18.4e9,
            matrix_flops_per_s=0.21e12,
            matrix_dtype="bfloat16",
            mbu=0.31,
            mfu=0.4,
        ),
        breakdown=Breakdown(400, 0.06, 0.0, 0.21, forward, 0.6, 0.05, 0.11),
        liveness={
            "quant": {"layers_quantised": 0 if quant == "fp16" else 196, "format": quant},
            "batching": {"max_batch": 32 if batching == "continuous" else 1},
            "cache": {"blocks_allocated": 960},
        },
    )
    fields.update(changes)
    return Record(**fields)


def counted(index: int = 0) -> Roofline:
    """A roofline whose steps were counted: decode at 1 FLOP a byte, prefill at 100."""
    return Roofline(
        bandwidth_bytes_per_s=20e9,
        matrix_flops_per_s=1e12,
        matrix_dtype="bfloat16",
        decode_bytes=1e10,
        decode_flops=1e10,
        decode_s=1.0 + 0.01 * index,
        mbu=0.5 / (1.0 + 0.01 * index),
        prefill_bytes=1e9,
        prefill_flops=1e11,
        prefill_s=0.2,
        mfu=0.5,
    )


def failed(record: Record, status: str, kind: str, message: str, log: str = "") -> Record:
    """The record that is left when the cell did not end well: no figures."""
    record.status, record.error = status, Failure(kind, message, log)
    record.metrics, record.memory, record.energy = Metrics(), Memory(), Energy()
    record.roofline, record.breakdown, record.cold, record.liveness = (
        Roofline(),
        Breakdown(),
        Cold(),
        {},
    )
    record.weights = record.attention_backend = None
    if status == "invalid":
        record.validity = Validity(False, [message])
    return record


def steps_of(record: Record, steps: int = 400) -> list[dict[str, Any]]:
    """A steps.parquet with a ramp up and a drain."""
    full = 32 if record.config["choices"]["batching"] == "continuous" else 1
    total = record.metrics.duration_s or 1.0
    rows = []
    for i in range(steps):
        batch = min(full, 1 + i, max(1, (steps - i) // 3))
        rows.append(
            {
                "start_s": 500.0 + total * i / steps,
                "num_requests": batch,
                "num_tokens": batch,
                "num_prefill_tokens": 0,
                "waiting": max(0, 48 - batch - i // 8),
                "kv_blocks_used": batch * (12 + i % 9),
                "kv_blocks_total": 960,
            }
        )
    return rows


def telemetry_of(record: Record, samples: int = 120) -> list[dict[str, Any]]:
    """A telemetry.parquet of a CPU run: the GPU columns are not there."""
    total, peak = record.metrics.duration_s or 1.0, record.memory.host_rss_peak or 1
    return [
        {
            "t_s": 498.0 + total * i / samples,
            "phase": "measuring",
            "rss": peak * min(1.0, 0.4 + i / 40),
            "rss_peak": peak,
            "cpu_worker_percent": 190 + 8 * math.sin(i) if i else None,
            "cpu_other_percent": 3.0 if i else None,
            "cpu_mhz": None,
        }
        for i in range(samples)
    ]


def write(root: Path, records: list[Record], *, parquet: bool = True) -> Path:
    """Write records under root/<sweep>/ and return the first one's sweep folder."""
    for record in records:
        choices = record.config.get("choices", {})
        folder = (
            root
            / record.sweep
            / f"{choices.get('quant', 'cell')}-{choices.get('batching', '')}-{record.run_id}"
        )
        timed = parquet and record.status == "ok"
        write_record(
            folder,
            record,
            steps=steps_of(record) if timed else None,
            telemetry=telemetry_of(record) if timed else None,
        )
    return root / records[0].sweep


def make_sweep(blocks: int = 3) -> list[Record]:
    """Six cells, of which the last one ran out of memory in every block."""
    records = []
    cells = [(quant, batching) for quant in SPEED for batching in ("sequential", "continuous")]
    for block in range(blocks):
        for index, (quant, batching) in enumerate(cells):
            record = make_record(quant, batching, block, index)
            if index == 5:
                log = (
                    "loading weights\n"
                    + "\n".join(f"step {i} <ok>" for i in range(30))
                    + ("\nMemoryError")
                )
                record = failed(
                    record, "oom", "MemoryError", "resident memory passed the limit of 2.0 GB", log
                )
            records.append(record)
    return records
