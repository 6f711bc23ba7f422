"""Pictures that tests share, and small random models that take them, by transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

IMAGE_TOKEN = 98
TEXT = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}
PROCESSOR = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of noise over a gradient."""
    generator = np.random.default_rng((seed, width, height))
    noise = generator.integers(0, 128, (height, width, 3))
    ramp = np.linspace(0, 127, width)[None, :, None]
    return Image.fromarray((noise + ramp).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture's file."""
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}{% if message['content'][0]['type'] == "
    "'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}"
    "{{ '<image>' }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def add_tokenizer(folder: Path) -> None:
    """Save a tokenizer of single characters with SmolVLM's marks, and a template as SmolVLM has
    it, which goes over the parts of contents."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    marks = [f"<row_{y}_col_{x}>" for y in (1, 2, 3) for x in (1, 2, 3)]
    special = ["<fake_token_around_image>", "<global-img>", *marks]
    vocab = {character: i for i, character in enumerate("?\n :.abcdefghijklmnopqrstuvwxyz", 3)}
    vocab |= {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<image>": IMAGE_TOKEN}
    vocab |= {mark: 60 + i for i, mark in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(["<eos>", "<image>", *special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def smolvlm_processor(**changes: Any) -> Any:
    """transformers' image processor."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return SmolVLMImageProcessorPil(**{**PROCESSOR, **changes}, return_row_col_info=True)


def make_smolvlm(folder: Path, **overrides: Any) -> Any:
    """Save a small SmolVLM, all weights random, with its image processor; the transformers model
    in eval mode. A tile of 32 pixels has 16 embeddings."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    config = SmolVLMConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        **overrides,
    )
    generator = torch.Generator().manual_seed(0)
    model = SmolVLMForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and "weight" in name else 0.0
            parameter.copy_(torch.empty(parameter.shape).normal_(mean, 0.15, generator=generator))
    model.save_pretrained(folder)
    smolvlm_processor().save_pretrained(folder)
    return model
