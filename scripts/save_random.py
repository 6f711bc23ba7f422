#!/usr/bin/env python3
"""Save a model's architecture with random weights as a checkpoint, so that every engine reads the
same folder.

    python scripts/save_random.py ~/qwen3-random model=qwen3
    python run.py model=hf model.path=$HOME/qwen3-random

The weights are those of `model.weights=random`. The tokenizer has bytes, and words of letters for
all other ids: it is there for engines that need one, its texts mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import string
import sys
import tempfile
from collections.abc import Sequence
from itertools import count, islice, product
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.loading import tensor_shapes
from minivllm.models.load.source import resolve
from minivllm.models.load.weights import RandomWeights

END = "<|end|>"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="a folder that does not exist")
    parser.add_argument("overrides", nargs="+", help="model=... and its knobs")
    given = parser.parse_args(arguments)
    try:
        number = save_random(given.output.expanduser(), given.overrides)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{number} tensors in {given.output}")
    return 0


def save_random(output: Path, overrides: Sequence[str]) -> int:
    """Write a checkpoint of random weights, in the dtype that the architecture names.

    Args:
        output: a folder, which must not exist; it exists only when it is complete.
        overrides: of the group `model`.

    Returns:
        The number of tensors.

    Raises:
        BadInput: `output` exists, or the model has no architecture.
    """
    if output.exists():
        raise BadInput(f"{output} exists already: give a new folder")
    node = compose([*overrides, "model.weights=random"])["model"]
    source = resolve(node, allow_random=True)[1]
    config = ModelConfig.from_dict(source.config)
    dtype = getattr(torch, config.dtype or "bfloat16")
    weights, tensors = RandomWeights(node["seed"]), {}
    for name, shape in tensor_shapes(config, dtype).items():
        assert shape is not None
        tensors[name] = torch.empty(shape, dtype=dtype)
        weights.fill(name, tensors[name])
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        text = json.dumps(_named(source.config), indent=2)
        (made / "config.json").write_text(f"{text}\n", encoding="utf-8")
        any_tokenizer(config.vocab_size).save(str(made / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (made / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
        os.replace(made, output)
    return len(tensors)


def _named(config: dict[str, object]) -> dict[str, object]:
    """config.json with its `model_type`, which transformers asks for and the options leave out."""
    import transformers

    architecture = config["architectures"]
    assert isinstance(architecture, list)
    kind = getattr(transformers, str(architecture[0])).config_class.model_type
    return {"model_type": kind, **config}


def any_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE of so many tokens: bytes, words of letters, and a special one at the end.

    One of the words is a merge: OpenVINO's converter asks for a merge and for a special token.
    """
    words = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    letters = (
        "".join(word)
        for length in count(2)
        for word in product(string.ascii_lowercase, repeat=length)
    )
    words += islice(letters, size - 1 - len(words))
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a")] if "aa" in vocabulary else []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
