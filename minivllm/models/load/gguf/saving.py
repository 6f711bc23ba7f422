"""A GGUF file as a checkpoint that transformers and this project load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.models.config import ModelConfig
from minivllm.models.family_defaults import BY_MODEL_TYPE
from minivllm.models.load.filling import tensor_shapes
from minivllm.models.load.gguf.config import read_config
from minivllm.models.load.gguf.file import GGUFFile
from minivllm.models.load.gguf.saved_tokenizer import write_tokenizer
from minivllm.models.load.gguf.weights import open_weights
from minivllm.models.load.saving import save_checkpoint, stored_dtype
from minivllm.models.load.weights import Progress

_FURTHER = {"bos_token_id": "bos", "pad_token_id": "padding"}


def convert(path: Path, output: Path, dtype: str, progress: Progress | None = None) -> int:
    """Write the weights of a GGUF file as .safetensors, with config.json and the tokenizer beside
    them.

    Args:
        path: the file.
        output: the folder to make; it must not exist.
        dtype: of the weights: bfloat16, float16 or float32.
        progress: called with the bytes read so far, and those of all tensors.

    Returns:
        Number of tensors.

    Raises:
        BadInput: the file cannot be read, a weight is beyond the dtype, or `output` exists or
            cannot be written; nothing is left of it.
    """
    reader = open_weights(path, progress)
    config = config_json(path, dtype)
    model = ModelConfig.from_dict(config, str(path))
    reader.check(tensor_shapes(model, stored_dtype(config)), model.tie_word_embeddings)
    return save_checkpoint(
        output,
        config,
        reader.fill,
        lambda made: write_tokenizer(path, made),
        f"task.output={output}",
    )


def config_json(path: Path, dtype: str) -> dict[str, Any]:
    """The config.json of a file's model with what transformers needs beside this project: the type
    of the model, and each token id that it has another default of."""
    file = GGUFFile.open(path)
    config = read_config(file)
    kinds = {architecture: kind for kind, architecture in BY_MODEL_TYPE.items()}
    further = {
        key: _token_id(file, f"tokenizer.ggml.{name}_token_id", config["vocab_size"])
        for key, name in _FURTHER.items()
    }
    return {"model_type": kinds[config["architectures"][0]], **config, **further, "dtype": dtype}


def _token_id(file: GGUFFile, key: str, vocabulary: int) -> int | None:
    token: int | None = file.values.integer(key, None, low=0, high=(1 << 32) - 1)
    return token if token is not None and token < vocabulary else None
