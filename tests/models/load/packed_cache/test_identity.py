"""What packed weights depend on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minivllm.models.load.packed_cache import identity as identity_module
from minivllm.models.load.packed_cache.identity import identity, key_of
from minivllm.models.load.source import resolve
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.plain import Plain
from tests.reference import make_checkpoint


def key(folder: Path, quant: object = None, variant: str = "a", **node: object) -> str:
    source = resolve({"path": str(folder), **node}, allow_random=True)[1]
    return key_of(identity(source, quant or Int4(), variant))


def test_everything_that_weights_depend_on_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    first = key(tmp_path)
    assert key(tmp_path) == first
    others = [
        key(tmp_path, Int4(group_size=32)),
        key(tmp_path, Int4(skip=("down_proj",))),
        key(tmp_path, Int4(lm_head=True)),
        key(tmp_path, Int8()),
        key(tmp_path, Plain()),
        key(tmp_path, Plain("float16")),
        key(tmp_path, variant="another processor"),
        key(tmp_path, weights="random"),
        key(tmp_path, weights="random", seed=1),
    ]
    monkeypatch.setattr(identity_module, "_code", lambda: "changed")
    others.append(key(tmp_path))
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize("library", ["torch", "bitsandbytes", "gguf"])
def test_the_libraries_that_compute_weights_count(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    first = key(tmp_path)
    known = identity_module._version
    monkeypatch.setattr(
        identity_module, "_version", lambda name: "0.0" if name == library else known(name)
    )
    assert key(tmp_path) != first


def test_a_tensor_that_changed_beyond_its_fingerprint_counts(tmp_path: Path) -> None:
    """The fingerprint has 4 KiB of each tensor."""
    make_checkpoint(tmp_path, hidden_size=128)
    first, path = key(tmp_path), tmp_path / "model.safetensors"
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert key(tmp_path) != first


def test_code_is_of_the_rooms_that_pack() -> None:
    assert len(identity_module._code()) == 64
    for room in identity_module._ROOMS:
        assert any((identity_module._PACKAGE / room).glob("*.py"))
