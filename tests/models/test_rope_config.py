"""model.rope_scaling: a checkpoint whose rope is scaled as the user says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.bench.records.identity import cell_id
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.source import resolve
from tests.later import Later
from tests.models.load.test_loading import load
from tests.models.load.test_names import FP32, logits_of
from tests.models.load.test_source import node
from tests.models.test_parity import PROMPTS, run
from tests.reference import LLAMA3_ROPE, LONG_ROPE, YARN_ROPE, make_checkpoint

transformers = Later("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn in full": {
        **YARN_ROPE,
        "rope_theta": 5e4,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "llama3": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        **LONG_ROPE,
        **{"original_max_position_embeddings": 32, "factor": 8.0},
        **{key: [*LONG_ROPE[key], 5.0, 6.0] for key in ("short_factor", "long_factor")},
    },
}


@pytest.mark.parametrize("old_spelling", [True, False])
@pytest.mark.parametrize("kind", SCALINGS)
def test_logits_are_those_of_transformers_with_the_same_parameters(
    kind: str, old_spelling: bool, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, max_position_embeddings=64)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    theta = config["rope_parameters"]["rope_theta"]
    parameters = {"rope_theta": theta, **SCALINGS[kind]}
    expected = transformers.AutoConfig.from_pretrained(tmp_path, rope_parameters=parameters)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, config=expected, dtype=torch.float32
    ).eval()
    if old_spelling:
        del config["rope_parameters"]
        file.write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": None}))
    loaded = load(tmp_path, FP32, rope_scaling=SCALINGS[kind])
    torch.testing.assert_close(run(loaded, PROMPTS)[1], logits_of(model), atol=1e-4, rtol=0)
    again = resolve(node(tmp_path, rope_scaling=SCALINGS[kind]), False)[1].config
    assert transformers_reads(again) == ModelConfig.from_dict(again).rope


def transformers_reads(config: dict[str, Any]) -> Any:
    """The rope of a configuration that went through transformers."""
    whole = transformers.Qwen3Config.from_dict(config).to_dict() | {
        "architectures": config["architectures"]
    }
    return ModelConfig.from_dict(whole).rope


def test_of_two_ropes_that_of_full_attention_is_scaled(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma3_text")
    before = ModelConfig.from_dict(resolve(node(tmp_path), False)[1].config)
    after = ModelConfig.from_dict(resolve(node(tmp_path, rope_scaling=YARN), False)[1].config)
    assert after.local_rope == before.local_rope and after.local_rope is not None
    assert (after.rope.kind, after.rope.theta) == ("yarn", before.rope.theta)


def test_a_scaling_goes_before_that_of_a_part(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma3_text")
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    file.write_text(json.dumps(whole | {"text_config": text}))
    before = ModelConfig.from_dict(resolve(node(tmp_path), False)[1].config)
    after = ModelConfig.from_dict(resolve(node(tmp_path, rope_scaling=YARN), False)[1].config)
    assert (before.rope.kind, after.rope.kind) == ("linear", "yarn")
    assert (after.rope.theta, after.local_rope) == (before.rope.theta, before.local_rope)


def test_a_scaling_that_was_written_into_the_file_counts_before_its_parameters(
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    read = ModelConfig.from_dict(config | {"rope_scaling": YARN})
    assert (read.rope.kind, read.rope.theta, read.rope.scaling["factor"]) == ("yarn", 5e5, 4.0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 4.0}, "lacks rope_type"),
        ({"rope_type": "yarn", "facter": 4.0}, "model.rope_scaling has no facter; its keys are"),
        (
            {**YARN, "factor": -1},
            r"model\.rope_scaling over \S+config\.json: rope_scaling\.factor=-1 must be",
        ),
        ({**YARN, "rope_type": "axial"}, "'axial' is not supported"),
    ],
)
def test_a_scaling_that_means_nothing_is_refused(
    scaling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(BadInput, match=message):
        resolve(node(tmp_path, rope_scaling=scaling), False)


def test_the_knob_is_part_of_a_cell_s_identity_once_it_is_set() -> None:
    plain = compose([])
    scaled = compose(["model.rope_scaling={rope_type: yarn, factor: 2.0}"])
    older = {**plain, "model": {k: v for k, v in plain["model"].items() if k != "rope_scaling"}}
    assert cell_id(plain, "x") == cell_id(older, "x") != cell_id(scaled, "x")
    model = (
        "model.rope_scaling={rope_type: yarn, factor: 2.0, original_max_position_embeddings: 1024}"
    )
    source = resolve(compose([model])["model"], False)[1]
    assert ModelConfig.from_dict(source.config).max_position_embeddings == 2048


def test_a_peer_that_is_not_told_refuses_it() -> None:
    from minivllm.engines.supported_knobs import require_supported

    overrides = ["engine=transformers", "model.rope_scaling={rope_type: yarn, factor: 2.0}"]
    with pytest.raises(
        BadInput, match=r"model\.rope_scaling=.* is not supported by engine=transformers"
    ):
        require_supported(compose(overrides))
