"""How far each method moves the embedded model's weights, as numbers and as a picture.

    python scripts/quantization_error.py

Every linear layer of the embedded model goes through each method; what the layer then computes from
the identity matrix is the weight it means. Written are a record (JSON), the table of it that
docs/reference/quantization.md shows (Markdown); `picture` is of the figure there, which
scripts/docs_figures.py writes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from program import exit_code, new_parser, with_provenance
from torch import Tensor, nn

from minivllm.config.compose import build, compose
from minivllm.kernels.device import BuildContext
from minivllm.platform import files
from minivllm.quant.base import Quantizer
from minivllm.quant.plain import PlainLinear
from minivllm.report.figures import palette, render, style

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("int8", {}),
    ("int8_mixed", {}),
    ("fp8", {}),
    *(("int4", {"group_size": size}) for size in (32, 64, 128, 256)),
    *(("nf4", {"block_size": size, "double_quant": False}) for size in (64, 256, 1024, 4096)),
    ("nf4", {"block_size": 64, "double_quant": True}),
]
BLOCK = 64  # of the picture's codebooks
BINS = 80


class Collector(Quantizer):
    """Keeps a copy of every layer's weight."""

    def __init__(self) -> None:
        super().__init__("float32")
        self.weights: list[Tensor] = []

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        self.weights.append(weight.clone())
        return PlainLinear(weight, bias)


def embedded_weights() -> list[Tensor]:
    """Every linear layer's weight of the embedded model, float32 [out, in]; fused as the engine has
    them."""
    collector = Collector()
    context = BuildContext(torch.device("cpu"))
    build(compose(["model=tiny"])["model"], quant=collector, context=context)
    return collector.weights


def method(option: str, knobs: dict[str, Any], dtype: str) -> Any:
    """Build the quantisation method of a configuration."""
    chosen = [f"quant={option}", *(f"quant.{name}={value}" for name, value in knobs.items())]
    return build(compose([*chosen, f"quant.dtype={dtype}"])["quant"])


@torch.inference_mode()
def restored(packed: nn.Module, columns: int) -> Tensor:
    """The weight [out, in] that a layer multiplies with."""
    dtype = next((p.dtype for p in packed.parameters() if p.dtype is torch.bfloat16), torch.float32)
    out: Tensor = packed(torch.eye(columns, dtype=dtype))
    return out.float().t()


def measured(option: str, knobs: dict[str, Any], weights: Sequence[Tensor]) -> dict[str, Any]:
    """One row: relative root mean square error over all weights, and the bits they take when
    stored."""
    # In float32 the error is that of the grid alone; stored are scales as a bfloat16 run has them.
    exact, real = method(option, knobs, "float32"), method(option, knobs, "bfloat16")
    lost = total = bits = 0.0
    for weight in weights:
        value = weight.to(exact.dtype)
        lost += float((restored(exact.pack(value, None), weight.shape[1]) - weight).square().sum())
        total += float(weight.square().sum())
        bits += sum(
            8 * t.numel() * t.element_size()
            for t in real.pack(weight.bfloat16(), None).parameters()
        )
    return {
        "quant": option,
        "knobs": knobs,
        "relative_rms_error": math.sqrt(lost / total),
        "bits_per_weight": bits / sum(weight.numel() for weight in weights),
    }


def by_value(
    option: str, knobs: dict[str, Any], weights: Sequence[Tensor]
) -> dict[str, list[float]]:
    """Mean error of weights of about the same size, both in units of the largest weight of their
    block."""
    exact = method(option, knobs, "float32")
    edges = torch.linspace(-1, 1, BINS + 1)
    sums, counts = torch.zeros(BINS), torch.zeros(BINS)
    for weight in weights:
        blocks = weight.reshape(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)
        error = (
            restored(exact.pack(weight, None), weight.shape[1]).reshape(-1, BLOCK) - blocks
        ).abs()
        place = (torch.bucketize(blocks / largest, edges) - 1).clamp(0, BINS - 1).flatten()
        sums.index_add_(0, place, (error / largest).flatten())
        counts.index_add_(0, place, torch.ones(place.numel()))
    share = counts / counts.sum() * BINS / 2  # a density on [-1, 1]
    return {"mean_error": (sums / counts.clamp(min=1)).tolist(), "density": share.tolist()}


