"""A folder of pickled weights becomes a checkpoint of .safetensors, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minivllm.errors import BadInput
from minivllm.models.load.pickled import convert, weight_files
from minivllm.platform.untrusted import MAX_JSON
from tests.conftest import Result
from tests.forked import fork_known
from tests.models.load.test_loading import load
from tests.models.load.test_names import FP32, check
from tests.models.load.test_unpickle import Malicious
from tests.models.test_parity import PROMPTS, run
from tests.reference import make_checkpoint


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads a file is a fork of a process that has torch; the tests without this start it."""
    fork_known(monkeypatch)


def pickled(folder: Path, shards: int = 1, **options: Any) -> Any:
    """A checkpoint as transformers 4 wrote it with safe_serialization=False."""
    model = make_checkpoint(folder, **options)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "special.txt").write_text("beside it")
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return model
    names, weight_map = sorted(tensors), {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        torch.save({name: tensors[name] for name in names[shard::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[shard::shards], file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("shards", "tied"), [(1, True), (2, False)])
def test_the_same_model_comes_out(shards: int, tied: bool, tmp_path: Path) -> None:
    model = pickled(tmp_path / "old", shards, tie_word_embeddings=tied)
    with pytest.raises(BadInput, match="task=convert"):
        load(tmp_path / "old")
    lines: list[str] = []
    count = convert(tmp_path / "old", tmp_path / "made" / "new", 300, report=lines.append)
    assert count == len(list(model.parameters())) and len(lines) == shards
    check(tmp_path / "made" / "new", model)
    assert (tmp_path / "made" / "new" / "special.txt").read_text() == "beside it"
    assert not list((tmp_path / "made" / "new").glob("*.bin*"))
    assert len({file.stat().st_mode for file in (tmp_path / "made" / "new").iterdir()}) == 1
    assert [entry.name for entry in (tmp_path / "made").iterdir()] == ["new"]


def test_the_command_says_what_it_made(tmp_path: Path, cli: Callable[..., Result]) -> None:
    model = pickled(tmp_path / "old")
    done = cli("task=convert", f"model.path={tmp_path / 'old'}", f"task.output={tmp_path / 'new'}")
    assert done.code == 0, done.err
    assert f"model=hf model.path={tmp_path / 'new'}" in done.out
    expected = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    torch.testing.assert_close(
        run(load(tmp_path / "new", FP32), PROMPTS)[1], expected, atol=1e-4, rtol=0
    )
    again = cli("task=convert", f"model.path={tmp_path / 'old'}", f"task.output={tmp_path / 'new'}")
    assert again.code == 2 and "exists already" in again.err
    assert cli("task=convert", f"model.path={tmp_path / 'old'}").code == 2  # to where?
    assert "give the folder" in cli("task=convert", "task.output=x").err


def refused(folder: Path, message: str, **limits: Any) -> str:
    """The message of a refusal, after which nothing is written, not even beside the output."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(BadInput, match=message) as caught:
        convert(folder, folder.parent / "new", **{"timeout_s": 300, **limits})
    assert "\n" not in str(caught.value) and sorted(folder.parent.iterdir()) == before
    return str(caught.value)


@pytest.mark.usefixtures("forks")
def test_what_runs_code_takes_memory_or_time_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    torch.save({"a": Malicious(tmp_path / "marker")}, folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model\.bin is rejected: it asks for posix\.system")
    assert not (tmp_path / "marker").exists()
    torch.save(
        {"a": torch.ones(50 << 18)},
        folder / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    refused(
        folder, r"pytorch_model\.bin is rejected: it needs more than .* of memory", memory_gb=0.01
    )
    refused(folder, r"pytorch_model\.bin is rejected: it takes more than 0\.01 s", timeout_s=0.01)


def test_a_large_tokenizer_goes_with_the_weights(tmp_path: Path) -> None:
    pickled(tmp_path / "old")
    (tmp_path / "old" / "tokenizer.json").write_bytes(b" " * (MAX_JSON + 1))
    convert(tmp_path / "old", tmp_path / "new", 300)
    assert (tmp_path / "new" / "tokenizer.json").stat().st_size == MAX_JSON + 1


@pytest.mark.usefixtures("forks")
def test_what_comes_out_wrong_is_told_by_the_output_s_name(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    both = {"model.embed_tokens.weight": torch.ones(2), "module.lm_head.weight": torch.ones(2)}
    torch.save({**both, "lm_head.weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    message = refused(folder, rf"^{tmp_path / 'new'}: tensors ")
    assert "lm_head.weight" in message and ".bin" not in message


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "tokenizer.json", "pytorch_model.bin.index.json"]
)
def test_a_pipe_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    pickled(tmp_path / "old")
    (tmp_path / "old" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "old" / name)
    told = refused(tmp_path / "old", rf"{name} is a pipe or a device")
    assert str(tmp_path / "old") in told


def test_which_files_are_the_weights(tmp_path: Path) -> None:
    refused_folder = tmp_path / "empty"
    refused_folder.mkdir()
    (refused_folder / "training_args.bin").write_bytes(b"x")
    (refused_folder / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(BadInput, match="has no pickled weights"):
        weight_files(refused_folder)
    (refused_folder / "weights.pth").write_bytes(b"x")
    assert [file.name for file in weight_files(refused_folder)] == ["weights.pth"]
    (refused_folder / "pytorch_model.bin").write_bytes(b"x")
    assert [file.name for file in weight_files(refused_folder)] == ["pytorch_model.bin"]
    index = refused_folder / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"a": "../x"}}')
    with pytest.raises(BadInput, match="no weight_map of file names"):
        weight_files(refused_folder)
    index.write_text('{"weight_map": {"a": "gone.bin"}}')
    with pytest.raises(BadInput, match=r"gone\.bin: there is no such file"):
        weight_files(refused_folder)


def test_no_room_and_no_right_to_write_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled(tmp_path / "old")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"task\.output=\S+ cannot be written"):
        convert(tmp_path / "old", tmp_path / "file" / "new", 300)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    refused(tmp_path / "old", "10 bytes are free there")
