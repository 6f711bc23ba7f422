"""Vocabularies in GGUF files, and texts for them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from minivllm.models.load.tokenizer import Tokenizer
from tests.gguf_files import LLAMA, Stored, tensors, write

STORED: dict[str, Stored] = {"token_embd.weight": tensors()["token_embd.weight"]}
TEXTS = [
    "The quick brown fox doesn't jump over 12 lazy dogs; it's 3.14 o'clock, SHE'S here: 1234567!",
    "Größere Flüsse fließen 2024 nach Süden – „Grüß Gott“, sagte die Straßenbahnfahrerin.",
    "Voilà l'été ! Où est passé l'élève naïve du café ? Coûte 1 299,50 €…",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ΑΒΓ αβγ",
    "我想在apple工作1314151天～ 日本語のテキスト、カタカナ。한국어 문장입니다, ३४५ १२३",
    "def f(x):\n    if x != 0:\n\treturn {'a': [1, 22, 333]}\n\n\n# camelCase HTTPServer iPad\r\n",
    "a  b   c    d\t\te \n \n\n  12   345 end   ",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 😶🌫️ ✅🦙🦙 e\u0301te\u0301 x\u0301y",
    "'Tis WE'LL 'RE don't I'D <s>|$+=^~`` \\/ (a) [b] {c} #!/usr/bin/env <0x41> ....!!!???",
    " leading and trailing ",
    "",
]
WORDS = ["\u2581a", "\u2581ab", "ab", "abc", "\u2581abc", "a", "b", "c", "\u2581", "\u2581\u2581"]
HEX = [f"<0x{i:02X}>" for i in range(256)]
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *HEX, *WORDS],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS)],
    "tokenizer.ggml.scores": [0.0] * 259
    + [-4.0, -2.0, -1.0, -3.0, -5.0, -10.0, -11.0, -12.0, -13.0, -6.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
BYTES: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [chr(33 + i) for i in range(94)] + ["ab", "abc", "<s>", "<tool>"],
    "tokenizer.ggml.token_type": [1] * 96 + [3, 4],
    "tokenizer.ggml.merges": ["a b", "ab c"],
}
UNIGRAM: dict[str, Any] = SPM | {"tokenizer.ggml.model": "t5"}


def made(path: Path, values: dict[str, Any], family: str = "llama") -> Tokenizer:
    """The tokenizer of a file with this metadata."""
    tokenizer = Tokenizer.load(file_of(path / "file.gguf", values, family))
    assert tokenizer is not None
    return tokenizer


def file_of(path: Path, values: dict[str, Any], family: str = "llama") -> Path:
    """A file with this metadata and the embedding of a model."""
    own = {key.replace("llama.", f"{family}."): value for key, value in LLAMA.items()}
    return write(path, own | values, STORED, family)


@cache
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The tokens and merges of a byte-level BPE that no rule cut before: its tokens cross every
    place where one cuts, so that each cut changes ids. The last token has no merge."""
    fast = FastTokenizer(BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=1200,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    model = json.loads(fast.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "qzq"]
    return {token: i for i, token in enumerate(tokens)}, [(a, b) for a, b in model["merges"]]


def byte_level(pre: str) -> dict[str, Any]:
    """The metadata of the trained BPE."""
    vocabulary, merges = trained()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*vocabulary, "<|im_end|>", "<think>"],
        "tokenizer.ggml.token_type": [1] * len(vocabulary) + [3, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": len(vocabulary),
    }
