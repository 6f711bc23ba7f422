"""The vocabulary of a GGUF file: its tokens, the type of each, and those with a name. Free of torch
and of tokenizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from minivllm.errors import BadInput
from minivllm.models.load.gguf.file import GGUFFile
from minivllm.platform.untrusted import printable

KIND, TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"
_TYPES, _SCORES = "tokenizer.ggml.token_type", "tokenizer.ggml.scores"
ADVICE = "convert the model again, or download the file again"
SPACE = "\u2581"  # stands for a space in the tokens of sentencepiece
_LONGEST = 1024  # characters of a token; the longest published ones, of spaces, have a few hundred
_ABSENT = (1 << 32) - 1  # the id of a token that a model lacks
# Ids where a file has no key for them, as in llama.cpp.
_DEFAULTS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS = ("eos", "eot", "eom")
# Texts of tokens that end a turn. A file names one end of several, as Phi-3's does.
_END_TEXTS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)


class Type(IntEnum):
    """The type of a token: a value of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file.

    Args:
        file: the header.
        kind: `tokenizer.ggml.model`.
        tokens: texts by id, none twice.
        types: by id. Tokens that begin or end a text are of type CONTROL, unless the file says that
            they are normal ones, as where it has the id from a model's default.
        names: texts by "bos_token", "eos_token", ... of those that the file names and that are no
            normal ones.
    """

    file: GGUFFile
    kind: str
    tokens: list[str]
    types: list[int]
    names: dict[str, str]

    @classmethod
    def read(cls, file: GGUFFile) -> Vocabulary:
        """Read and check the tokens.

        Raises:
            BadInput: there are more, or a longer one, than in any vocabulary; one is there twice;
                their types are not as many; or the first token of a text is none of them.
        """
        kind = file.values.text(KIND, "")
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(file.texts(TOKENS) or [])]
        stated = file.numbers(_TYPES) or []
        types = stated or [Type.NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise BadInput(f"{file.path}: {len(tokens)} tokens have {len(types)} types; {ADVICE}")
        if kind != "gpt2":
            tokens = [_with_spaces(*pair) for pair in zip(tokens, types, strict=True)]
        _check(file, tokens)
        named = {name: _special_id(file, name, types) for name in _NAMES}
        if (first := named["bos"]) is not None and first >= len(tokens):
            key = "tokenizer.ggml.bos_token_id"
            file.values.fail(key, f"is no token: there are {len(tokens):,}; {ADVICE}")
        for token in (first, *read_ends(file)):
            if token is not None and token < len(tokens):
                usual = bool(stated) and stated[token] == Type.NORMAL
                types[token] = Type.NORMAL if usual else Type.CONTROL
        names = {
            _NAMES[name]: tokens[token]
            for name, token in named.items()
            if token is not None and token < len(tokens) and types[token] != Type.NORMAL
        }
        return cls(file, kind, tokens, types, names)

    @property
    def ids(self) -> dict[str, int]:
        """Token to id."""
        return {token: index for index, token in enumerate(self.tokens)}

    def of_type(self, *types: Type) -> list[str]:
        """The tokens of some types, in the order of their ids."""
        return [token for token, own in zip(self.tokens, self.types, strict=True) if own in types]

    def check_size(self, tokens: list[str], most: int) -> None:
        """Raise BadInput for tokens of more bytes than what is made of them may be made of."""
        if (size := sum(len(token.encode()) for token in tokens)) > most:
            raise BadInput(
                f"{self.file.path}: {len(tokens):,} tokens of {TOKENS} have {size:,} bytes, more "
                f"than in any vocabulary; {ADVICE}"
            )

    def scores(self) -> list[float] | None:
        """Scores by id; None where the file has none. Raises BadInput for others than a finite
        number for each token."""
        scores = self.file.numbers(_SCORES)
        if not scores:
            return None
        if len(scores) != len(self.tokens):
            raise BadInput(
                f"{self.file.path}: {len(self.tokens)} tokens have {len(scores)} scores; {ADVICE}"
            )
        if not all(map(math.isfinite, scores)):
            raise BadInput(f"{self.file.path}: {_SCORES} has numbers that are not finite; {ADVICE}")
        return [float(score) for score in scores]


def read_ends(file: GGUFFile) -> list[int]:
    """The ids of the tokens that end an answer: those that the file names, and those that end a
    turn by their text and are no part of one. Some may lie beyond the vocabulary."""
    types = file.numbers(_TYPES) or []
    found = file.indices(TOKENS, _END_TEXTS).values()
    known = sorted(i for i in found if i < len(types) and types[i] != Type.NORMAL)
    named = [_special_id(file, name, types) for name in _ENDS]
    return [*dict.fromkeys(token for token in (*named, *known) if token is not None)]


def _special_id(file: GGUFFile, name: str, types: Sequence[int]) -> int | None:
    """The id of "bos", "eos", ... by its key, or by default where that token is no part of a
    text."""
    token = file.values.integer(f"tokenizer.ggml.{name}_token_id", None, 0, _ABSENT)
    if token is not None:
        return None if token == _ABSENT else token
    default = _DEFAULTS.get(file.values.text(KIND, ""), {}).get(name, len(types))
    return default if types[default : default + 1] not in ([], [Type.NORMAL]) else None


def _with_spaces(token: str, own: int) -> str:
    """A token of sentencepiece as it is matched: a user-defined one with the text itself, any other
    with text whose spaces are `SPACE`. Files write both either way."""
    if own == Type.USER_DEFINED:
        return token.replace(SPACE, " ")
    return SPACE * len(token) if " " in token and not token.strip(" ") else token


def _check(file: GGUFFile, tokens: list[str]) -> None:
    """Raise BadInput for a token that is there twice, or longer than any can be."""
    if longer := [index for index, token in enumerate(tokens) if len(token) > _LONGEST]:
        raise BadInput(
            f"{file.path}: token {longer[0]} of {TOKENS} has {len(tokens[longer[0]]):,} "
            f"characters, more than any vocabulary has; {ADVICE}"
        )
    if len(set(tokens)) != len(tokens):
        last = {token: index for index, token in enumerate(tokens)}
        twice = next(token for index, token in enumerate(tokens) if last[token] != index)
        raise BadInput(f"{file.path}: {TOKENS} has {printable(twice)[:40]!r} twice; {ADVICE}")
