from __future__ import annotations

import json
from pathlib import Path

import pytest

from minivllm.bench.records.identity import cell_id
from minivllm.bench.records.reading import read_record
from minivllm.config.compose import compose
from minivllm.config.moved import MOVED, first, present
from minivllm.platform.plug_ins import locate

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("old", sorted(MOVED))
def test_no_module_stands_for_two_and_each_is_where_the_table_says(old: str) -> None:
    target = old if old.rpartition(".")[2][0].isupper() else f"{old}.Name"
    assert first(present(target)) == first(target)
    module = MOVED[old] if target != old else MOVED[old].rpartition(".")[0]
    assert (ROOT / (module.replace(".", "/") + ".py")).is_file()


def test_others_are_as_they_are() -> None:
    assert present("my_package.MyClass") == "my_package.MyClass" == first("my_package.MyClass")


def test_an_option_file_of_before_is_the_same_cell(tmp_path: Path) -> None:
    (tmp_path / "arrival").mkdir()
    (tmp_path / "arrival" / "mine.yaml").write_text(
        "_target_: minivllm.bench.arrivals.Poisson\nrate: 4\n"
    )
    mine = compose(["arrival=mine"], tmp_path)
    assert locate(mine["arrival"]["_target_"]).__name__ == "Poisson"
    assert mine["arrival"]["_target_"] == present("minivllm.bench.arrivals.Poisson")
    assert cell_id(mine, "f") == cell_id(compose(["arrival=poisson", "arrival.rate=4"]), "f")


def test_a_record_of_before_names_its_classes_as_they_are_named_today(tmp_path: Path) -> None:
    config = {
        "arrival": {"_target_": "minivllm.bench.arrivals.Offline"},
        "engine": {"_target_": "mine.Engine"},
    }
    record = {"schema_version": 2, "run_id": "r", "cell_id": "c", "status": "ok", "config": config}
    (tmp_path / "record.json").write_text(json.dumps(record))
    read = read_record(tmp_path / "record.json")["config"]
    assert read["arrival"]["_target_"] == present("minivllm.bench.arrivals.Offline")
    assert read["engine"]["_target_"] == "mine.Engine"
