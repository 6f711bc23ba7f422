"""scripts/structure.py counts what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts.load import load_script

structure = load_script("structure")


def test_code_is_counted_without_its_explanations(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        '"""What it\n'
        'is."""\n'
        "\n"
        "# why\n"
        "x = (\n"
        "    1,\n"
        ")\n"
        "\n"
        "\n"
        "def f():\n"
        '    """One."""\n'
        "    return x  # so\n"
    )
    assert structure.code_lines(file) == 5


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "import torch.nn\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from minivllm.bench import driver\n"
    )
    assert {name for _, name in structure.imports(file)} == {
        "torch.nn",
        "typing.TYPE_CHECKING",
        "pandas",
        "minivllm.bench.driver",
    }


def test_cycles_of_any_length_are_found(tmp_path: Path) -> None:
    package = tmp_path / "minivllm"
    (package / "room").mkdir(parents=True)
    sources = {
        "a": "from minivllm.b import thing",
        "b": "if True:\n    from minivllm.room import c",
        "room/c": "def late():\n    from minivllm import a",
        "d": "from minivllm.a import thing",
        "e": "import minivllm.f",
        "f": "from minivllm.e import thing",
    }
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)
    assert structure.cycles(package) == [["a", "b", "room.c"], ["e", "f"]]


def test_files_of_what_runs_and_of_names(tmp_path: Path) -> None:
    from minivllm.cache import pool

    package = structure.ROOT / "minivllm"
    assert structure.files_that_run(package, lambda: pool.BlockPool(4)) == ["cache/pool.py"]
    for name, text in (
        ("minivllm/one.py", "the_knob = 1"),
        ("minivllm/two.py", "the_knob_2"),
        ("minivllm/three.py", 'x = {"the_knob": 1}'),
        ("minivllm/four.py", '"""the_knob=1"""\nx = "the_knob=1"  # the_knob'),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "conf" / "preset").mkdir(parents=True)
    (tmp_path / "conf" / "group.yaml").write_text("the_knob: 2")
    (tmp_path / "conf" / "other.yaml").write_text("knob: 2  # not the_knob")
    (tmp_path / "conf" / "preset" / "one.yaml").write_text("group.the_knob: 2")
    assert structure.files_with(tmp_path, "the_knob") == [
        "minivllm/one.py",
        "minivllm/three.py",
        "conf/group.yaml",
    ]


def test_a_checkout_s_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = structure.structure(structure.ROOT)
    named, counts = figures["named"], figures["counts"]
    assert "engine/scheduler.py" in named["token"]
    assert set(named["token"]) < set(named["prompt"])
    if "passes/native.py" in named["token"]:  # with the C++ kernels
        text = (structure.ROOT / "docs/internals/architecture.md").read_text()
        table = re.findall(r"^\| [a-z]+ \| `([a-z_/]+\.py)` \|", text, re.M)
        assert sorted(table) == named["token"], "the table of a token's files is not this route"
    assert counts["cycles"] == 0 and counts["nf4"] == len(named["nf4"]) > 1
