"""Bars and ranges that compare cells: throughput, latency, memory, and where a step's time goes."""

from __future__ import annotations

import math

from minivllm.report.cells import Cell
from minivllm.report.format import count, sig
from minivllm.report.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    LIGHT,
    MAX_BARS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Plot,
    bar_height,
    beside,
    canvas,
    colours,
    heading,
    legend_below,
    mark,
    mark_failure,
    patch,
    plain_ticks,
    plot,
    rows_axis,
)

THROUGHPUT = "metrics.output_tokens_per_s"
HOST = "host RSS peak"
PHASES = {"schedule": PURPLE, "prepare": ORANGE, "forward": BLUE, "sample": GREEN, "emit": SKY, "gap": GREY}


def comparison_plots(cells: list[Cell]) -> list[Plot]:
    """Every comparing figure for which the records hold data, in reading order."""
    drawn = [throughput(cells), latency(cells), memory(cells), breakdown(cells)]
    return [one for one in drawn if one is not None]


def _cut(cells: list[Cell]) -> tuple[list[Cell], str]:
    if len(cells) <= MAX_BARS:
        return cells, ""
    return cells[:MAX_BARS], f" The first {MAX_BARS} of {len(cells)} cells; the table has them all."


def _no_data_note(shown: list[Cell]) -> str:
    failed = sum(not cell.ok for cell in shown)
    return f" {count(failed, 'cell')} failed and {'is' if failed == 1 else 'are'} hatched." if failed else ""


def throughput(cells: list[Cell]) -> Plot | None:
    """Output tokens/s by cell, with the range over blocks; None for a lone cell, whose bar would say nothing."""
    if len(cells) < 2:
        return None
    shown, cut = _cut(cells)
    figures = [cell.stat(THROUGHPUT) for cell in shown]
    top = max((f.high for f in figures if f), default=0.0)
    if top <= 0 and not any(not cell.ok for cell in shown):
        return None
    right = top or 1.0
    figure, ax = canvas(height=bar_height(len(shown)))
    tints, legend, title = colours(shown)
    for y, (cell, stat) in enumerate(zip(shown, figures, strict=True)):
        if stat is None:
            mark_failure(ax, y, cell, right=right)
            continue
        ax.barh(y, stat.mean, height=0.62, color=tints[y])
        if stat.spread:
            ax.plot([stat.low, stat.high], [y, y], color=INK, lw=1.4, marker="|", ms=6)
        beside(ax, stat.high, y, sig(stat.mean))
    rows_axis(ax, shown)
    ax.set_xlim(0, right * 1.12)
    ax.set_xlabel("output tokens/s (longer is faster)" if top else "no cell has a figure")
    ax.tick_params(labelbottom=bool(top))
    heading(ax, "Throughput by cell")
    legend_below(figure, [(patch(colour), f"{title}={value}") for value, colour in legend.items()])
    best = max(
        (c for c in shown if c.mean(THROUGHPUT)), key=lambda c: c.mean(THROUGHPUT) or 0.0, default=None
    )
    alt = f"Horizontal bars of output tokens per second for {count(len(shown), 'cell')}."
    alt += f" The longest is {best.label} at {sig(best.mean(THROUGHPUT))}." if best else " None has a figure."
    whiskers = " Whiskers: least and greatest block." if any(f and f.spread for f in figures) else ""
    caption = (
        f"Output tokens per second, from first arrival to last token.{whiskers}{_no_data_note(shown)}{cut}"
    )
    return plot("throughput", "Throughput", alt + _no_data_note(shown), caption, figure)


