"""The tokenizer files of a checkpoint: read, checked, and made into a tokenizer. Free of torch and
of transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from minivllm.errors import BadInput
from minivllm.models.load.checkpoint import MERGES, TOKENIZER, VOCAB
from minivllm.platform.untrusted import (
    MAX_TOKENIZER,
    MIB,
    named,
    read_bytes,
    read_object,
    read_text,
)

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE = "chat_template.jinja"
_FILES = (TOKENIZER, CONFIG, SPECIAL, ADDED, VOCAB, MERGES)
MAX_CONFIG, MAX_TEMPLATE = 16 * MIB, 4 * MIB
STANDARD = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
NAMED = ("extra_special_tokens", "model_specific_special_tokens")  # objects: name -> token
# How Qwen's tokenizers cut text before their merges, as tokenizer.json of Qwen2 says it.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ID = re.compile(r"[0-9]{1,10}")
_ADVICE = "repair it, or download the checkpoint again"


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a checkpoint's tokenizer files.

    Args:
        fast: encodes text.
        special_tokens: name, such as "bos_token", to text, of those that the checkpoint names.
        chat_template: Jinja source; None for a base model.
        named_templates: further chat templates of a GGUF file, by name.
    """

    fast: FastTokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    named_templates: dict[str, str] = field(default_factory=dict)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer in a supported form: tokenizer.json, or vocab.json and
    merges.txt."""
    return named(folder / TOKENIZER) or all(named(folder / name) for name in (VOCAB, MERGES))


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read a checkpoint's tokenizer.

    Raises:
        BadInput: naming the file, where one is missing, larger than any tokenizer, or holds what no
            tokenizer can.
    """
    config = _optional(folder / CONFIG)
    names = _special_names(folder, config)
    template = folder / TEMPLATE
    fast = (_tokenizer_json if named(folder / TOKENIZER) else _from_merges)(folder, config)
    # As transformers does: what a checkpoint names as a special token is one, whatever
    # tokenizer.json says of it; one that is keeps how it takes in spaces.
    special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
    known = [
        AddedToken(text, special=True)
        for text in names.values()
        if fast.token_to_id(text) is not None and text not in special
    ]
    fast.add_special_tokens(known)
    return TokenizerFiles(
        fast,
        names,
        read_text(template, MAX_TEMPLATE, str(template), _ADVICE)
        if named(template)
        else _default_template(folder / CONFIG, config.get("chat_template")),
    )


def named_token_id(folder: Path, name: str) -> int | None:
    """Token id of "eos_token", ... of a checkpoint; None where it has no tokenizer, or one that
    names none.

    The tokenizer itself is read only where tokenizer_config.json does not say the id, and once for
    as long as its files stay as they are.

    Raises:
        BadInput: a file cannot be read.
    """
    if not has_tokenizer(folder):
        return None
    files = [(file, os.stat(file)) for name in _FILES if (file := folder / name).exists()]
    state = tuple((file, at.st_ino, at.st_mtime_ns, at.st_size) for file, at in files)
    return _named_token_id(folder, name, state)


@lru_cache(maxsize=64)
def _named_token_id(folder: Path, name: str, _: tuple[object, ...]) -> int | None:
    """See `named_token_id`; the last argument changes with the files."""
    config = _optional(folder / CONFIG)
    if not (text := _special_names(folder, config).get(name)):
        return None
    listed = config.get("added_tokens_decoder")
    for token_id, token in listed.items() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and token.get("content") == text and _ID.fullmatch(token_id):
            return int(token_id)
    return read_tokenizer(folder).fast.token_to_id(text)


