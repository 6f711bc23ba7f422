"""scripts/gpu_wheels.py: which packages it takes along, what it leaves out of them, and that it
tries them. Nothing is downloaded."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minivllm.errors import BadInput
from tests.scripts.load import load_script

script = load_script("gpu_wheels")


def wheel(folder: Path, name: str, contents: dict[str, bytes]) -> Path:
    """A wheel of version 1.0 with these files."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    contents = {
        **contents,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{file},{script.digest(data)},{len(data)}" for file, data in contents.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in contents.items():
            archive.writestr(file, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return path


def test_what_the_image_lacks_is_taken_along_with_its_needs() -> None:
    found = script.missing(script.PRESENT)
    lacking = {"hydra-core", "omegaconf", "antlr4-python3-runtime", "bitsandbytes"}
    assert lacking | {"prompt-toolkit", "wcwidth", "fastapi", "pydantic-core"} <= {*found}
    assert not script.PRESENT & {*found}
    assert found["antlr4-python3-runtime"] == "4.9.3"


def test_what_the_machine_has_is_not_taken_along() -> None:
    found = script.missing([*script.PRESENT, "Prompt_Toolkit"])
    # nor what only that needs
    assert not {"prompt-toolkit", "wcwidth"} & {*found} and "omegaconf" in found


def test_a_package_without_a_version_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("a==1.0\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["none-such"]\n'
        "[project.optional-dependencies]\nrun = []\nserve = []\ngguf = []\n"
    )
    with pytest.raises(BadInput, match="no version of none-such"):
        script.missing([], tmp_path)


def test_libraries_of_other_cuda_versions_are_left_out(tmp_path: Path) -> None:
    kept = ("__init__.py", "libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so")
    foreign = ("libbitsandbytes_cuda128.so", "libbitsandbytes_rocm71.so", "libbitsandbytes_xpu.so")
    files = {f"bitsandbytes/{name}": name.encode() for name in (*kept, *foreign)}
    path = wheel(tmp_path, "bitsandbytes", files)
    assert script.trim(path, ["13.0"]) == len(foreign)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        record = archive.read("bitsandbytes-1.0.dist-info/RECORD").decode().splitlines()
        assert archive.read(f"bitsandbytes/{kept[1]}") == kept[1].encode()
    assert {Path(name).name for name in names if name.startswith("bitsandbytes/")} == {*kept}
    assert [row.split(",")[0] for row in record] == names  # an installer reads it
    with pytest.raises(BadInput, match=r"no library for CUDA 12\.8"):
        script.trim(path, ["12.8"])


@pytest.mark.parametrize(
    ("code", "beside", "problem"),
    [
        ("import json\n", [], None),
        ("import none_such_module\n", ["none_such_module"], None),
        ("import first_demo.gone\n", [], "first_demo is installed and cannot be imported"),
        ("raise ValueError('torn')\n", [], "an installed module fails: ValueError: torn"),
    ],
)
def test_wheels_are_installed_and_imported(
    code: str, beside: list[str], problem: str | None, tmp_path: Path
) -> None:
    wheel(tmp_path, "first_demo", {"first_demo/__init__.py": code.encode()})
    if problem is None:
        assert script.try_wheels(tmp_path, sys.executable) == beside
    else:
        with pytest.raises(BadInput, match=problem):
            script.try_wheels(tmp_path, sys.executable)


def test_a_torn_wheel_cannot_be_installed(tmp_path: Path) -> None:
    (tmp_path / "demo-1.0-py3-none-any.whl").write_bytes(b"torn")
    with pytest.raises(BadInput, match="cannot be installed"):
        script.try_wheels(tmp_path, sys.executable)


def test_sources_stand_in_where_there_is_no_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are pure Python: others would be of this machine."""
    made = "demo-1.0-py3-none-any.whl"

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        if arguments[0] == "wheel":
            (tmp_path / made).touch()
        failed = arguments[0] == "download"
        return subprocess.CompletedProcess(arguments, int(failed), "", "no matching distribution")

    monkeypatch.setattr(script, "pip", pip)
    script.fetch("demo", "1.0", tmp_path)
    assert (tmp_path / made).exists()
    made = "demo-1.0-cp311-cp311-linux_x86_64.whl"
    with pytest.raises(BadInput, match="not pure Python"):
        script.fetch("demo", "1.0", tmp_path)
    assert not (tmp_path / made).exists()


def test_what_is_too_large_is_reported() -> None:
    text, fits = script.sizes(36 << 20, 10 << 20, 50)
    assert fits and text == "tree 36.0 MiB, wheels 10.0 MiB, together 46.0 MiB: within 50 MiB"
    text, fits = script.sizes(36 << 20, 15 << 20, 50)
    assert not fits and text.endswith("together 51.0 MiB: above 50 MiB")


def test_the_tree_is_what_travels(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "new.txt").write_text("four")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "ignored.whl").write_text("ignored")
    assert script.tree_bytes(tmp_path) == len("build/\n") + len("four")
