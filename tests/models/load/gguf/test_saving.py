"""A GGUF file becomes a checkpoint that transformers opens, whole or not at all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minivllm.errors import BadInput
from minivllm.models.load import saving
from minivllm.models.load.gguf.saving import config_json, convert
from minivllm.models.load.tokenizer import Tokenizer
from tests.conftest import Result
from tests.gguf_files import LLAMA, script, tensors, write
from tests.models.load.gguf.test_weights import CASES, SIZES
from tests.models.test_parity import PROMPTS, load, run
from tests.reference import make_checkpoint


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_transformers_opens_the_checkpoint_of_every_family(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, overrides = CASES[case]
    make_checkpoint(tmp_path / "model", family, **(SIZES | overrides))
    script().save(str(tmp_path / "model"), tmp_path / "file.gguf", "q8_0")
    count = convert(tmp_path / "file.gguf", tmp_path / "new", "float32")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", output_loading_info=True, attn_implementation="eager"
    )
    assert {name: [*found] for name, found in report.items() if found} == {}
    assert count == len(load_file(tmp_path / "new" / "model.safetensors"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    for place in (tmp_path / "new", tmp_path / "file.gguf"):
        torch.testing.assert_close(run(load(place), PROMPTS)[1], expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


@pytest.mark.parametrize(("quant", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_command_writes_weights_config_and_tokenizer(
    quant: str, dtype: str, tmp_path: Path, cli: Callable[..., Result]
) -> None:
    from transformers import AutoTokenizer

    file, output = tmp_path / "file.gguf", tmp_path / "below" / "new"
    script().save("embedded", file, "q8_0")
    command = ("task=convert", f"model.path={file}", f"task.output={output}", f"quant={quant}")
    done = cli(*command)
    assert done.code == 0, done.err
    assert f"tensors in {output}: model=hf model.path={output}" in done.out
    assert re.search(
        rf"file\.gguf stores Q8_0 \(.*MiB\).*: converted to {dtype} and rounded\n", done.out
    )
    assert [entry.name for entry in (tmp_path / "below").iterdir()] == ["new"]
    saved = load_file(output / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, dtype)}
    own, theirs = Tokenizer.load(file), AutoTokenizer.from_pretrained(output)
    assert own is not None and own.chat_template is not None
    text, turn = "def main():\n    return 'ä €'", [{"role": "user", "content": "Hello"}]
    assert own.encode(text) == theirs(text)["input_ids"]
    assert own.chat_text(turn) == theirs.apply_chat_template(
        turn, tokenize=False, add_generation_prompt=True
    )
    again = cli(*command)
    assert (
        again.code == 2
        and again.err == f"error: task.output={output} exists already: give a new folder\n"
    )


@pytest.mark.parametrize("quant", ["int8", "nf4"])
def test_a_precision_that_is_not_stored_is_one_line(
    quant: str, tmp_path: Path, cli: Callable[..., Result]
) -> None:
    path = write(tmp_path / "file.gguf", LLAMA, tensors())
    done = cli("task=convert", f"model.path={path}", "task.output=new", f"quant={quant}")
    assert done.code == 2 and f"quant=bf16, fp16 or fp32, and no quant={quant}" in done.err
    assert not Path("new").exists()


def test_a_model_of_many_files_has_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "file.gguf", LLAMA, tensors())
    convert(path, tmp_path / "one", "float32")
    monkeypatch.setattr(saving, "SHARD", 600_000)
    convert(path, tmp_path / "several", "float32")
    files = sorted(file.name for file in (tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one = load_file(tmp_path / "one" / "model.safetensors")
    several = {k: v for f in files for k, v in load_file(tmp_path / "several" / f).items()}
    assert one.keys() == several.keys()
    assert all(torch.equal(tensor, several[name]) for name, tensor in one.items())
    prompts = [[token % 96 for token in prompt] for prompt in PROMPTS]
    first, second = (run(load(tmp_path / name), prompts)[1] for name in ("one", "several"))
    assert torch.equal(first, second)


def test_the_ids_that_transformers_has_defaults_of_are_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", LLAMA | {"tokenizer.ggml.bos_token_id": 5}, tensors())
    config = config_json(path, "float16")
    assert (config["model_type"], config["dtype"]) == ("llama", "float16")
    assert (config["bos_token_id"], config["pad_token_id"]) == (5, None)
    beyond = write(tmp_path / "b.gguf", LLAMA | {"tokenizer.ggml.padding_token_id": 999}, tensors())
    assert config_json(beyond, "float16")["pad_token_id"] is None


def test_nothing_is_left_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "file.gguf", LLAMA, tensors())
    (tmp_path / "a").mkdir()
    for output, words in (
        (path / "new", r"task\.output=\S+ cannot be written: "),
        (tmp_path / "a" / "new", r"task\.output=\S+ cannot be written: no space left"),
    ):
        if "space" in words:
            full = OSError("no space left on device")
            monkeypatch.setattr(saving, "save_file", lambda *_, error=full: _raise(error))
        with pytest.raises(BadInput, match=words):
            convert(path, output, "bfloat16")
    assert os.listdir(tmp_path / "a") == []


def _raise(error: Exception) -> None:
    raise error


def test_a_file_without_a_tokenizer_makes_a_folder_without_one(tmp_path: Path) -> None:
    path = write(tmp_path / "file.gguf", LLAMA, tensors())
    convert(path, tmp_path / "new", "bfloat16")
    made = {file.name for file in (tmp_path / "new").iterdir()}
    assert made == {"model.safetensors", "config.json", "generation_config.json"}
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == 96
