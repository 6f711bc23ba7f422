"""Finding a model, and refusing what is not usable, in one line and within seconds."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models import source as source_module
from minivllm.models.checkpoint import Checkpoint
from minivllm.models.source import resolve
from tests.models.test_loading import ARCHITECTURE
from tests.reference import make_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("file")
    make_checkpoint(folder)
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a hub that is not asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(source_module, "_cached", lambda path: None)


def node(path: object = "Qwen/Qwen3-0.6B", **changes: Any) -> dict[str, Any]:
    return {"path": str(path), "weights": "auto", "seed": 0, "architecture": None} | changes


def test_a_local_folder_is_taken_and_resolving_again_is_the_same(folder: Path) -> None:
    resolved, source = resolve(node(folder), allow_random=False)
    assert (source.folder, source.weights, source.warnings) == (folder, "checkpoint", [])
    assert resolved["weights"] == str(folder)
    assert resolve(resolved, allow_random=False) == (resolved, source)


def test_weights_may_name_the_folder_itself(folder: Path) -> None:
    _, source = resolve(node(weights=str(folder), architecture=ARCHITECTURE), allow_random=False)
    assert source.folder == folder
    assert source.config["hidden_size"] == 48  # the folder's, not the option's


def test_generation_config_overrides_the_end_of_sequence(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert resolve(node(folder), False)[1].config["eos_token_id"] == [3, 4]
    (folder / "generation_config.json").write_text("{}")
    assert resolve(node(folder), False)[1].config["eos_token_id"] == 1


@pytest.mark.usefixtures("no_hub")
def test_auto_falls_back_to_random_only_where_allowed() -> None:
    resolved, source = resolve(node(architecture=ARCHITECTURE), allow_random=True)
    assert (resolved["weights"], source.weights, source.folder) == ("random", "random", None)
    assert "Qwen/Qwen3-0.6B" in source.warnings[0]
    assert "random" in source.warnings[0]
    again, second = resolve(resolved, allow_random=False)
    assert again == resolved
    assert second.fingerprint == source.fingerprint
    with pytest.raises(BadInput, match=r"Qwen/Qwen3-0\.6B.*weights=random"):
        resolve(node(architecture=ARCHITECTURE), allow_random=False)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE"):
        resolve(node(weights="hub", architecture=ARCHITECTURE), allow_random=True)


def test_a_hub_that_does_not_answer_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(source_module, "_cached", lambda path: None)
    monkeypatch.setattr(source_module, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(30))
    start = time.monotonic()
    _, source = resolve(node(architecture=ARCHITECTURE), allow_random=True)
    assert time.monotonic() - start < 3
    assert "TimeoutError" in source.warnings[0]


def test_the_hub_cache_is_used_if_it_has_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(source_module, "_cached", lambda path: folder)
    assert resolve(node(), False)[1].folder == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="hub"):
        resolve(node(), False)


def test_random_weights_take_the_architecture_of_a_folder(folder: Path) -> None:
    source = resolve(node(folder, weights="random"), False)[1]
    assert (source.weights, source.folder) == ("random", folder)
    assert source.config["hidden_size"] == 48


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{ not json")


def _unsupported(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["GPT2LMHeadModel"]}))


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x50\x4b\x03\x04" * 100)


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _missing_shard(folder: Path) -> None:
    shards = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (shutil.rmtree, "does not exist"),
        (_a_file, "is not a folder"),
        (_no_config, r"config\.json does not exist"),
        (_broken_config, r"config\.json is not readable as JSON"),
        (_unsupported, r"config\.json: architecture GPT2LMHeadModel.*Qwen3ForCausalLM"),
        (_truncated, r"model\.safetensors has \d+ bytes where its header says \d+.*fetch it again"),
        (_garbage, r"model\.safetensors is not a readable safetensors file"),
        (_empty, r"model\.safetensors is not a readable safetensors file"),
        (_pickled, r"pickled weights.*save_pretrained"),
        (_no_weights, r"has no \.safetensors file"),
        (_missing_shard, r"names model-00002-of-00002\.safetensors"),
    ],
)
def test_an_unusable_folder_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(folder)
    for allow_random in (False, True):  # a folder that was asked for is never replaced by noise
        with pytest.raises(BadInput, match=told) as caught:
            resolve(node(folder, architecture=ARCHITECTURE), allow_random)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_bad_input_and_nothing_else(
    weights_file: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    length = 8 + int.from_bytes(weights_file[:8], "little")
    at = data.draw(st.integers(0, length - 1))
    damaged = bytearray(weights_file)
    damaged[at] ^= data.draw(st.integers(1, 255))
    (tmp_path / "model.safetensors").write_bytes(bytes(damaged))
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except BadInput as error:
        assert "model.safetensors" in str(error)
    else:  # a name or a shape may change and still be a header; the loader compares those with the model
        assert all(0 <= t.begin <= t.end <= len(damaged) for t in checkpoint.tensors.values())


def test_the_fingerprint_follows_config_and_weights(folder: Path) -> None:
    first = resolve(node(folder), False)[1].fingerprint
    copy = shutil.copytree(folder, folder.parent / "copy")
    assert resolve(node(copy), False)[1].fingerprint == first
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert resolve(node(copy), False)[1].fingerprint != first
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    assert resolve(node(folder), False)[1].fingerprint != first


def test_a_random_fingerprint_follows_architecture_and_seed() -> None:
    def fingerprint(**changes: Any) -> str:
        return resolve(node(weights="random", architecture=ARCHITECTURE) | changes, False)[1].fingerprint

    assert fingerprint() == fingerprint(path="other/name", max_model_len=7)
    assert fingerprint() != fingerprint(seed=1)
    assert fingerprint() != fingerprint(architecture=ARCHITECTURE | {"num_hidden_layers": 5})
