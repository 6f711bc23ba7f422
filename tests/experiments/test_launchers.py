"""Whichever launcher runs a sweep: the same records, one measurement at a time on a device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import cluster

SWEEP = ("engine.delay_s=0.001,0.002", "workload.num_requests=2,3", "measure.repeats=2")
ELSEWHERE = "else where"
WORDS = {
    "joblib": (),
    "submitit_local": (f"runs_dir={ELSEWHERE}",),
    "ray": ("hydra.launcher.ray.init.include_dashboard=false",),  # takes longer than all else
}
PACKAGES = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "ray": "hydra_ray_launcher",
}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A short path: Ray puts sockets there, whose names may not be long."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> Path:
    """The sweep by Hydra's basic launcher."""
    folder = tmp_path_factory.mktemp("basic")
    process = cluster.start(folder, *SWEEP, temporary=temporary)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=[pytest.mark.real] if name == "ray" else []) for name in PACKAGES],
)
def test_every_launcher_leaves_the_same_records(
    launcher: str, basic: Path, temporary: Path, tmp_path: Path
) -> None:
    pytest.importorskip(f"hydra_plugins.{PACKAGES[launcher]}")
    knobs = (*SWEEP, f"hydra/launcher={launcher}", *WORDS[launcher])
    process = cluster.start(tmp_path, *knobs, temporary=temporary)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    if launcher == "submitit_local":  # logs of its jobs lie below the folder that was asked for
        assert any((tmp_path / ELSEWHERE / ".submitit").iterdir())
        assert not (tmp_path / "runs").exists()
        (tmp_path / ELSEWHERE).rename(tmp_path / "runs")
    wanted, found = cluster.records(basic), cluster.records(tmp_path)
    assert set(found) == set(wanted) and len(found) == 8
    for run_id, record in found.items():
        expected = wanted[run_id]
        for field in ("cell_id", "arm", "block", "position", "status", "sweep", "workload_hash"):
            assert record[field] == expected[field]
        assert record["config"]["engine"] == expected["config"]["engine"]
    assert (tmp_path / "reports" / cluster.NAME / "index.html").exists()
    assert not list(tmp_path.glob(".*")) and not list(
        tmp_path.glob("*.yaml")
    )  # nothing but what basic leaves
    engines = [line for line in cluster.log(tmp_path) if not line.startswith("measured")]
    assert len(engines) == 4
    for build, close in zip(engines[::2], engines[1::2], strict=True):  # one after the other
        assert build.split()[0] == "build" and close == build.replace("build", "close")


@pytest.mark.parametrize(
    ("launcher", "extra"),
    [
        ("ray", "ray"),
        ("joblib", "joblib"),
        ("submitit_slurm", "slurm"),
        ("submitit_local", "slurm"),
    ],
)
def test_a_launcher_that_is_not_installed(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, launcher: str, extra: str
) -> None:
    from hydra.core.plugins import Plugins

    known = Plugins.instance().class_name_to_class
    monkeypatch.setattr(
        Plugins.instance(),
        "class_name_to_class",
        {name: cls for name, cls in known.items() if "_launcher." not in name or "basic" in name},
    )
    done = cli("-m", "cache.block_size=8,16", f"hydra/launcher={launcher}")
    assert done.code == 2
    command = f"pip install -e '.[{extra}]' -c constraints.txt"
    assert done.err == (
        f"error: hydra/launcher={launcher}: its plugin is not installed; {command}\n"
    )
    assert not Path("runs").exists()
