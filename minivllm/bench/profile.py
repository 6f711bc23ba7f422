"""runtime.profile: a short piece of the load that was measured, under torch's profiler.

It runs once the record is made, never within the measured window: profiled steps are slower. For
the same reason no measurement follows in the same process (see the supervisor).
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minivllm.bench.driver import full_batch, note_images, prompt_for, request_params
from minivllm.bench.metrics.idle import Idleness, idleness, sentence
from minivllm.bench.records import storage
from minivllm.bench.records.identity import profile_wanted
from minivllm.bench.workloads.arrivals import Arrival
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import BenchEngine, Profiled, ProfiledEngine
from minivllm.errors import BadInput
from minivllm.platform import files
from minivllm.platform.folders import TemporaryFolder
from minivllm.platform.plug_ins import locate

PROFILED_STEPS = 64  # at most: a step of a large model is thousands of events
LONGEST = 10  # operations in the table
NAME_LENGTH = 100  # of one of them: a kernel's may have its whole template


def validate(config: dict[str, Any]) -> None:
    """Raise BadInput, before an engine is built, if it is to be profiled and its class gives
    nothing to profile."""
    target = Config.of(config).target("engine")
    # What a function returns is known only when it is built, see `trace`.
    if (
        profile_wanted(config)
        and isinstance(kind := locate(target), type)
        and not issubclass(kind, Profiled)
    ):
        raise _rejection((config.get("choices") or {}).get("engine") or target)


def _rejection(name: str) -> BadInput:
    return BadInput(
        f"runtime.profile=true is not supported by engine={name}, which does not compute with "
        "torch in the worker or does not tell its phases: use runtime.profile=false"
    )


def trace(
    engine: BenchEngine,
    workload: Workload,
    arrival: Arrival,
    params: SamplingParams,
    seed: int,
    device: str,
    folder: Path,
) -> None:
    """Run a full batch from the workload's beginning, and write the operations that it took.

    Of conversations only the first turns run.

    Args:
        engine: at rest; it is reset afterwards.
        workload, arrival, params, seed: as measured; the arrival process says how many requests run
            at once.
        device: "cpu" or "cuda...", where the engine computes.
        folder: of the record; gets `storage.TRACE` and `storage.OPERATIONS`, of a GPU also
            `storage.IDLE`.

    Raises:
        BadInput: the engine is no ProfiledEngine.
        Exception: whatever engine, profiler or disk raise; none of the files is there then.
    """
    if not isinstance(engine, ProfiledEngine):
        raise _rejection(engine.info.name)
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.startswith("cuda")
    batch = full_batch(engine.info.max_num_seqs, arrival, workload.num_conversations)
    requests = list(workload.openings[:batch])
    with (
        engine.phases(),
        profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as seen,
    ):
        _run(engine, requests, request_params(params, requests, seed))
    steps = engine.steps()
    engine.reset()
    prompts = sum(step["num_prefill_tokens"] > 0 for step in steps)
    about = (
        f"{len(steps)} steps of {len(requests)} requests ({prompts} of them computed prompt "
        f"tokens, {len(steps) - prompts} only decoded)"
    )
    try:
        idle = idleness(seen.events() or [], steps)
        table = operations(seen.key_averages(), about, on_gpu, idle)
        files.write_text(folder / storage.OPERATIONS, table)
        if idle is not None:
            files.write_json(folder / storage.IDLE, asdict(idle))
        files.atomically(folder / storage.TRACE, lambda temporary: _export(seen, temporary))
    except BaseException:
        storage.discard_trace(folder)
        raise


def _run(
    engine: BenchEngine, requests: Sequence[WorkloadRequest], params: Sequence[SamplingParams]
) -> None:
    """Serve requests until they have ended, or PROFILED_STEPS are over."""
    for request, own in zip(requests, params, strict=True):
        if request.images:
            note_images(engine, request.request_id, request.images)
        engine.submit(request.request_id, prompt_for(engine, request.prompt_token_ids), own)
    unfinished = {request.request_id for request in requests}
    for _ in range(PROFILED_STEPS):
        if not unfinished:
            break
        unfinished -= {o.request_id for o in engine.poll() if o.finish_reason is not None}


def _export(seen: Any, path: Path) -> None:
    """Write torch's trace, compressed; torch itself does so for names that end in .gz alone.

    Raises:
        OSError: it could not be written. Torch only logs that: on a full disk its file is empty, or
            so long that there is no room for a copy.
    """
    with TemporaryFolder(f".{storage.TRACE}.", str(path.parent)) as beside:
        plain = Path(beside) / "trace.json"
        seen.export_chrome_trace(str(plain))
        if not (plain.exists() and plain.stat().st_size):
            raise OSError("torch could not write the trace")
        with plain.open("rb") as file, gzip.open(path, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(file, packed)


def operations(
    averages: Iterable[Any], about: str, on_gpu: bool, idle: Idleness | None = None
) -> str:
    """The operations that took most time of their own, as Markdown: torch's on a CPU, on a GPU the
    kernels.

    Args:
        averages: the profile's `key_averages()`.
        about: what was profiled.
        on_gpu: whether the time of a GPU counts, or that of the CPU.
        idle: how long the device idled; None where there is none.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__

    attribute = "self_device_time_total" if on_gpu else "self_cpu_time_total"  # microseconds
    averages = [a for a in averages if (a.device_type != DeviceType.CPU) == on_gpu]
    # On a GPU a range is there a second time, as long as its kernels; on a CPU its own time is
    # Python's.
    total = sum(getattr(a, attribute) for a in averages if not (on_gpu and a.is_user_annotation))
    rows = [(getattr(a, attribute), a.count, a.key) for a in averages if not a.is_user_annotation]
    lines = [
        f"The operations that took most time of their own in {about}, with the share of all that "
        "was traced. The profiler slows steps down: how long they take is the record's to say. "
        f"In time: `{storage.TRACE}`, which https://ui.perfetto.dev opens.",
        "",
        *([] if idle is None else [sentence(idle), ""]),
        "| operation | calls | ms | share |",
        "| :-- | --: | --: | --: |",
    ]
    for own_us, count, key in sorted(rows, reverse=True)[:LONGEST]:
        name = key.replace("|", "\\|")[:NAME_LENGTH]
        share = own_us / total if total else 0.0
        lines.append(f"| `{name}` | {count} | {own_us / 1e3:.2f} | {share:.1%} |")
    return "\n".join(lines) + "\n"
