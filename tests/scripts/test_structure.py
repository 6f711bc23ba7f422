"""scripts/structure.py counts what it says."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scripts.load import load_script

structure = load_script("structure")
# Files and lines of code of each way. What runs counts, wherever it lies. There is headroom for a
# few lines; a way that has none is to be divided by what it does.
CEILINGS = {
    "token": (15, 1_750),
    "prompt": (25, 2_800),
    "build": (77, 8_350),
    "http": (48, 6_150),
}
LONGER = "more runs than before: divide what a way enters by what it does"


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


def test_files_of_what_runs_and_of_what_holds_a_value() -> None:
    from minivllm.cache import pool

    package = structure.ROOT / "minivllm"
    assert structure.files_that_run(package, lambda: pool.BlockPool(4)) == ["cache/pool.py"]
    for blocks, held in ((structure.BLOCK_SIZE, ["cache/pool.py"]), (4, [])):
        made = partial(pool.BlockPool, blocks)
        assert structure.files_that_hold(package, made, structure.has_block_size) == held


def test_a_number_is_followed_from_where_it_is_made() -> None:
    source = (structure.ROOT / "scripts" / "record_calls" / "sitecustomize.py").read_text()
    recorder: dict[str, Any] = {"__name__": "recorder"}
    exec(source, recorder)
    bodies = {
        "bench/driver.py": "def act(): return 1",  # searched from here on
        "bench/made.py": "def act(): return {'itl': [0.5]}",
        "bench/fetched.py": "def act(make):\n    record = make()\n    return len(record)",
        "bench/given.py": "def act(record):\n    return len(record)",
        "bench/written.py": "def act(): return 'itl: 0.5'",
        "report/cells.py": "def act(make):\n    rows = make()\n    return len(rows)",
        "report/listed.py": "def act(make):\n    return len([row for row in make().values()])",
        "report/shown.py": "def act(value): return None",
        "report/other.py": "def act(): return 0.25",
    }
    acts: dict[str, Any] = {}
    for place, body in bodies.items():
        space: dict[str, Any] = {}
        exec(compile(body, f"/minivllm/{place}", "exec"), space)
        acts[place] = space["act"]
    sys.setprofile(recorder["holders_of"](0.5))
    try:
        made = acts["bench/made.py"]
        acts["bench/driver.py"](), acts["report/other.py"](), acts["bench/written.py"]()
        acts["bench/given.py"]({"itl": 0.5}), acts["bench/fetched.py"](made)
        acts["report/cells.py"](made), acts["report/shown.py"](0.5)
        acts["report/listed.py"](made)
    finally:
        sys.setprofile(None)
    assert sorted(recorder["_seen"]) == [
        f"/minivllm/{place}"
        for place in ("bench/fetched.py", "bench/made.py", "bench/written.py", "report/shown.py")
    ]


def test_a_block_size_and_a_method_are_recognised() -> None:
    size = structure.BLOCK_SIZE
    for value in (size, {"block_size": size}, SimpleNamespace(block_size=size)):
        assert structure.has_block_size(value)
    for value in (float(size), str(size), size + 1, {"size": size}, SimpleNamespace(size=size)):
        assert not structure.has_block_size(value)
    assert structure.has_nf4({"_target_": "minivllm.quant.nf4.NF4"})
    assert structure.has_nf4(type("NF4", (), {})())
    assert not structure.has_nf4({"_target_": "minivllm.quant.int8.Int8"})
    assert not structure.has_nf4("nf4")


def over(ways: dict[str, list[str]]) -> dict[str, tuple[int, int]]:
    """Files and lines of the ways that are above their ceilings."""
    package = structure.ROOT / "minivllm"
    sizes = {
        way: (len(files), sum(structure.code_lines(package / name) for name in files))
        for way, files in ways.items()
    }
    return {
        way: (files, lines)
        for way, (files, lines) in sizes.items()
        if files > CEILINGS[way][0] or lines > CEILINGS[way][1]
    }


def test_the_ways_of_an_engine_stay_short() -> None:
    named = structure.probed(structure.ROOT)
    assert "engine/scheduler.py" in named["token"]
    assert set(named["token"]) < set(named["prompt"])
    assert not {"extras/extensions.py", "cache/prefix.py"} & set(named["prompt"])
    assert {"quant/nf4.py", "assembly.py"} < set(named["nf4"])
    assert {"cache/manager.py", "config/compose.py"} < set(named["block_size"])
    for way in ("block_size", "nf4"):
        aside = {"redaction.py", "config/interpolation.py", "platform/plug_ins.py"}
        assert not aside & set(named[way])
    if "passes/native.py" not in named["token"]:
        return  # without the C++ kernels more files compute a step
    assert not over({way: named[way] for way in ("token", "prompt", "build")}), LONGER
    text = (structure.ROOT / "docs/internals/architecture.md").read_text()
    table = re.findall(r"^\| `([a-z_/]+\.py)` \|", text, re.M)
    assert sorted(table) == sorted(named["token"]), "the recorded files of a token are not these"


@pytest.mark.real  # a whole server, and a cell that is measured twice
def test_the_ways_of_a_server_and_a_cell_stay_short() -> None:
    figures = structure.structure(structure.ROOT)
    named = figures["named"]
    assert {"engine/engine.py", "serving/service.py"} < set(named["http"])
    assert not {"masking.py", "serving/server.py"} & set(named["http"])
    assert {"bench/metrics/latency.py", "bench/completion.py", "report/results.py"} < set(
        named["itl"]
    )
    assert figures["counts"]["cycles"] == 0
    if "passes/native.py" in named["token"]:
        assert not over({"http": named["http"]}), LONGER
