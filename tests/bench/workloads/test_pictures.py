"""Pictures by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.bench.workloads.pictures import another, content, draw, encoded, generated, of_file
from minivllm.errors import BadInput
from minivllm.models.vision.picture import data_uri, open_picture
from tests.seeing import encoded as file_of
from tests.seeing import picture


def test_a_file_is_known_by_its_content_wherever_it_lies(tmp_path: Path) -> None:
    first, second = tmp_path / "a#1.png", tmp_path / "b.png"
    for path in (first, second):
        path.write_bytes(file_of(picture(9, 7)))
    names = [of_file(path, "line 1") for path in (first, second)]
    assert names[0] != names[1] and content(names[0]) == content(names[1])
    assert draw(names[0]).tobytes() == draw(names[1]).tobytes() == picture(9, 7).tobytes()
    first.write_bytes(file_of(picture(9, 7, seed=1)))
    with pytest.raises(BadInput, match="has changed since the workload was made"):
        draw(names[0])
    with pytest.raises(BadInput, match="line 1"):
        of_file(tmp_path / "gone.png", "line 1")
    with pytest.raises(BadInput, match=r"gone\.png") as caught:
        of_file(tmp_path / "\x1b]0;title\x07gone.png", "line 1")
    assert str(caught.value).isprintable()


def test_what_is_no_name_is_told() -> None:
    assert draw(generated(3, 4, 5)).size == (3, 4)
    with pytest.raises(BadInput, match="is no picture of a workload"):
        draw("cat.png")


def test_a_picture_is_sent_as_its_file_or_as_png(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(picture(9, 7), "JPEG"))
    data = encoded(of_file(path, "line 1"))
    assert data == path.read_bytes() and data_uri(data).startswith("data:image/jpeg;base64,")
    data = encoded(generated(9, 7, 3))
    assert data_uri(data).startswith("data:image/png;base64,")
    assert open_picture(data).tobytes() == draw(generated(9, 7, 3)).tobytes()


def test_another_picture_has_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(file_of(picture(9, 7)))
    for name in (of_file(path, "line 1"), generated(9, 7, 3)):
        other = another(name)
        assert draw(other).size == (9, 7) and another(name) == other
        assert draw(other).tobytes() != draw(name).tobytes()
