"""Sweeps over tasks without records: launchers are handed no secrets, jobs get them all the
same."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from minivllm.config.compose import compose, load
from minivllm.errors import BadInput
from minivllm.experiments import plain
from minivllm.experiments.plan import Sweep, product
from minivllm.experiments.schedule import compose_arms

GIVEN = ("task=report", "decoding.max_tokens=2,3", "engine=openai", "runs_dir=there")
SECRET = "engine.url=http://me:marker-one@h/v1"


def sweep_of(*overrides: str) -> Sweep:
    return product(OverridesParser.create().parse_overrides(list(overrides)))


def launch_all(sweep: Sweep, launch: Callable[[Sequence[Sequence[str]]], list[Any]]) -> int:
    return plain.launch_all(compose_arms(sweep, load), sweep, launch)


def test_jobs_have_the_secrets_that_their_overrides_have_not() -> None:
    seen = []

    def launch(jobs: Sequence[Sequence[str]]) -> list[Any]:
        assert "marker" not in str(jobs)
        paths = list(Path("there").glob(".jobs/*.json"))
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
        for job in jobs:
            settings = plain.settings_of_job(compose(job))
            seen.append((settings["engine"]["url"], settings["decoding"]["max_tokens"]))
        with pytest.raises(BadInput, match=r"sweep\.plan=nowhere.*: there is no such file"):
            plain.settings_of_job(compose([*jobs[0], "sweep.plan=nowhere.json"]))
        return [SimpleNamespace(return_value=code) for code in (0, 1)]

    assert launch_all(sweep_of(*GIVEN, SECRET), launch) == 1
    assert seen == [("http://me:marker-one@h/v1", 2), ("http://me:marker-one@h/v1", 3)]
    assert not Path("there").exists()


def test_without_secrets_nothing_is_written() -> None:
    handed = []

    def launch(jobs: Sequence[Sequence[str]]) -> list[Any]:
        handed.extend(jobs)
        assert not Path("there").exists()
        return [SimpleNamespace(return_value=0) for _ in jobs]

    assert launch_all(sweep_of(*GIVEN), launch) == 0
    assert all("sweep.plan" not in " ".join(job) for job in handed) and len(handed) == 2
    assert plain.settings_of_job(compose(handed[0])) == compose(handed[0])


def test_a_folder_that_cannot_hold_the_secrets_is_bad_input() -> None:
    sweep = sweep_of(*GIVEN, SECRET)
    cells = compose_arms(sweep, load)
    Path("there").write_text("in the way")
    with pytest.raises(
        BadInput, match=r"runs_dir=.*there: the files of the jobs' secrets cannot be written"
    ):
        plain.launch_all(cells, sweep, lambda jobs: [])
