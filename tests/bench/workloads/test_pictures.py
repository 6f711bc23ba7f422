"""Pictures by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.bench.workloads.pictures import content, draw, generated, of_file
from minivllm.errors import BadInput
from tests.seeing import encoded, picture


def test_a_file_is_known_by_its_content_wherever_it_lies(tmp_path: Path) -> None:
    first, second = tmp_path / "a#1.png", tmp_path / "b.png"
    for path in (first, second):
        path.write_bytes(encoded(picture(9, 7)))
    names = [of_file(path, "line 1") for path in (first, second)]
    assert names[0] != names[1] and content(names[0]) == content(names[1])
    assert draw(names[0]).tobytes() == draw(names[1]).tobytes() == picture(9, 7).tobytes()
    first.write_bytes(encoded(picture(9, 7, seed=1)))
    with pytest.raises(BadInput, match="has changed since the workload was made"):
        draw(names[0])
    with pytest.raises(BadInput, match="line 1"):
        of_file(tmp_path / "gone.png", "line 1")


def test_what_is_no_name_is_told() -> None:
    assert draw(generated(3, 4, 5)).size == (3, 4)
    with pytest.raises(BadInput, match="is no picture of a workload"):
        draw("cat.png")
