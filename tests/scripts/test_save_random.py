"""scripts/save_random.py: what it saves is a checkpoint with the weights of
`model.weights=random`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minivllm.errors import BadInput, NotInstalled
from minivllm.models.load.messages import ImageParts, parse_messages
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.weights import RandomWeights
from minivllm.models.vision.processor import PromptImages
from minivllm.models.vision.registry import image_processor
from tests.scripts.load import load_script
from tests.seeing import picture

script = load_script("save_random")


def test_it_saves_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "random"
    assert script.main([str(folder), "model=tiny", "model.seed=3"]) == 0
    assert "tensors in" in capsys.readouterr().out
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    expected = torch.empty_like(tensors[name])
    RandomWeights(3).fill(name, expected)
    assert torch.equal(tensors[name], expected) and expected.std() > 0.01
    with pytest.raises(BadInput, match="exists already"):
        script.main([str(folder), "model=tiny"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NotInstalled, match=r"save_random\.py needs transformers: pip install"):
        script.main([str(tmp_path / "other"), "model=tiny"])


@pytest.mark.parametrize("size", [100, 1000])
def test_its_tokenizer_has_a_text_for_each_id(tmp_path: Path, size: int) -> None:
    made = script.any_tokenizer(size)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None and made.get_vocab_size() == size
    assert len({made.decode([index]) for index in range(size)} - {""}) > 0.8 * size


@pytest.mark.parametrize("model", ["smolvlm_256m", "qwen2_5_vl_3b", "qwen3_vl_2b"])
def test_the_marks_of_pictures_are_tokens(model: str, tmp_path: Path) -> None:
    """A message with a picture is a prompt of the model, as its processor asks for it."""
    config = script.architecture([f"model={model}"])
    small = {**config, "vocab_size": max(script.image_marks(config)) + 2}
    script.add_tokenizer(tmp_path, small)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    prompts = PromptImages(image_processor(small, None), tokenizer)
    parts = ImageParts(prompts.processor.placeholder, trusted=True)
    content = [{"type": "image", "image": picture(60, 60)}, {"type": "text", "text": "what?"}]
    messages = parse_messages([{"role": "user", "content": content}], images=parts)
    ids = tokenizer.render_chat(messages)
    assert ids.count(config["image_token_id"]) == 1
    expanded, inputs = prompts.insert(ids, [picture(60, 60)])
    assert len(inputs.images) == 1 and expanded.count(config["image_token_id"]) > 1
    assert tokenizer.decode(expanded).strip().endswith("what?\nassistant:")
