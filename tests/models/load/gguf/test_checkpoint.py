"""Which tensors a GGUF file has, by the model's names."""

from __future__ import annotations

from pathlib import Path

from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint, GGUFTensor
from minivllm.models.load.source import open_checkpoint
from tests.gguf_files import LLAMA, blocks, tensors, write
from tests.reference import make_checkpoint


def test_experts_are_parts_of_one_tensors_bytes(tmp_path: Path) -> None:
    values = LLAMA | {"llama.expert_count": 4, "llama.expert_used_count": 2}
    stored = {name: value for name, value in tensors().items() if "ffn_gate." not in name}
    stored["blk.0.ffn_gate_exps.weight"] = (blocks((4, 512, 256), "Q8_0"), "Q8_0")
    checkpoint = GGUFCheckpoint.open(write(tmp_path / "file.gguf", values, stored))
    size = 512 * 256 // 32 * 34
    experts = [
        checkpoint.tensors[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"] for i in range(4)
    ]
    assert [one.shape for one in experts] == [(512, 256)] * 4
    assert [one.begin - experts[0].begin for one in experts] == [0, size, 2 * size, 3 * size]
    assert experts[3].end == experts[0].begin + 4 * size


def test_only_llamas_queries_and_keys_and_gemmas_norms_are_changed(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "gemma"):
        values = {key.replace("llama", family): value for key, value in LLAMA.items()}
        path = write(tmp_path / f"{family}.gguf", values, tensors(), family)
        found = GGUFCheckpoint.open(path).tensors
        heads = {name.split(".")[4]: t.heads for name, t in found.items() if "self_attn" in name}
        ones = {t.has_one for name, t in found.items() if "norm" in name}
        changed = {"q_proj": 4, "k_proj": 2} if family == "llama" else {"q_proj": 0, "k_proj": 0}
        assert heads == {"v_proj": 0, "o_proj": 0, **changed}
        assert ones == {family == "gemma"}


def test_bytes_are_counted_by_format(tmp_path: Path) -> None:
    stored = tensors({"token_embd.weight": "Q6_K"})
    sizes = GGUFCheckpoint.open(write(tmp_path / "file.gguf", LLAMA, stored)).stored_bytes()
    matrices = sum(data.nbytes for data, form in stored.values() if form == "Q8_0")
    assert sizes == {"Q8_0": matrices, "Q6_K": 96 * 210, "F32": 3 * 256 * 4}
    assert list(sizes) == ["Q8_0", "Q6_K", "F32"]


def test_a_folder_and_a_file_are_told_apart(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "folder")
    path = write(tmp_path / "file.gguf", LLAMA, tensors())
    assert type(open_checkpoint(tmp_path / "folder")) is Checkpoint
    opened = open_checkpoint(path)
    assert type(opened) is GGUFCheckpoint and opened.file_that_holds("lm_head.weight") is None
    assert all(isinstance(tensor, GGUFTensor) for tensor in opened.tensors.values())
