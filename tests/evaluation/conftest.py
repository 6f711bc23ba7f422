"""The embedded model behind lm-eval's own `hf` and behind this engine, both in float32 on the
CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ASSETS = Path(__file__).resolve().parents[2] / "minivllm" / "assets" / "tiny"
BOS = "<|begin|>"
CONTEXT = 512  # tokens of both models, whose own 2,048 take longer to fill


@dataclass
class Pair:
    """One checkpoint, loaded twice."""

    hf: Any
    ours: Any

    def ask(self, method: str, *args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """The answers of both to the same requests."""
        from lm_eval.api.instance import Instance

        # of its own for each: lm-eval's models may change what they are given
        def requests() -> list[Any]:
            return [Instance(method, {}, deepcopy(a), i) for i, a in enumerate(args)]

        return tuple(
            getattr(model, method)(requests(), disable_tqdm=True) for model in (self.hf, self.ours)
        )


@pytest.fixture(scope="session")
def load() -> Callable[..., Pair]:
    """Load a checkpoint folder both ways."""
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    from lm_eval.models.huggingface import HFLM

    from minivllm.evaluation.adapter import MiniVLLM

    def load(folder: Path, **ours: Any) -> Pair:
        given = {"pretrained": str(folder), "device": "cpu"}
        hf = HFLM(**given, dtype="float32", batch_size=3, max_length=CONTEXT)
        limit = {"model.max_model_len": CONTEXT}
        return Pair(hf, MiniVLLM(**given, quant="fp32", **limit, **ours))

    return load


@pytest.fixture(scope="session")
def pair(load: Callable[..., Pair]) -> Pair:
    """The embedded model: no token begins a text, <|endoftext|> ends it."""
    return load(ASSETS)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded weights with a tokenizer that begins texts with a token, and a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(ASSETS, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    last = model["merges"].pop()  # its token becomes the special one
    number = model["vocab"].pop("".join(last))
    model["vocab"][BOS] = number
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": number, "content": BOS})
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": BOS, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [number], "tokens": [BOS]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["bos_token"] = BOS
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ "
        "raise_exception('no') }}{% endif %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token "
        "}}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder
