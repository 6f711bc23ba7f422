"""The two models of sentencepiece in a GGUF file: its BPE ("llama"), whose merges follow from the
tokens' scores, and its unigram model ("t5"), whose scores are log-probabilities. Free of torch."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE, Unigram

from minivllm.errors import BadInput
from minivllm.models.load.gguf.vocabulary import (
    ADVICE,
    SPACE,
    TOKENS,
    Type,
    Vocabulary,
)
from minivllm.models.load.tokenizer_files import check_charsmap

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
# Most characters that are copied to find merges: the cuts of a token are as many as its characters.
# Published vocabularies need some 20 million; so many take seconds.
_MOST_COPIED = 1_000_000_000
# Most bytes of the tokens of a unigram model, each a node of its tree of some 350 bytes of memory.
# Published ones have some 3 million.
_MOST_BYTES = 5_000_000
# Where text that is written as a token of a byte is cut, which is no such token.
_IN_BYTE = r"<(?=0x[0-9A-F]{2}>)"


def merging(vocabulary: Vocabulary) -> FastTokenizer:
    """The BPE over characters, with bytes for those that it lacks.

    Of all pairs that form a token, the one with the best score is merged first; Gemma's scores are
    not in the order of its merges, which the ids are.

    Raises:
        BadInput: its scores do not fit, or its merges are too many to look for.
    """
    ids = vocabulary.ids
    gemma = str(vocabulary.file.metadata.get("general.architecture")).startswith("gemma")
    scores = None if gemma else vocabulary.scores()
    if scores is None:
        scores = [-float(index) for index in range(len(vocabulary.tokens))]
    unknown = vocabulary.of_type(Type.UNKNOWN)
    model = BPE(
        ids,
        _merges(vocabulary, ids, scores),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    return _with_spaces(FastTokenizer(model), vocabulary, prefix=True)


def unigram(vocabulary: Vocabulary) -> FastTokenizer:
    """The unigram model: of all ways to write a text in tokens, the most probable one (Kudo, 2018).
    A character that no token has becomes its bytes where there are tokens of them.

    Raises:
        BadInput: there are no scores, or none of its tokens stands for unknown text.
    """
    path, types = vocabulary.file.path, vocabulary.types
    scores = vocabulary.scores()
    unknown = vocabulary.of_type(Type.UNKNOWN)
    if scores is None or not unknown:
        what = "scores" if scores is None else "token for unknown text"
        raise BadInput(f"{path}: a unigram model of tokens needs {what}; {ADVICE}")
    vocabulary.check_size(vocabulary.tokens, _MOST_BYTES)
    usual = [score for score, own in zip(scores, types, strict=True) if own == Type.NORMAL]
    least = min(usual, default=0.0)  # of tokens that are no part of a text
    pairs = [
        (token, score if own == Type.NORMAL else least)
        for token, score, own in zip(vocabulary.tokens, scores, types, strict=True)
    ]
    has_bytes = Type.BYTE in types
    fast = FastTokenizer(Unigram(pairs, vocabulary.tokens.index(unknown[0]), has_bytes))
    if has_bytes:
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(_IN_BYTE), "merged_with_previous")
    return _with_spaces(fast, vocabulary, prefix=False)


def _with_spaces(fast: FastTokenizer, vocabulary: Vocabulary, prefix: bool) -> FastTokenizer:
    """The tokenizer, with what it does to characters and spaces before its model and after it.

    Args:
        prefix: whether a space stands before a text, where the file does not say.
    """
    file = vocabulary.file
    prefix = file.values.flag("tokenizer.ggml.add_space_prefix", prefix)
    before: list[Any] = []
    if charsmap := file.numbers(_CHARSMAP):
        before.append(normalizers.Precompiled(bytes(number & 0xFF for number in charsmap)))
        check_charsmap(before[0])
    if file.values.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        before.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        before.append(normalizers.Replace(Regex(" {2,}"), " "))
    before += [normalizers.Prepend(SPACE)] * prefix
    fast.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence(after + [decoders.Strip(" ", 1, 0)] * prefix)
    return fast


def _merges(
    vocabulary: Vocabulary, ids: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token, the best first. Raises BadInput where looking for
    them would take minutes."""
    tokens = vocabulary.tokens
    if (copied := sum(len(token) ** 2 for token in tokens)) > _MOST_COPIED:
        raise BadInput(
            f"{vocabulary.file.path}: the {len(tokens):,} tokens of {TOKENS} are so long that "
            f"looking for their merges copies {copied:,} characters, more than any vocabulary "
            f"needs; {ADVICE}"
        )
    pairs: list[tuple[float, int, int, tuple[str, str]]] = []
    for index, token in enumerate(tokens):
        if vocabulary.types[index] != Type.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((-scores[index], index, cut, (left, right)))
    pairs.sort()
    return [pair for _, _, _, pair in pairs]
