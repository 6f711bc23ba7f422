"""The tokenizer of a GGUF file, built from its metadata. Free of torch.

Two kinds are read: byte-level BPE ("gpt2"), whose text is cut by a rule that the file only names,
and the BPE of sentencepiece ("llama"), whose merges follow from the tokens' scores. The rules and
their names are llama.cpp's (`llama-vocab.cpp`)."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from minivllm.errors import BadInput
from minivllm.models.load.gguf.file import GGUFFile
from minivllm.models.load.tokenizer_files import (
    MAX_TEMPLATE,
    QWEN,
    TokenizerFiles,
    as_bad_input,
)
from minivllm.platform.untrusted import printable

_KIND, _TOKENS, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.pre"
_ADVICE = "convert the model again, or download the file again"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}{_TAIL}"
_GPT4O = rf"{_WORDS[0]}{_SHORT}|{_WORDS[1]}{_SHORT}|\p{{N}}{{1,3}}{_TAIL}"
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")  # a word that is a token
# By `tokenizer.ggml.pre`: how text is cut before its merges. None: as GPT-2 does.
CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (QWEN,)),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "gpt-2": (),
    **dict.fromkeys(("smollm", "codeshell", "exaone"), (r"\p{N}",)),
}
_NFC = ("qwen2", "deepseek-r1-qwen")  # in the models' own tokenizers
_SPACE = "\u2581"
_LONGEST = 1024  # characters of a token; the longest published ones, of spaces, have a few hundred
# Most characters that are copied to find merges: the cuts of a token are as many as its characters.
# Published vocabularies need some 20 million; so many take seconds.
_MOST_COPIED = 1_000_000_000
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class _Type(IntEnum):
    """What a token is: `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def read_tokenizer(path: Path) -> TokenizerFiles | None:
    """Build the tokenizer of a file; None if the file has none.

    Raises:
        BadInput: it is of a kind that is not read, or its parts do not fit each other.
    """
    file = GGUFFile.open(path)
    values = file.values
    kind = values.text(_KIND, "none")
    if kind in ("none", "no_vocab") or _TOKENS not in file.metadata:
        return None
    if kind not in ("gpt2", "llama"):
        raise BadInput(
            f"{path}: {_KIND}={printable(kind)[:40]!r} is not read, only gpt2 (byte-level BPE) and "
            "llama (sentencepiece's BPE)"
        )
    tokens = file.texts(_TOKENS) or []
    types = file.numbers("tokenizer.ggml.token_type") or [_Type.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise BadInput(f"{path}: {len(tokens)} tokens have {len(types)} types; {_ADVICE}")
    names = {
        name: tokens[index]
        for key, name in _NAMES.items()
        if (index := values.integer(f"tokenizer.ggml.{key}_token_id", None, 0, (1 << 32) - 1))
        is not None
        and index < len(tokens)
    }
    build = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        fast = build(file, tokens, types)
        _add_tokens(fast, tokens, types)
        _add_ends(fast, file, names)
    except BadInput:
        raise
    except BaseException as error:
        what = f"{path} holds no usable tokenizer; {_ADVICE}"
        raise as_bad_input(what, error) from None
    template = values.text("tokenizer.chat_template", None)
    if template is not None and len(template) > MAX_TEMPLATE:
        values.fail("tokenizer.chat_template", "is longer than any template")
    return TokenizerFiles(fast, names, template)


def _vocabulary(file: GGUFFile, tokens: list[str]) -> dict[str, int]:
    """Token to id. Raises BadInput for one that is there twice, or longer than any can be."""
    if longer := [index for index, token in enumerate(tokens) if len(token) > _LONGEST]:
        raise BadInput(
            f"{file.path}: token {longer[0]} of {_TOKENS} has {len(tokens[longer[0]]):,} "
            f"characters, more than any vocabulary has; {_ADVICE}"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise BadInput(f"{file.path}: {_TOKENS} has {printable(twice)[:40]!r} twice; {_ADVICE}")
    return vocabulary


def _byte_level(file: GGUFFile, tokens: list[str], types: list[int]) -> FastTokenizer:
    """A BPE over bytes, with the merges of the file."""
    rule = file.values.text(_PRE, None)
    if rule is None:
        raise BadInput(
            f"{file.path} does not say how text is cut ({_PRE}): convert the model again"
        )
    if rule not in CUTS:
        raise BadInput(
            f"{file.path}: {_PRE}={printable(rule)[:40]!r} is not read; read are {', '.join(CUTS)}"
        )
    merges: list[Any] = []
    for line in file.texts("tokenizer.ggml.merges") or ():
        pair = tuple(line.split(" "))
        if len(pair) != 2:
            raise BadInput(
                f"{file.path}: the merge {printable(line)[:40]!r} is no pair of tokens; {_ADVICE}"
            )
        merges.append(pair)
    vocabulary = _vocabulary(file, tokens)
    fast = FastTokenizer(BPE(vocabulary, merges, ignore_merges=rule in WHOLE_WORDS))
    if rule in _NFC:
        fast.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in CUTS[rule]]
    as_gpt2 = not cuts or CUTS[rule] == (r"\p{N}",)
    cuts += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=as_gpt2)]
    fast.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> FastTokenizer:
    """A BPE over characters, with bytes for those that it lacks.

    Of all pairs that form a token, the one with the best score is merged first; Gemma's scores are
    not in the order of its merges, which the ids are."""
    gemma = str(file.metadata.get("general.architecture")).startswith("gemma")
    if gemma:  # whose tokens of spaces are stored as spaces
        tokens[:] = [_SPACE * len(t) if " " in t and not t.strip(" ") else t for t in tokens]
    vocabulary = _vocabulary(file, tokens)
    scores: list[float] = [-float(index) for index in range(len(tokens))]
    if not gemma:
        scores = file.numbers("tokenizer.ggml.scores") or scores
    if len(scores) != len(tokens):
        raise BadInput(f"{file.path}: {len(tokens)} tokens have {len(scores)} scores; {_ADVICE}")
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == _Type.UNKNOWN]
    merges = _merges(file.path, tokens, types, vocabulary, scores)
    model = BPE(
        vocabulary,
        merges,
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    fast = FastTokenizer(model)
    prefix = file.values.flag("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE)] * prefix + spaces)
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * prefix)
    return fast


def _merges(
    path: Path, tokens: list[str], types: list[int], vocabulary: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token, the best first. Raises BadInput where looking for
    them would take minutes."""
    if (copied := sum(len(token) ** 2 for token in tokens)) > _MOST_COPIED:
        raise BadInput(
            f"{path}: the {len(tokens):,} tokens of {_TOKENS} are so long that looking for their "
            f"merges copies {copied:,} characters, more than any vocabulary needs; {_ADVICE}"
        )
    pairs: list[tuple[float, int, int, tuple[str, str]]] = []
    for index, token in enumerate(tokens):
        if types[index] != _Type.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-scores[index], index, cut, (left, right)))
    pairs.sort()
    return [pair for _, _, _, pair in pairs]


def _add_tokens(fast: FastTokenizer, tokens: list[str], types: list[int]) -> None:
    """Make whole tokens of those that no text is cut through: control tokens and the unknown one,
    which are no part of a text (as in llama.cpp), and user-defined ones."""
    pairs = [*zip(tokens, types, strict=True)]
    for kinds, special in (((_Type.CONTROL, _Type.UNKNOWN), True), ((_Type.USER_DEFINED,), False)):
        fast.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, own in pairs
                if own in kinds and token
            ]
        )


def _add_ends(fast: FastTokenizer, file: GGUFFile, names: dict[str, str]) -> None:
    """Have the tokenizer add the first and last token to a text, as the file says it."""
    values = file.values
    default = values.text(_KIND, "") == "llama" or values.text(_PRE, "") in WHOLE_WORDS
    text: list[str] = ["$A"]
    if values.flag("tokenizer.ggml.add_bos_token", default) and "bos_token" in names:
        text.insert(0, names["bos_token"])
    if values.flag("tokenizer.ggml.add_eos_token", False) and "eos_token" in names:
        text.append(names["eos_token"])
    if len(text) > 1:
        special = [(token, fast.token_to_id(token)) for token in text if token != "$A"]
        fast.post_processor = processors.TemplateProcessing(
            single=text, pair=[*text, "$B"], special_tokens=[*dict.fromkeys(special)]
        )
