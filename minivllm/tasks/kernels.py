"""task=kernels: the time of each kernel, beside torch's operations and the hardware's limit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.device_lock import device_lock
from minivllm.bench.records import identity, storage
from minivllm.bench.records.lock import run_folder
from minivllm.bench.records.provenance import provenance
from minivllm.bench.records.record import KERNELS_VERSION, portable
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.experiments.ending import list_reports, require_writable_reports
from minivllm.platform import files
from minivllm.platform.threads import pin, thread_count
from minivllm.tasks.options import KernelsOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from minivllm.bench.microbench.case import Setting

SCHEMA_VERSION = 1
FALLBACK_CACHE = 1 << 26  # bytes, where the system reports no size of its caches


def run(config: dict[str, Any]) -> int:
    """Time the device's kernels on the shapes of `model`, and write a record, a table and a plot.

    Args:
        config: the resolved configuration; uses `model` (the shapes alone), `task`, `runtime`,
            `runs_dir`, `reports_dir` and `name`.

    Returns:
        0, or 1 if an output was not the reference's or a case failed.

    Raises:
        BadInput: there are no kernels for the device, they cannot be built, a knob turns them off,
            or `reports_dir` cannot be written to.
    """
    from rich.console import Console

    from minivllm.report.studies.standalone.kernel_findings import findings
    from minivllm.report.studies.standalone.kernels import table, write
    from minivllm.report.terminal import print_table

    require_writable_reports(config)
    console = Console(highlight=False)
    view = Config.of(config)
    root = Path(view.runs_dir)

    def show_wait(holder: str) -> None:
        console.print(
            f"waiting: another run has the device{holder and f': {holder}'}", markup=False
        )

    with device_lock(config, show_wait), run_folder(root, view.name) as name:
        path = root / name / storage.KERNELS
        record = _measure(config, path, console)
    print_table(table(record), console)
    for line in findings(record):
        console.print(line, soft_wrap=True, markup=False)
    print(f"record: {path}")
    reports_dir = Path(view.reports_dir)
    print(f"table and plot: {write(record, reports_dir / name)}")
    list_reports(reports_dir)
    return 0 if record["status"] == "ok" else 1


def _measure(config: dict[str, Any], path: Path, console: Console) -> dict[str, Any]:
    """Time every case and write the record to `path`, also after an interruption; returns it."""
    from minivllm.bench.hardware.telemetry import busy_seconds

    setting, synchronise = _setting(config)
    begin, all_s, own_s = time.monotonic(), busy_seconds(), _own_seconds()
    with console.status("probing the device") as status:
        limits, notes = _limits(setting)
        wide, narrow = limits["bfloat16"], limits.get("int8")
        rows: list[dict[str, Any]] = []
        record = {
            "schema_version": KERNELS_VERSION,
            "kind": "kernels",
            "status": "error",
            "config": portable(config),
            "provenance": provenance(config, identity.code_hash()),
            "limits": {
                **{key: value for key, value in asdict(wide).items() if value is not None},
                **({} if narrow is None else {"int8_ops_per_s": narrow.matrix_flops_per_s}),
                "cache_bytes": setting.cache_bytes,
                "notes": notes,
            },
            "rows": rows,
        }
        try:
            _time_cases(setting, limits, Config.of(config).task, synchronise, rows, console, status)
            record["status"] = "ok" if all(row["ok"] for row in rows) else "error"
        except KeyboardInterrupt:
            record["interrupted"] = True
            if rows:
                print(
                    f"record so far: {path}; task=report 'runs=[{path.parent.name}]' makes its "
                    "table and plot",
                    file=sys.stderr,
                )
            raise
        finally:
            if rows:
                others_s = busy_seconds() - all_s - (_own_seconds() - own_s)
                record["others_percent"] = max(0.0, 100 * others_s / (time.monotonic() - begin))
                files.write_json(path, record)
    return record


def _time_cases(
    setting: Setting,
    limits: Any,
    task: KernelsOptions,
    synchronise: Callable[[], object],
    rows: list[dict[str, Any]],
    console: Console,
    status: Status,
) -> None:
    """Append a row for each case to `rows`, and show the progress: on a terminal in `status`, else
    one line a kernel."""
    from minivllm.analysis.format import count
    from minivllm.bench.microbench import suite

    kernel, sample_s = "", task.sample_ms / 1000
    for row in suite.rows(setting, limits, task.repeats, sample_s, synchronise):
        rows.append(row)
        done = f"{count(len(rows), 'case')} done, the last: {row['kernel']} {row.get('part', '')}"
        status.update(done)
        if not console.is_terminal and row["kernel"] != kernel:
            print(done, flush=True)
        kernel = row["kernel"]


def _setting(config: dict[str, Any]) -> tuple[Setting, Callable[[], object]]:
    """The shapes and the device to measure, and the function that waits for the device."""
    from minivllm.models.config import ModelConfig
    from minivllm.models.load.source import resolve

    # The model is read before torch is imported, so that a mistake shows at once.
    _, source = resolve(config["model"], allow_random=True)
    model = ModelConfig.from_dict(source.config)

    import torch

    from minivllm.bench.hardware.limits import last_level_cache
    from minivllm.bench.microbench.case import Setting
    from minivllm.kernels.cpu import library
    from minivllm.kernels.device import select_device, takes_triton

    view = Config.of(config)
    runtime, task = view.runtime, view.task
    device = select_device(runtime.device)
    pin(config["runtime"])
    torch.set_num_threads(thread_count(config["runtime"]))
    torch.manual_seed(view.measure.seed)
    triton = takes_triton("runtime.fused_kernels", runtime.fused_kernels, "off", device)
    if not triton:
        if device.type != "cpu" or runtime.cpu_kernels == "off":
            raise BadInput(
                "task=kernels has nothing to measure: a GPU needs runtime.fused_kernels=auto "
                "and triton, a CPU runtime.cpu_kernels=auto"
            )
        library.choose("on", device)  # raises where the kernels cannot be built
    if device.type == "cuda":
        cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
        synchronise: Callable[[], object] = torch.cuda.synchronize
    else:
        cache, synchronise = last_level_cache() or FALLBACK_CACHE, _nothing
    knobs = tuple(task.rows), tuple(task.contexts), task.drafts, tuple(task.formats)
    return Setting(model, device, triton, cache, *knobs), synchronise


def _own_seconds() -> float:
    """CPU seconds of this process and of the compilers that it has waited for."""
    return sum(os.times()[:4])


def _nothing() -> None:
    """The `synchronise` of a CPU, whose calls are synchronous."""


def _limits(setting: Setting) -> tuple[dict[str, Any], list[str]]:
    """Bandwidth and matrix rate as every benchmark probes them, by the dtype of products, with
    notes."""
    from minivllm.bench.hardware.limits import probe
    from minivllm.bench.microbench.linear import NARROW

    dtypes = ["bfloat16", *(["int8"] if NARROW.keys() & set(setting.formats) else [])]
    found = {dtype: probe(str(setting.device), dtype) for dtype in dtypes}
    return {dtype: limits for dtype, (limits, _) in found.items()}, found["bfloat16"][1]