def measure() -> dict[str, Any]:
    """The errors of all methods as a record."""
    weights = embedded_weights()
    library = method("nf4", {}, "float32").library
    blocks = torch.cat([weight.reshape(-1, BLOCK) for weight in weights])
    scaled = blocks / blocks.abs().amax(1, keepdim=True)
    curves = {
        "nf4": by_value("nf4", {"block_size": BLOCK, "double_quant": False}, weights),
        "int4": by_value("int4", {"group_size": BLOCK}, weights),
    }
    found = {
        "what": "error of each method on the weights of the embedded model's linear layers",
        "weights": sum(weight.numel() for weight in weights),
        "methods": [measured(option, knobs, weights) for option, knobs in METHODS],
        "codebook": library.functional.get_4bit_type("nf4", device="cpu").tolist(),
        "deviation_in_block": float(scaled.std()),
        "by_value": curves,
    }
    return with_provenance(found, command="quantization_error.py")


def label(row: dict[str, Any]) -> str:
    """The name of a row: the option and its knobs."""
    knobs = dict(row["knobs"])
    double = " double_quant" if knobs.pop("double_quant", False) else ""
    return " ".join([row["quant"], *(f"{name}={value}" for name, value in knobs.items())]) + double


def table(record: dict[str, Any]) -> str:
    """The record's rows in Markdown."""
    lines = [
        "| quant | bits a weight, stored | relative RMS error of the weights |",
        "| --- | ---: | ---: |",
    ]
    lines += [
        f"| `{label(row)}` | {row['bits_per_weight']:.2f} | "
        f"{100 * row['relative_rms_error']:.2f} % |"
        for row in record["methods"]
    ]
    return "\n".join(lines) + "\n"


def picture(record: dict[str, Any]) -> bytes:
    """Codebooks on the weights' density, error by value, error by bits; as PNG."""
    figure, axes = style.canvas(1, 3, height=3.3)
    first, second, third = axes
    centres = [-1 + (2 * i + 1) / BINS for i in range(BINS)]
    spread = record["deviation_in_block"]
    first.fill_between(
        centres, record["by_value"]["nf4"]["density"], color=palette.LIGHT, step="mid", lw=0
    )
    normal = [math.exp(-((x / spread) ** 2) / 2) / spread / math.sqrt(2 * math.pi) for x in centres]
    first.plot(centres, normal, color=palette.GREY, lw=1.2, ls="--")
    top = 1.12 * max(normal)
    first.vlines(record["codebook"], 0, top, color=palette.BLUE, lw=1.1)
    first.vlines(
        [-1 + 2 * i / 15 for i in range(16)], -0.16 * top, -0.02 * top, color=palette.ORANGE, lw=1.1
    )
    first.set(xlabel="weight / largest of its block", yticks=[], ylim=(-0.18 * top, top))
    style.heading(first, "The 16 levels")
    for name, colour in (("nf4", palette.BLUE), ("int4", palette.ORANGE)):
        second.plot(
            centres, [100 * e for e in record["by_value"][name]["mean_error"]], color=colour, lw=1.4
        )
    second.set(
        xlabel="weight / largest of its block",
        ylabel="mean error, % of the largest",
        ylim=(0, None),
    )
    second.grid(axis="y")
    style.heading(second, "Error by value")
    colours = {
        "nf4": palette.BLUE,
        "int4": palette.ORANGE,
        "int8": palette.GREEN,
        "fp8": palette.PURPLE,
    }
    for row in record["methods"]:
        colour = colours[row["quant"].removesuffix("_mixed")]
        marker = "D" if row["knobs"].get("double_quant") else "o"
        third.plot(
            row["bits_per_weight"],
            100 * row["relative_rms_error"],
            marker,
            color=colour,
            ms=5,
            mew=0,
        )
    third.set(
        xlabel="bits a weight, stored", ylabel="relative RMS error, %", ylim=(0, None), xscale="log"
    )
    third.set_xticks([4, 5, 6, 7, 8], ["4", "5", "6", "7", "8"])
    third.minorticks_off()
    third.grid()
    style.heading(third, "Error by bits")
    names = {"nf4": "NF4", "int4": "int4, affine", "int8": "int8", "fp8": "fp8"}
    style.legend_below(
        figure, [(style.mark("o", colours[key]), name) for key, name in names.items()]
    )
    return render.png(render.paint(figure))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("reports/examples/cpu"))
    args = parser.parse_args()
    record = measure()
    files.write_json(args.output / "quantization_error.json", record)
    files.write_text(args.output / "quantization_error.md", table(record))
    print(table(record), end="")


if __name__ == "__main__":
    sys.exit(exit_code(main))
