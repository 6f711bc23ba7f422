#!/usr/bin/env python3
"""The types of GGUF files that are read, but plain floats: their error against the `gguf` package,
and which option computes with them as they are stored.

    python scripts/gguf_types.py

Written is the table that docs/reference/quantization.md shows (Markdown). It needs the extra
`gguf`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import gguf
import numpy as np
import torch
from program import exit_code, new_parser

from minivllm.models.load.gguf.blocks import dequantized
from minivllm.models.load.gguf.formats import AS_STORED, BY_NAME, BY_PACKAGE, QUANTIZED
from minivllm.platform import files

BLOCKS = 2000  # of random bytes, of each type
TYPES = (*QUANTIZED, *BY_PACKAGE)


def largest_error(form: str) -> float:
    """Of all values of random blocks, in float32; infinite where one of two is not finite and the
    other is another value."""
    raw = np.random.default_rng(0).integers(0, 256, (BLOCKS, BY_NAME[form].bytes), np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[form]).reshape(-1)
    ours = dequantized(torch.from_numpy(raw.reshape(-1)), form).float().numpy()
    same = np.array_equal(np.isfinite(ours), np.isfinite(theirs)) and np.array_equal(
        ours[~np.isfinite(ours)], theirs[~np.isfinite(theirs)], equal_nan=True
    )
    finite = np.isfinite(theirs)
    return float(np.abs(ours[finite] - theirs[finite]).max()) if same else math.inf


def rows() -> Iterator[tuple[str, str, str]]:
    """Of each type what converts it, its largest error, and the option that computes with it as it
    is stored."""
    options = {form: name for name, forms in AS_STORED.items() for form in forms}
    for form in TYPES:
        maker = "the package `gguf`" if form in BY_PACKAGE else "minivllm"
        option = f"`quant={options[form]}`" if form in options else "none"
        yield maker, f"{largest_error(form):.3g}", option


def table() -> str:
    """The types in Markdown; those of which all is equal share a row."""
    of_types = dict(zip(TYPES, rows(), strict=True))
    shared = groupby(sorted(TYPES, key=of_types.__getitem__), of_types.__getitem__)
    lines = [
        "| types | converted by | largest error | as stored with |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in shared]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("reports/examples/cpu"))
    args = parser.parse_args()
    files.write_text(args.output / "gguf_types.md", table())
    print(table(), end="")


if __name__ == "__main__":
    sys.exit(exit_code(main))
