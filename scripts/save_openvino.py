#!/usr/bin/env python3
"""Save a checkpoint as OpenVINO's intermediate representation, for engine=openvino.

    python3 -m venv ~/openvino
    ~/openvino/bin/pip install openvino-genai optimum-intel nncf torch
    ~/openvino/bin/python scripts/save_openvino.py ~/qwen3 ~/qwen3-openvino-int8 --type int8

It runs in the interpreter that has OpenVINO and imports nothing of this project. No network is
needed: the checkpoint is a folder. Weights of 8 bits have a scale and a zero point a row; of 4 bits
a scale and a zero point a group. Everything is quantised, the embedding and the head to 8 bits at
least, as OpenVINO does by default.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
TYPES = ("bf16", "int8", "int4")


def main() -> int:
    """Save one folder. Returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a folder that transformers loads")
    parser.add_argument("output", type=Path, help="a folder that does not exist")
    parser.add_argument("--type", choices=TYPES, default="int8", help="of the weights (int8)")
    parser.add_argument("--group-size", type=int, default=128, help="of int4 (128)")
    parser.add_argument("--all-layers", action="store_true", help="int4 for embedding and head too")
    given = parser.parse_args()
    checkpoint, output = given.checkpoint.expanduser(), given.output.expanduser()
    if output.exists():
        print(f"{output} exists already: give another name", file=sys.stderr)
        return 2
    if not (checkpoint / "config.json").is_file():
        print(f"{checkpoint} has no config.json: give a folder with a checkpoint", file=sys.stderr)
        return 2
    try:
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    except ImportError as error:
        print(f"{error}: run it with an interpreter that has optimum-intel", file=sys.stderr)
        return 2
    quantization: dict[str, Any] = {"load_in_8bit": False}
    if given.type != "bf16":
        config = (
            OVWeightQuantizationConfig(bits=8)
            if given.type == "int8"
            else OVWeightQuantizationConfig(
                bits=4, group_size=given.group_size, ratio=1.0, all_layers=given.all_layers
            )
        )
        quantization = {"quantization_config": config}
    model = OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, compile=False, local_files_only=True, **quantization
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        made = Path(temporary) / "made"
        model.save_pretrained(made)
        save_tokenizer(checkpoint, made)
        os.replace(made, output)
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"{output}: {size:,} bytes")
    return 0


def save_tokenizer(checkpoint: Path, output: Path) -> None:
    """Convert the tokenizer, which the engine loads beside the model."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    parts = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), parts, strict=True):
        openvino.save_model(part, output / f"openvino_{name}.xml")


if __name__ == "__main__":
    sys.exit(main())