def latency(cells: list[Cell]) -> Plot | None:
    """TTFT and ITL: median to p99 by cell."""
    shown, cut = _cut(cells)
    panels = {"metrics.ttft_ms": "TTFT (time to first token)", "metrics.itl_ms": "ITL (between tokens)"}
    if not any(cell.mean(f"{key}.p50") is not None for cell in shown for key in panels):
        return None
    figure, axes = canvas(1, 2, height=bar_height(len(shown), 1.15), sharey=True)
    levels = (("p50", "o", BLUE), ("p90", "|", INK), ("p95", "d", GREEN), ("p99", "D", VERMILION))
    for index, (ax, (key, title)) in enumerate(zip(axes, panels.items(), strict=True)):
        points = [
            {p: v for p, _, _ in levels if (v := cell.mean(f"{key}.{p}")) is not None} for cell in shown
        ]
        scale, unit = latency_unit(cells, key)
        points = [{p: v * scale for p, v in row.items()} for row in points]
        values = [v for row in points for v in row.values() if v > 0]
        logarithmic = bool(values) and max(values) > 30 * min(values)
        if logarithmic:
            ax.set_xscale("log")
            plain_ticks(ax.xaxis)
        else:
            ax.set_xlim(0, max(values, default=1.0) * 1.08)
        for y, (cell, row) in enumerate(zip(shown, points, strict=True)):
            if not cell.ok:
                ax.text(
                    0.02,
                    y,
                    cell.status_text,
                    transform=ax.get_yaxis_transform(),
                    va="center",
                    color=VERMILION,
                    fontsize=9,
                )
            if row:
                ax.plot([min(row.values()), max(row.values())], [y, y], color="#b5b5b5", lw=2, zorder=1)
            for p, marker, colour in levels:
                if p in row:
                    ax.plot(
                        row[p],
                        y,
                        marker,
                        color=colour,
                        ms=8 if marker == "|" else 6,
                        mew=1.6 if marker == "|" else 0.6,
                        zorder=2,
                    )
        rows_axis(ax, shown, labels=index == 0)
        ax.set_xlabel(f"{unit}, log scale" if logarithmic else f"{unit} (shorter is better)")
        heading(ax, title)
    legend_below(figure, [(mark(marker, colour), p) for p, marker, colour in levels])
    alt = (
        f"Dot ranges from the median to the 99th percentile of TTFT and ITL for {count(len(shown), 'cell')}."
    )
    caption = (
        "Each block's percentiles, averaged over blocks. TTFT counts from the scheduled arrival, queueing "
        f"included. A percentile with too few samples is left out, not replaced by the maximum.{cut}"
    )
    return plot("latency", "Latency", alt + _no_data_note(shown), caption, figure)


def _total_memory(cell: Cell) -> tuple[float | None, str]:
    """The process's memory in bytes and what it is: on the device where the model lies there, else RSS."""
    for key, name in (
        ("memory.device_process", "device, whole process"),
        ("memory.device_peak_reserved", "device, peak reserved"),
    ):
        if (value := cell.mean(key)) is not None:
            return value, name
    return cell.mean("memory.host_rss_peak"), HOST


def memory(cells: list[Cell]) -> Plot | None:
    """Weights, KV pool and the rest, stacked; the weights' 16-bit size as a mark.

    In a host's memory a pool is an outline: its pages take none until they are written to, so how much of it the process
    holds is not known.
    """
    shown, cut = _cut(cells)
    if not any(cell.mean("memory.weights") is not None or _total_memory(cell)[0] for cell in shown):
        return None
    figure, ax = canvas(height=bar_height(len(shown)))
    right, kinds, starts, outlined = 0.0, [], [], False
    for y, cell in enumerate(shown):
        if not cell.ok:
            starts.append(y)
            continue
        total, kind = _total_memory(cell)
        kinds += [kind] if total is not None and kind not in kinds else []
        known = cell.mean("memory.weights")
        if known is None and total is None:
            beside(ax, 0.0, y, "not recorded")
            continue
        weights, pool = (known or 0.0) / 1e9, (cell.mean("memory.kv_pool") or 0.0) / 1e9
        aside = pool if kind == HOST and total is not None else 0.0
        rest = max(0.0, (total or 0.0) / 1e9 - weights - (pool - aside))
        left = 0.0
        for value, colour in ((weights, BLUE), (pool - aside, ORANGE), (rest, LIGHT)):
            ax.barh(y, value, left=left, height=0.62, color=colour)
            left += value
        if aside:
            outlined = True
            ax.barh(y, aside, left=weights, height=0.62, facecolor="none", edgecolor=ORANGE, linewidth=1.4)
        full = cell.mean("memory.weights_16bit")
        if full is not None:
            ax.plot([full / 1e9] * 2, [y - 0.4, y + 0.4], color=BLACK, lw=2, ls=(0, (2, 1)))
        end = max(left, weights + aside)
        beside(ax, end, y, f"{sig(known and weights)} of {sig(left)}")
        right = max(right, end, (full or 0.0) / 1e9)
    right = right or 1.0
    for y in starts:
        mark_failure(ax, y, shown[y], right=right)
    rows_axis(ax, shown)
    ax.set_xlim(0, right * 1.2)
    ax.set_xlabel("GB (10⁹ bytes); labels: weights of total")
    heading(ax, "Memory by cell")
    from matplotlib.lines import Line2D

    dashes = Line2D([], [], color=BLACK, lw=2, ls=(0, (2, 1)))
    pool_key = (patch(ORANGE, outline=outlined), "KV pool, set aside" if outlined else "KV pool")
    parts = [(patch(BLUE), "weights"), pool_key, (patch(LIGHT), "rest of the process")]
    legend_below(figure, [*parts, (dashes, "the weights in 16 bits")])
    alt = f"Stacked bars of weights, KV pool and other memory for {count(len(shown), 'cell')}"
    alt += ", with the 16-bit size of the weights marked."
    caption = (
        f"Total: {' or '.join(kinds) or 'not recorded'}. Dashed mark: what the same weights take in 16 bits."
    )
    if outlined:
        caption += (
            " Outline: the pool as it was set aside in the host's memory, where pages count in the total only once they "
            "are written to."
        )
    return plot("memory", "Memory", alt + _no_data_note(shown), caption + _no_data_note(shown) + cut, figure)


