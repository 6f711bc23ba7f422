"""The tokenizer of a GGUF file, built from its metadata. Free of torch.

Three kinds are read: byte-level BPE ("gpt2"), whose text is cut by a rule that the file only names,
and the BPE and the unigram model of sentencepiece ("llama", "t5")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from minivllm.errors import BadInput
from minivllm.models.load.gguf.cuts import GPT2, RULES, Rule
from minivllm.models.load.gguf.file import GGUFFile
from minivllm.models.load.gguf.sentencepiece import merging, unigram
from minivllm.models.load.gguf.vocabulary import ADVICE, KIND, TOKENS, Type, Vocabulary
from minivllm.models.load.tokenizer_files import MAX_TEMPLATE, TokenizerFiles, as_bad_input
from minivllm.platform.untrusted import printable

_PRE, _TEMPLATE = "tokenizer.ggml.pre", "tokenizer.chat_template"
_MOST_TEMPLATES = 64
_MOST_ADDED = 1 << 21  # bytes of all added tokens, which take seconds; published: some 100,000
# Of Phi-3: tokens that leave the spaces after them as they are; all others take them in.
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def read_tokenizer(path: Path) -> TokenizerFiles | None:
    """Build the tokenizer of a file; None if the file has none.

    Raises:
        BadInput: it is of a kind that is not read, or its parts do not fit each other.
    """
    file = GGUFFile.open(path)
    kind = file.values.text(KIND, "none")
    if kind in ("none", "no_vocab") or TOKENS not in file.metadata:
        return None
    kinds = {"gpt2": _byte_level, "llama": merging, "t5": unigram}
    if kind not in kinds:
        raise BadInput(
            f"{path}: {KIND}={printable(kind)[:40]!r} is not read, only gpt2 (byte-level BPE), "
            "llama and t5 (sentencepiece's BPE and its unigram model)"
        )
    vocabulary = Vocabulary.read(file)
    try:
        fast = kinds[kind](vocabulary)
        _add_tokens(fast, vocabulary)
        _add_ends(fast, vocabulary)
    except BadInput:
        raise
    except BaseException as error:
        what = f"{path} holds no usable tokenizer; {ADVICE}"
        raise as_bad_input(what, error) from None
    templates = _templates(file)
    return TokenizerFiles(fast, vocabulary.names, templates.pop("default", None), templates)


def _templates(file: GGUFFile) -> dict[str, str]:
    """The chat templates by name. Raises BadInput for one that is none, or for too many."""
    prefix = f"{_TEMPLATE}."
    keys = {key: key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)}
    if _TEMPLATE in file.metadata:
        keys[_TEMPLATE] = "default"
    if len(keys) > _MOST_TEMPLATES:
        raise BadInput(f"{file.path} has {len(keys):,} chat templates, more than any model")
    found = {name: file.values.text(key, "") for key, name in keys.items()}
    for key, name in keys.items():
        if len(found[name]) > MAX_TEMPLATE:
            file.values.fail(key, "is longer than any template")
    return found


def _rule(vocabulary: Vocabulary) -> Rule:
    """How text is cut. Raises BadInput where the file does not say it by a known name."""
    file = vocabulary.file
    name = file.values.text(_PRE, None)
    if name is None:
        raise BadInput(
            f"{file.path} does not say how text is cut ({_PRE}): convert the model again"
        )
    if name not in RULES:
        raise BadInput(
            f"{file.path}: {_PRE}={printable(name)[:40]!r} is not read; read are {', '.join(RULES)}"
        )
    return RULES[name]


def _byte_level(vocabulary: Vocabulary) -> FastTokenizer:
    """A BPE over bytes, with the merges of the file."""
    rule, file = _rule(vocabulary), vocabulary.file
    merges: list[Any] = []
    for line in file.texts("tokenizer.ggml.merges") or ():
        pair = tuple(line.split(" "))
        if len(pair) != 2:
            raise BadInput(
                f"{file.path}: the merge {printable(line)[:40]!r} is no pair of tokens; {ADVICE}"
            )
        merges.append(pair)
    fast = FastTokenizer(BPE(vocabulary.ids, merges, ignore_merges=rule.keeps_tokens))
    if rule.composes:
        fast.normalizer = normalizers.NFC()
    as_gpt2 = rule.cuts[-1] == GPT2  # which ByteLevel does itself, and faster
    cuts: list[Any] = [
        pre_tokenizers.Split(Regex(cut), behavior="isolated")
        for cut in rule.cuts[: len(rule.cuts) - as_gpt2]
    ]
    cuts += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=as_gpt2)]
    fast.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    fast.decoder = decoders.ByteLevel()
    return fast


def _add_tokens(fast: FastTokenizer, vocabulary: Vocabulary) -> None:
    """Make whole tokens of those that no text is cut through: control tokens and the unknown one,
    which are no part of a text (as in llama.cpp), and user-defined ones."""
    added = (Type.CONTROL, Type.UNKNOWN, Type.USER_DEFINED)
    vocabulary.check_size(vocabulary.of_type(*added), _MOST_ADDED)
    architecture = vocabulary.file.metadata.get("general.architecture")
    phi3 = vocabulary.kind == "llama" and architecture == "phi3"
    for kinds, special in (((Type.CONTROL, Type.UNKNOWN), True), ((Type.USER_DEFINED,), False)):
        fast.add_tokens(
            [
                AddedToken(
                    token,
                    special=special,
                    normalized=False,
                    rstrip=phi3 and token not in _KEEPS_SPACES,
                )
                for token in vocabulary.of_type(*kinds)
            ]
        )


def _add_ends(fast: FastTokenizer, vocabulary: Vocabulary) -> None:
    """Have the tokenizer add the first and last token to a text, as the file says it."""
    values, names = vocabulary.file.values, vocabulary.names
    begins = vocabulary.kind == "llama" or (
        vocabulary.kind == "gpt2" and RULES[values.text(_PRE, "")].begins
    )
    text: list[str] = ["$A"]
    if values.flag("tokenizer.ggml.add_bos_token", begins) and "bos_token" in names:
        text.insert(0, names["bos_token"])
    if values.flag("tokenizer.ggml.add_eos_token", vocabulary.kind == "t5") and (
        "eos_token" in names
    ):
        text.append(names["eos_token"])
    if len(text) > 1:
        special = [(token, fast.token_to_id(token)) for token in text if token != "$A"]
        fast.post_processor = processors.TemplateProcessing(
            single=text, pair=[*text, "$B"], special_tokens=[*dict.fromkeys(special)]
        )