def as_bad_input(what: str, error: BaseException) -> BaseException:
    """What to raise in place of an error of the tokenizers library, which raises bare exceptions,
    and whose Rust code panics, which are no exceptions.

    Returns:
        A BadInput beginning with `what`; `error` itself if it is not the library's, as an
        interrupt.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return BadInput(f"{what} ({str(error)[:200] or type(error).__name__})")


def check_charsmap(normalizer: Any) -> None:
    """Have a damaged map of characters panic now, and not at the first text that has one of
    them."""
    normalizer.normalize_str("".join(map(chr, (*range(1, 0xD800), *range(0xE000, 0x10000)))))


def _tokenizer_json(folder: Path, _: Mapping[str, Any]) -> FastTokenizer:
    path = folder / TOKENIZER
    content = read_bytes(path, MAX_TOKENIZER, str(path), _ADVICE)
    try:
        fast = FastTokenizer.from_buffer(content)
        if b'"Precompiled"' in content and fast.normalizer is not None:
            check_charsmap(fast.normalizer)
    except BaseException as error:
        raise as_bad_input(f"{path} cannot be read as a tokenizer; {_ADVICE}", error) from None
    fast.no_truncation()  # what a checkpoint was trained with is no part of what a prompt says
    fast.no_padding()
    return fast


def _optional(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    return read_object(path, str(path), _ADVICE, MAX_CONFIG) if named(path) else {}


def _special_names(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Names of special tokens, and their texts.

    As in transformers 5, special_tokens_map.json counts where tokenizer_config.json is of the time
    before it listed all added tokens itself; and a name that tokenizer_config.json lacks is taken
    from it in any case.
    """
    texts: dict[str, str] = {}
    sources = [(folder / CONFIG, config), (folder / SPECIAL, _optional(folder / SPECIAL))]
    for path, source in sources[::-1] if "added_tokens_decoder" in config else sources:
        groups = [source, *(group for key in NAMED if isinstance(group := source.get(key), dict))]
        for group in groups:
            for name, value in group.items():
                if name.endswith("_token") and (
                    name in STANDARD or _is_token(value) or group is not source
                ):
                    text = _text(path, name, value)
                    if text is not None:
                        texts[name] = text
    return texts


def _is_token(value: Any) -> bool:
    """Whether a value of a further key, such as "image_token", is a token; "add_bos_token" is a
    flag."""
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _text(path: Path, name: str, value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise BadInput(f"{path}: {name}={value!r:.60} must be a token's text; {_ADVICE}")
    return content


def _default_template(path: Path, templates: Any) -> str | None:
    """The default chat template, where a checkpoint has several."""
    if templates is None or isinstance(templates, str):
        return templates
    default = None
    for entry in templates if isinstance(templates, list) else [None]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                default = template if name == "default" else default
            case _:
                raise BadInput(
                    f"{path}: chat_template must be text, or a list of objects with name and "
                    f"template; {_ADVICE}"
                )
    return default


def _from_merges(folder: Path, config: Mapping[str, Any]) -> FastTokenizer:
    """A byte-level BPE tokenizer of vocab.json and merges.txt (GPT-2, Radford et al. 2019;
    Qwen2)."""
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if kind not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        raise BadInput(
            f"{folder} has {VOCAB} and {MERGES} of tokenizer_class={kind or 'null'}, and only "
            f"those of GPT2Tokenizer and Qwen2Tokenizer are read without {TOKENIZER}: make one "
            "with transformers' AutoTokenizer and save_pretrained"
        )
    vocab = read_object(folder / VOCAB, str(folder / VOCAB), _ADVICE, MAX_TOKENIZER)
    if not all(type(index) is int and 0 <= index < 1 << 31 for index in vocab.values()):
        raise BadInput(f"{folder / VOCAB}: must be token -> id, whole numbers from 0; {_ADVICE}")
    lines = read_text(folder / MERGES, MAX_TOKENIZER, str(folder / MERGES), _ADVICE).split("\n")
    merges: list[Any] = [
        tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")
    ]
    for merge in merges:
        if len(merge) != 2:
            raise BadInput(
                f"{folder / MERGES}: {' '.join(merge)!r:.60} is no pair of tokens; {_ADVICE}"
            )
    try:
        fast = FastTokenizer(BPE(vocab, merges))
    except BaseException as error:
        what = f"{folder / MERGES} does not fit {VOCAB}; {_ADVICE}"
        raise as_bad_input(what, error) from None
    space = bool(config.get("add_prefix_space"))
    if kind == "GPT2Tokenizer":
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    else:
        fast.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN), behavior="isolated")
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)]
        )
    fast.decoder = decoders.ByteLevel()
    _add_tokens(fast, folder, config)
    return fast


def _add_tokens(fast: FastTokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that lie outside the vocabulary, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    further = _optional(folder / ADDED)
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    added: dict[int, AddedToken] = {}
    try:
        for text, index in further.items():
            added[int(index)] = AddedToken(str(text), normalized=False)
        for index, entry in listed.items():
            known = {name: bool(entry[name]) for name in flags if name in entry}
            added[int(index)] = AddedToken(str(entry["content"]), **known)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadInput(
            f"{folder / CONFIG}, {folder / ADDED}: added tokens must be objects with an id and a "
            f"content; {_ADVICE}"
        ) from None
    for index in sorted(added):
        fast.add_tokens([added[index]])
        if fast.token_to_id(str(added[index].content)) != index:
            raise BadInput(
                f"{folder}: added token {added[index].content!r:.40} has id {index}, which does "
                f"not follow the vocabulary of {VOCAB}; {_ADVICE}"
            )
