"""Presets that are sweeps: which arms they stand for, and how a command changes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.experiments.plan import Sweep

Cli = Callable[..., Any]
Study = Callable[..., list[str]]


@pytest.fixture
def arms(cli: Cli, user_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """The names of the arms that a command with a user's presets stands for."""
    seen: list[Sweep] = []

    def note(sweep: Sweep, load: object, launch: object) -> int:
        seen.append(sweep)
        return 0

    monkeypatch.setattr("minivllm.experiments.sweep.run_sweep", note)

    def run(*argv: str) -> list[str]:
        done = cli(f"--config-dir={user_dir / 'conf'}", *argv)
        assert done.code == 0, done.err
        return [arm.name for arm in seen[-1].arms]

    return run


@pytest.fixture
def study(plug_in: Callable[[str, str, str], None]) -> Callable[[str, str], None]:
    def write(name: str, params: str) -> None:
        plug_in(
            "preset",
            name,
            f"# @package _global_\nsweep:\n  params: {params}\nhydra:\n  mode: MULTIRUN\n",
        )

    return write


STUDIES = [
    path.stem
    for path in sorted((Path(__file__).parents[2] / "conf/preset").glob("*.yaml"))
    if "sweep:\n  params:" in path.read_text()
]


@pytest.mark.parametrize("preset", STUDIES)
def test_every_study_of_the_project_stands_for_arms(arms: Study, preset: str) -> None:
    assert len(arms(f"preset={preset}")) > 1


def test_a_study_is_a_sweep_without_a_flag(arms: Study, study: Callable[[str, str], None]) -> None:
    study("mine", "[{quant: 'bf16,int8', cache.block_size: 'range(8,17,8)'}]")
    named = [
        f"cache.block_size={size} quant={quant}" for quant in ("bf16", "int8") for size in (8, 16)
    ]
    assert arms("preset=mine") == named
    assert arms("-m", "preset=mine") == named
    assert arms("preset=mine", "model.max_model_len=64") == named


def test_the_command_line_wins_and_multiplies(
    arms: Study, study: Callable[[str, str], None]
) -> None:
    study("mine", "[{cache.block_size: '8,16'}]")
    assert arms("preset=mine", "cache.block_size=4") == ["cache.block_size=4"]
    assert arms("-m", "preset=mine", "cache.block_size=4,2") == [
        "cache.block_size=4",
        "cache.block_size=2",
    ]
    assert arms("-m", "preset=mine", "quant=bf16,int8") == [
        f"cache.block_size={size} quant={quant}" for quant in ("bf16", "int8") for size in (8, 16)
    ]


def test_knobs_that_only_an_arm_has_may_be_set(
    arms: Study, study: Callable[[str, str], None]
) -> None:
    study("mine", "[{quant: 'int8,nf4'}]")
    assert arms("preset=mine", "quant.skip=[down_proj]") == ["quant=int8", "quant=nf4"]


def test_a_study_may_be_several_products(arms: Study, study: Callable[[str, str], None]) -> None:
    study(
        "mine", "[{cache.prefix_caching: false}, {cache.prefix_caching: true, measure.seed: '1,2'}]"
    )
    assert arms("preset=mine") == [
        "cache.prefix_caching=False",
        "cache.prefix_caching=True measure.seed=1",
        "cache.prefix_caching=True measure.seed=2",
    ]


def test_a_union_names_the_study_of_each_arm(
    arms: Study, study: Callable[[str, str], None]
) -> None:
    study("sizes", "[{cache.block_size: '8,16'}]")
    study("quants", "[{quant: 'bf16,int8'}]")
    study("both", "[{preset: 'sizes,quants'}]")
    assert arms("preset=both", "model=qwen3") == [
        "cache.block_size=8 preset=sizes",
        "cache.block_size=16 preset=sizes",
        "preset=quants quant=bf16",
        "preset=quants quant=int8",
    ]
    assert arms("-m", "preset=sizes,quants") == arms("preset=both")


def test_a_study_of_itself_is_refused(
    cli: Cli, user_dir: Path, study: Callable[[str, str], None]
) -> None:
    study("a", "[{preset: 'b,none'}]")
    study("b", "[{preset: 'a'}]")
    done = cli(f"--config-dir={user_dir / 'conf'}", "preset=a")
    assert done.code == 2 and done.err.startswith("error: preset=a: this study contains itself")
    study("odd", "[quant, cache]")
    done = cli(f"--config-dir={user_dir / 'conf'}", "preset=odd")
    assert (
        done.code == 2 and done.err.startswith("error: sweep.params=") and done.err.count("\n") == 1
    )


def test_mistakes_are_told_as_everywhere(cli: Cli) -> None:
    done = cli("preset=kv_cache", "cach=3")
    assert done.code == 2 and done.err.endswith(
        "cach: no such group or setting; did you mean cache?\n"
    )
    assert cli("preset=kv_cach").err.startswith(
        "error: preset=kv_cach: no such option; did you mean kv_cache?"
    )
    assert not Path("runs").exists()
