"""A tokenizer with one token a byte: every character above ASCII is split."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from minivllm.models.load.tokenizer import Tokenizer


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Save the tokenizer in a folder, with a chat template and an end token, and load it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    fast.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if think %}!{% "
        "endif %}[assistant]"
    )
    config = {"chat_template": template, "eos_token": {"content": "<end>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)
