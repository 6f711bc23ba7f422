"""A checkpoint whose tokens are characters, for conversations in a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tests.reference import make_checkpoint

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="session")
def character_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer of single characters and a chat template."""
    path = tmp_path_factory.mktemp("chat")
    make_checkpoint(path, max_position_embeddings=96)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:128]
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(path / "tokenizer.json"))
    return path