def breakdown(cells: list[Cell]) -> Plot | None:
    """Mean milliseconds a step by phase, stacked."""
    measured = [cell for cell in cells if cell.mean("breakdown.forward_ms") is not None]
    shown, cut = _cut(measured)
    if not shown:
        return None
    figure, axes = canvas(1, 2, height=bar_height(len(shown), 1.15), sharey=True)
    panels = (
        (axes[0], "The whole step", list(PHASES)),
        (axes[1], "Without forward", [p for p in PHASES if p != "forward"]),
    )
    for index, (ax, title, phases) in enumerate(panels):
        right = 0.0
        for y, cell in enumerate(shown):
            left = 0.0
            for phase in phases:
                value = cell.mean(f"breakdown.{phase}_ms") or 0.0
                ax.barh(y, value, left=left, height=0.62, color=PHASES[phase])
                left += value
            whole = math.fsum(cell.mean(f"breakdown.{phase}_ms") or 0.0 for phase in PHASES)
            if all(cell.mean(f"breakdown.{phase}_ms") is None for phase in phases):
                note = "not told apart"  # another engine's steps may have no parts
            elif index == 0:
                note = sig(left)
            else:
                note = f"{sig(left)} ({sig(100 * left / whole, 2) if whole else 0} %)"
            beside(ax, left, y, note)
            right = max(right, left)
        ax.set_xlim(0, (right or 1.0) * (1.18 if index == 0 else 1.4))
        rows_axis(ax, shown, labels=index == 0)
        ax.set_xlabel("ms a step, mean")
        heading(ax, title)
    legend_below(figure, [(patch(colour), phase) for phase, colour in PHASES.items()])
    alt = f"Stacked bars of a step's phases ({', '.join(PHASES)}) in milliseconds, "
    alt += f"{count(len(shown), 'cell')}."
    caption = (
        "Right: the same without the forward pass, on its own scale, with its share of the step. "
        f"Gap is the time between the end of one step and the start of the next.{_on_gpu(shown)}{cut}"
    )
    if len(measured) < len(cells):
        caption += f" {len(measured)} of {count(len(cells), 'cell')}: the others failed or show no steps."
    return plot("breakdown", "Breakdown of a step", alt, caption, figure)


def _on_gpu(shown: list[Cell]) -> str:
    """What forward and sample are where the model's work is only launched."""
    on_gpu = [cell for cell in shown if cell.first("memory.device_peak_allocated") is not None]
    which = "" if len(on_gpu) == len(shown) else f" of {count(len(on_gpu), 'cell')}"
    words = (
        f" On a GPU{which}, forward is the time to launch the model, and the wait for its end is in sample."
    )
    return words if on_gpu else ""


def latency_unit(cells: list[Cell], key: str) -> tuple[float, str]:
    """The unit of a latency such as "metrics.ttft_ms" in every figure of a page, whatever part of it one shows."""
    return time_unit([median for cell in cells if (median := cell.mean(f"{key}.p50")) is not None])


def time_unit(milliseconds: list[float]) -> tuple[float, str]:
    """Factor and unit in which times are short to write."""
    return (1e-3, "s") if milliseconds and max(milliseconds) >= 10_000 else (1.0, "ms")
