"""The tokenizer of a GGUF file as files beside a checkpoint, which transformers opens. Free of
torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.load.checkpoint import GENERATION, TOKENIZER
from minivllm.models.load.gguf.config import config_of
from minivllm.models.load.gguf.tokenizer import read_tokenizer
from minivllm.models.load.tokenizer_files import CONFIG, TEMPLATE, TokenizerFiles
from minivllm.platform.untrusted import printable

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TEMPLATES = "additional_chat_templates"  # the folder that transformers has for them
_NAME = re.compile(r"[\w-]{1,100}")


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, the chat templates, and generation_config.json
    with the tokens that end an answer. Without a tokenizer there is the last of them alone.

    Args:
        path: the GGUF file.
        folder: where they are written; it must exist.

    Raises:
        BadInput: the file has no tokenizer that is read, or a template's name is none of a file.
    """
    config, files = config_of(path), read_tokenizer(path)
    ends = [token for token in config["eos_token_id"] if token < config["vocab_size"]]
    generation: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    if files is not None:
        for name in ("bos_token", "pad_token"):
            if name in files.special_tokens:
                token = files.fast.token_to_id(files.special_tokens[name])
                generation[f"{name}_id"] = token
        _write_templates(path, folder, files)
        files.fast.save(str(folder / TOKENIZER))
        _write(folder / CONFIG, _tokenizer_config(files, config["max_position_embeddings"]))
    _write(folder / GENERATION, generation)


def _tokenizer_config(files: TokenizerFiles, length: int) -> dict[str, Any]:
    """What transformers reads beside tokenizer.json. Its first and last tokens are those of
    tokenizer.json, since no flag says another."""
    added = files.fast.get_added_tokens_decoder()
    return {
        "added_tokens_decoder": {
            str(index): {"content": token.content} | {flag: getattr(token, flag) for flag in _FLAGS}
            for index, token in sorted(added.items())
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        # A class of transformers has defaults of its own for those that are not named.
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token")),
        **files.special_tokens,
    }


def _write_templates(path: Path, folder: Path, files: TokenizerFiles) -> None:
    """The chat template, and those with a name."""
    if files.chat_template is not None:
        (folder / TEMPLATE).write_text(files.chat_template, encoding="utf-8")
    for name, template in files.named_templates.items():
        if not _NAME.fullmatch(name):
            raise BadInput(
                f"{path}: the chat template {printable(name)[:40]!r} has no name that a file may "
                "have"
            )
        (folder / _TEMPLATES).mkdir(exist_ok=True)
        (folder / _TEMPLATES / f"{name}.jinja").write_text(template, encoding="utf-8")


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(values, indent=2, ensure_ascii=False)}\n", encoding="utf-8")
