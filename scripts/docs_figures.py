"""Draws the pictures of the documentation from committed records, and from nothing else.

    python scripts/docs_figures.py                    # all of them
    python scripts/docs_figures.py preemption offload # some

Each function draws one picture; the page that shows it names the command that measured its records.
Pictures of pages need Chromium, and are left out without.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from docs_pages import live_view, missing, report, view_page, words
from docs_pictures import EXAMPLES, ROOT, Picture

from minivllm.bench.records import storage
from minivllm.bench.records.reading import load_records
from minivllm.bench.records.tables import read_table
from minivllm.report.figures.palette import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    LIGHT,
    ORANGE,
    PURPLE,
    VERMILION,
)
from minivllm.report.figures.render import finish, paint, png
from minivllm.report.figures.style import canvas, heading, legend_below, mark, patch

TOKENS_PER_S, TTFT = "metrics.output_tokens_per_s", "metrics.ttft_ms.p50"
PERCENT = 100
PRECISION = "runs/precision.tar.xz"


def records(path: Path) -> pd.DataFrame:
    """The ok records of a committed example, a row each, ordered by arm and block."""
    frame = load_records(path)
    return frame[frame["status"] == "ok"].sort_values(["arm", "block"])


def mean(frame: pd.DataFrame, column: str, **where: Any) -> float:
    """Mean over the blocks where the columns have these values; in a name `__` stands for a dot."""
    for name, value in where.items():
        frame = frame[frame[name.replace("__", ".")] == value]
    return float(frame[column].mean())


def table(frame: pd.DataFrame, file: str) -> pd.DataFrame:
    """A parquet file of the frame's first record, `seconds` counted from its first row where it is
    about steps."""
    first = frame.iloc[0]
    read = read_table(Path(first["directory"]), file, first[f"digests.{file}"]).to_pandas()
    return (
        read.assign(seconds=read["start_s"] - read["start_s"].iloc[0])
        if "start_s" in read
        else read
    )


def bars(
    ax: Any,
    names: Sequence[str],
    values: Sequence[float],
    title: str,
    form: str,
    colours: Sequence[str] = (),
) -> None:
    """Horizontal bars, the first on top and, unless colours are given, grey; each with its
    value."""
    for y, value in enumerate(values):
        ax.barh(y, value, height=0.62, color=colours[y] if colours else BLUE if y else GREY)
        ax.text(value + 0.015 * max(values), y, form.format(value), va="center", fontsize=9)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.22 * max(values))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
    heading(ax, title)


def paging(path: Path) -> bytes:
    """Slots of the cache that hold a token and slots that are allocated for nothing, over time."""
    frame = records(path)
    figure, axes = canvas(2, 1, height=4.2, sharex=True, sharey=True)
    for ax, name in zip(axes, ("contiguous", "paged"), strict=True):
        chosen = frame[frame["choices.cache"] == name]
        steps = table(chosen, storage.STEPS)
        held = (steps["kv_slots_allocated"] - steps["kv_slots_wasted"]) / 1e3
        ax.fill_between(steps["seconds"], held, color=BLUE, step="post", lw=0)
        top = steps["kv_slots_allocated"] / 1e3
        ax.fill_between(steps["seconds"], held, top, color=ORANGE, step="post", lw=0)
        waste = PERCENT * mean(chosen, "memory.kv_waste")
        heading(ax, f"{name}: {waste:.1f} % of what is allocated holds nothing")
        ax.set_ylabel("thousand slots")
        ax.set_ylim(bottom=0)
        ax.grid(True)
    axes[-1].set_xlabel("seconds")
    legend_below(figure, [(patch(BLUE), "holds a token"), (patch(ORANGE), "allocated, empty")])
    return png(paint(figure))


def kv_dtype(path: Path) -> bytes:
    """Memory, speed and quality of 8-bit keys and values."""
    frame, names = records(path), ("auto", "int8", "fp8")
    panels = {
        "liveness.cache.kv_bytes_per_token": ("Bytes a token", "{:,.0f}", 1),
        TOKENS_PER_S: ("Output tokens/s", "{:,.0f}", 1),
        "quality.kl_mean": ("Mean KL to fp32 (0.001 nats)", "{:.2f}", 1000),
    }
    figure, axes = canvas(1, 3, height=2.2, sharey=True)
    for ax, (column, (title, form, scale)) in zip(axes, panels.items(), strict=True):
        values = [scale * mean(frame, column, config__cache__kv_dtype=name) for name in names]
        bars(ax, names, values, title, form)
    return png(paint(figure))


def prefix_caching(path: Path) -> bytes:
    """The TTFT of each request, with and without the prefix cache."""
    frame = records(path)
    figure, ax = canvas(height=2.8)
    shades = {False: (GREY, "x", "computed"), True: (BLUE, "o", "found in the cache")}
    for caching, (colour, marker, _) in shades.items():
        chosen = frame[frame["config.cache.prefix_caching"] == caching]
        requests = table(chosen, storage.REQUESTS)
        ax.plot(range(1, len(requests) + 1), requests["ttft_ms"], marker, color=colour, ms=5)
        ax.axhline(requests["ttft_ms"].median(), color=colour, lw=1, ls="--")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("request, in order of arrival")
    ax.set_ylabel("TTFT (ms)")
    ax.grid(axis="y")
    heading(ax, "Prompts of 768 tokens that have been seen before")
    legend_below(figure, [(mark(marker, colour), name) for colour, marker, name in shades.values()])
    return png(paint(figure))


def preemption(path: Path) -> bytes:
    """Who runs, what is computed and what the cache holds, step by step, when the cache is too
    small."""
    frame = records(path)
    frame = frame[frame["config.cache.num_blocks"] == 64]
    figure, grid = canvas(3, 3, height=5.6, sharex=True, sharey="col")
    for axes, name in zip(grid, ("recompute", "swap", "reserve"), strict=True):
        chosen = frame[frame["config.batching.preemption"] == name]
        steps = table(chosen, storage.STEPS)
        series = (
            ("num_requests", BLUE, "requests"),
            ("num_prefill_tokens", ORANGE, "prompt tokens so far"),
            ("kv_blocks_used", GREEN, "blocks of 64"),
        )
        for ax, (column, colour, title) in zip(axes, series, strict=True):
            values = steps[column].cumsum() if column == "num_prefill_tokens" else steps[column]
            ax.plot(steps["seconds"], values, color=colour, lw=1.1, drawstyle="steps-post")
            ax.set_ylabel(title, fontsize=8.5)
            ax.grid(True)
        speed, lost = mean(chosen, TOKENS_PER_S), mean(chosen, "liveness.batching.preemptions")
        heading(axes[0], f"{name}: {speed:,.0f} tokens/s, {lost:.0f} preemptions")
    for ax in grid[-1]:
        ax.set_xlabel("seconds")
        ax.set_ylim(bottom=0)
    return png(paint(figure))


def eviction(path: Path) -> bytes:
    """The cache in use over time, and the quality that eviction costs."""
    frame, names = records(path), ("none", "streaming", "h2o", "snapkv")
    figure, (left, right) = canvas(1, 2, height=2.9, width_ratios=[1.3, 1])
    colours = dict(zip(names, (GREY, BLUE, ORANGE, PURPLE), strict=True))
    for name, dashes in zip(
        names, ("-", "-", "-", (0, (4, 2))), strict=True
    ):  # two of them lie on each other
        steps = table(frame[frame["config.cache.eviction"] == name], storage.STEPS)
        left.plot(steps["seconds"], steps["kv_blocks_used"], color=colours[name], lw=1.6, ls=dashes)
    left.set_ylim(bottom=0)
    left.set_xlabel("seconds")
    left.set_ylabel("blocks in use")
    left.grid(True)
    heading(left, "Cache of the 16 requests of the run")
    values = [
        PERCENT * mean(frame, "quality.top1_agreement", config__cache__eviction=n) for n in names
    ]
    bars(
        right,
        names,
        values,
        "Likeliest token is the reference's (%)",
        "{:.1f}",
        list(colours.values()),
    )
    right.set_xticks(range(0, 101, 25))
    return png(paint(figure))


def offload(ram: Path, disk: Path) -> bytes:
    """Prefixes found again, and the time to the first token, as more prompts come back than the
    device holds."""
    figure, grid = canvas(2, 2, height=4.8, sharex=True, sharey="col")
    rows = (
        (ram, "config.cache.offload_gb", (0.0, 2.0), ("dropped", "2 GB of host memory")),
        (
            disk,
            "config.cache.offload_disk_gb",
            (0.0, 4.0),
            ("16 MB of host memory", "and 4 GB of disk"),
        ),
    )
    for axes, (sweep, knob, settings, names) in zip(grid, rows, strict=True):
        frame = records(sweep)
        size = "config.workload.num_requests"
        for setting, colour, name in zip(settings, (GREY, BLUE), names, strict=True):
            chosen = frame[frame[knob] == setting].groupby(size).mean(numeric_only=True)
            found = (
                chosen["liveness.cache.prefix_tokens_reused"]
                / chosen["liveness.cache.prefix_tokens_looked_up"]
            )
            axes[0].plot(chosen.index, PERCENT * found, "o-", color=colour, label=name)
            axes[1].plot(chosen.index, chosen[TTFT], "o-", color=colour)
        axes[0].legend(frameon=False, fontsize=8.5)
        heading(axes[0], "Prompt tokens found in a tier (%)")
        heading(axes[1], "TTFT p50 (ms)")
        for ax in axes:
            ax.axvspan(8, 17, color=LIGHT, alpha=0.4, lw=0)
            ax.set_xscale("log", base=2)
            ax.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
            ax.grid(True)
    for ax in grid[-1]:
        ax.set_ylim(bottom=0)
        ax.set_xlabel("prompts that come back (grey: all fit on the device)")
    return png(paint(figure))


def decoding(path: Path, beams_path: Path) -> bytes:
    """Throughput by decoding option, and the part of a step that chooses tokens."""
    frame, beams = records(path), records(beams_path)
    names = ["greedy", "sample", "top_k", "top_p"]
    chosen = {name: frame[frame["choices.decoding"] == name] for name in names}
    chosen |= {
        f"beam, width {w}": beams[beams["config.decoding.beam_width"] == w] for w in (2, 4, 8)
    }
    figure, axes = canvas(1, 3, height=3.0, sharey=True)
    panels = (
        (TOKENS_PER_S, "Output tokens/s", "{:,.0f}"),
        ("breakdown.sample_ms", "Choosing tokens (ms a step)", "{:.2f}"),
        ("metrics.e2e_ms.p50", "E2E p50 (ms)", "{:,.0f}"),
    )
    for ax, (column, title, form) in zip(axes, panels, strict=True):
        bars(ax, list(chosen), [mean(rows, column) for rows in chosen.values()], title, form)
    return png(paint(figure))


def simulation(measured: Path, predicted: Path) -> bytes:
    """Each simulated figure over the measured one."""
    keys = ["batching", "arrival.concurrency"]
    columns = {TOKENS_PER_S: "output tokens/s", TTFT: "TTFT p50", "metrics.ttft_ms.p99": "TTFT p99"}
    found = []
    for sweep in (measured, predicted):
        frame = records(sweep)
        frame = frame.assign(
            batching=frame["choices.batching"], **{keys[1]: frame["config.arrival.concurrency"]}
        )
        found.append(frame.groupby(keys)[list(columns)].mean())
    error = PERCENT * (found[1] / found[0] - 1)
    figure, ax = canvas(height=3.0)
    ax.axhspan(-15, 15, color=LIGHT, alpha=0.5, lw=0)
    ax.axhline(0, color=FAINT, lw=1)
    for offset, (column, colour, marker) in zip(
        (-0.12, 0.0, 0.12), zip(columns, (BLUE, ORANGE, VERMILION), "osD", strict=True), strict=True
    ):
        ax.plot([x + offset for x in range(len(error))], error[column], marker, color=colour, ms=6)
    ax.set_xticks(
        range(len(error)),
        [f"{batching}\n{int(number)} at once" for batching, number in error.index],
    )
    ax.set_ylabel("simulated over measured (%)")
    limit = max(20.0, 1.15 * float(error.abs().to_numpy().max()))
    ax.set_ylim(-limit, limit)
    heading(ax, "Error of each figure; the band is 15 %")
    marks = zip((BLUE, ORANGE, VERMILION), "osD", columns.values(), strict=True)
    legend_below(figure, [(mark(marker, colour), name) for colour, marker, name in marks])
    return png(paint(figure))


def planning(path: Path) -> bytes:
    """The cost of planning a step, by running and by waiting requests."""
    record = json.loads(path.read_text())
    figure, (left, right) = canvas(1, 2, height=2.8)
    for level, colour in (("p50_ms", BLUE), ("p90_ms", VERMILION)):
        rows = record["by_running"]
        left.plot(
            [row["running"] for row in rows], [row[level] for row in rows], "o-", color=colour
        )
        rows = record["by_waiting"]
        right.plot(
            [row["waiting"] for row in rows], [row[level] for row in rows], "o-", color=colour
        )
    left.axhline(2, color=INK, lw=1, ls="--")
    left.text(1, 2.06, "2 ms", fontsize=8.5)
    left.set_xlabel("requests running, nobody waits")
    right.set_xlabel(f"requests waiting, {record['by_waiting'][0]['running']} run")
    right.set_xscale("log")
    right.set_xticks([row["waiting"] for row in rows], [f"{row['waiting']:,}" for row in rows])
    for ax in (left, right):
        ax.set_ylabel("ms to plan a step")
        ax.set_ylim(bottom=0)
        ax.grid(True)
    legend_below(figure, [(patch(BLUE), "median"), (patch(VERMILION), "90th percentile")])
    return png(paint(figure))


def effects(path: Path) -> bytes:
    """The effect of each optimisation of the example ablation, as its report draws it."""
    from minivllm.report.inputs import read
    from minivllm.report.studies.ablation import AblationStudy, forest

    analysis = AblationStudy().finding(read(path))
    drawn = analysis and forest(analysis)
    assert drawn
    return finish(drawn).png


def quantization_error(path: Path) -> bytes:
    """Codebooks, error by value and error by bits of each way to quantise."""
    from quantization_error import picture

    return picture(json.loads(path.read_text()))


def drawing_of(module: str, function: str) -> str:
    """The source of a function of the package or of another script that draws a picture."""
    return inspect.getsource(getattr(importlib.import_module(module), function))


ON_PAGES = ("report", "live_view")
PICTURES: dict[str, Picture] = {
    picture.draw.__name__: picture
    for picture in (
        Picture(paging, ("runs/paging.tar.xz",)),
        Picture(kv_dtype, ("runs/kv-dtype.tar.xz",)),
        Picture(prefix_caching, ("runs/prefix.tar.xz",)),
        Picture(preemption, ("runs/preemption.tar.xz",)),
        Picture(eviction, ("runs/eviction.tar.xz",)),
        Picture(offload, ("runs/offload.tar.xz", "runs/offload-disk.tar.xz")),
        Picture(decoding, ("runs/decoding.tar.xz", "runs/beam-width.tar.xz")),
        Picture(
            simulation, ("runs/simulation-measured.tar.xz", "runs/simulation-predicted.tar.xz")
        ),
        Picture(planning, ("planning_cost.json",)),
        Picture(
            effects,
            ("runs/ablation.tar.xz",),
            partial(drawing_of, "minivllm.report.studies.ablation", "forest"),
        ),
        Picture(
            quantization_error,
            ("quantization_error.json",),
            partial(drawing_of, "quantization_error", "picture"),
        ),
        Picture(report, (PRECISION,), lambda: words(EXAMPLES / PRECISION)),
        Picture(live_view, ("runs/view-preemption.tar.xz",), view_page),
    )
}


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help=f"which: {', '.join(PICTURES)}; all where none is given"
    )
    names = parser.parse_args().names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"no picture {min(unknown)}; there are {', '.join(PICTURES)}")
    lacking = missing()
    for name in names:
        if name in ON_PAGES and lacking:
            print(f"left out: {name}, a picture of a page, which needs {lacking}", file=sys.stderr)
            continue
        PICTURES[name].write()
        print(PICTURES[name].file.relative_to(ROOT))


if __name__ == "__main__":
    main()
