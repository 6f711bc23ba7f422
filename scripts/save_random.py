#!/usr/bin/env python3
"""Save a model's architecture with random weights as a checkpoint, so that every engine reads the
same folder.

    python scripts/save_random.py ~/qwen3-random model=qwen3
    python run.py model=hf model.path=$HOME/qwen3-random

The weights are those of `model.weights=random`. The tokenizer has bytes, and words of letters for
all other ids: it is there for engines that need one, its texts mean nothing. That of a model which
takes images has their marks, too, and a chat template.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Mapping, Sequence
from itertools import count, islice, product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from program import exit_code, new_parser

from minivllm.config.compose import compose
from minivllm.errors import NotInstalled, install
from minivllm.models.config import ModelConfig
from minivllm.models.load.saving import save_checkpoint
from minivllm.models.load.source import resolve
from minivllm.models.load.weights import RandomWeights
from minivllm.models.registry import sees
from minivllm.models.vision.registry import image_processor
from minivllm.models.vision.smolvlm_processor import GLOBAL_MARK, MARK

END = "<|end|>"
TILES = 6  # most rows and columns of tiles that have a mark
# Of models that take images: conversations as lines, with a mark for each picture.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}IMAGE{% endif %}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0; raises BadInput."""
    parser = new_parser(__doc__)
    parser.add_argument("output", type=Path, help="a folder that does not exist")
    parser.add_argument("overrides", nargs="+", help="model=... and its knobs")
    given = parser.parse_args(arguments)
    number = save_random(given.output.expanduser(), given.overrides)
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
    config = architecture(overrides)
    weights = RandomWeights(compose([*overrides])["model"]["seed"])
    return save_checkpoint(output, config, weights.fill, lambda made: add_tokenizer(made, config))


def architecture(overrides: Sequence[str]) -> dict[str, Any]:
    """The config.json of a model. Raises BadInput where it has none."""
    node = compose([*overrides, "model.weights=random"])["model"]
    return _named(resolve(node, allow_random=True)[1].config)


def add_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a tokenizer for a model, with a chat template where it takes images."""
    marks = image_marks(config)
    size = ModelConfig.from_dict(config).vocab_size
    any_tokenizer(size, marks).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if marks:
        about["chat_template"] = TEMPLATE.replace("IMAGE", placeholder(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with its `model_type`, which transformers asks for and the options leave out."""
    try:
        import transformers
    except ImportError:
        raise NotInstalled(f"save_random.py needs transformers: {install('peers')}") from None

    architecture = config["architectures"]
    assert isinstance(architecture, list)
    kind = getattr(transformers, str(architecture[0])).config_class.model_type
    return {"model_type": kind, **config}


def placeholder(config: Mapping[str, Any]) -> str:
    """What a message has where an image is."""
    return image_processor(config, None).placeholder


def image_marks(config: Mapping[str, Any]) -> dict[int, str]:
    """The special tokens of a model that takes images, by their ids; none of another."""
    if not sees(str(config["architectures"][0])):
        return {}
    image = config["image_token_id"]
    if "vision_start_token_id" in config:
        ends = {config[f"vision_{end}_token_id"]: f"<|vision_{end}|>" for end in ("start", "end")}
        return {image: "<|image_pad|>", **ends}
    tiles = [f"<row_{y}_col_{x}>" for y, x in product(range(1, TILES + 1), repeat=2)]
    below = {image - i: mark for i, mark in enumerate((MARK, GLOBAL_MARK, *tiles), start=1)}
    return {image: placeholder(config), **below}


def any_tokenizer(size: int, marks: Mapping[int, str] | None = None) -> Tokenizer:
    """A byte-level BPE of so many tokens: bytes, words of letters, and a special one at the end.

    One of the words is a merge: OpenVINO's converter asks for a merge and for a special token.

    Args:
        size: of the vocabulary.
        marks: further special tokens by their ids.
    """
    words = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    letters = (
        "".join(word)
        for length in count(2)
        for word in product(string.ascii_lowercase, repeat=length)
    )
    words += islice(letters, size - 1 - len(words))
    for index, mark in (marks or {}).items():
        words[index] = mark
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a")] if "aa" in vocabulary else []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*(marks or {}).values(), END])
    return tokenizer


if __name__ == "__main__":
    sys.exit(exit_code(main))
