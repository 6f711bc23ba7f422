"""A user's own class is looked at before a device is waited for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.config import plug_ins
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.tasks import bench

SOURCE = """
from __future__ import annotations

class Mine:
    def __init__(
        self, share: float, many: int | None = None, word: str = "a",
        odd: list[Strange] | None = None,
    ):
        pass

def function(share=1, word="auto", flag=True, unset=None, **rest): ...
"""


@pytest.mark.parametrize(
    ("module", "option", "message"),
    [
        (
            SOURCE,
            "_target_: my_batching.Mine\nshare: abc",
            "batching.share='abc' must be a number, says my_batching.Mine",
        ),
        (
            SOURCE,
            "_target_: my_batching.Mine\nshare: 1\nmany: 2.5",
            "batching.many=2.5 must be a whole number or null",
        ),
        (
            SOURCE,
            "_target_: my_batching.function\nshare: abc",
            "batching.share='abc' must be a whole number or a number or null, says my_batching.f",
        ),
        (
            SOURCE,
            "_target_: my_batching.function\nflag: 3",
            "batching.flag=3 must be true or false or null, says my_batching.function",
        ),
        (
            SOURCE,
            "_target_: my_batching.Mine\nshar: 1",
            "batching.shar: my_batching.Mine takes no such argument; did you mean share?",
        ),
        (
            SOURCE,
            "_target_: my_batching.Min\nshare: 1",
            "batching: my_batching has no class Min; did you mean Mine?",
        ),
        (SOURCE, "_target_: my_gone.Mine", "batching: cannot import my_gone.Mine"),
        (
            "1 / 0",
            "_target_: my_batching.Mine",
            "importing my_batching.Mine raises ZeroDivisionError: division by zero (",
        ),
        (
            "import os; os._exit(3)",
            "_target_: my_batching.Mine",
            "importing ended the process with exit code 3",
        ),
    ],
)
def test_a_class_that_does_not_fit_is_one_line(
    cli: Callable[..., Any],
    user_dir: Path,
    plug_in: Callable[[str, str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    option: str,
    message: str,
) -> None:
    monkeypatch.setattr(
        bench, "supervise", lambda *args, **kwargs: pytest.fail("a worker was started")
    )
    (user_dir / "my_batching.py").write_text(module)
    plug_in("batching", "mine", option + "\n")
    done = cli(f"--config-dir={user_dir / 'conf'}", "batching=mine")
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
    assert not any(Path().iterdir())


def test_a_class_that_fits_passes(user_dir: Path) -> None:
    (user_dir / "my_batching.py").write_text(
        SOURCE + "import atexit\nprint('hello')\natexit.register(print, 'bye')\n"
    )
    settings = compose([])
    for node in (
        {"_target_": "my_batching.Mine", "share": 2, "odd": [{"a": 1}]},
        {"_target_": "my_batching.function", "anything": "goes"},
        {
            "_target_": "my_batching.function",
            "share": 0.5,
            "word": True,
            "unset": [1],
            "flag": None,
        },
    ):
        plug_ins.check({**settings, "batching": node})
        assert plug_ins.problem_of("batching", node) is None


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that look at classes from now on."""
    started: list[Any] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: started.append(a) or run(*a, **k))
    return started


def test_a_knob_may_name_an_option_of_minivllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its knobs were checked when the configuration was composed: there is nothing to look at."""
    monkeypatch.setattr(subprocess, "run", lambda *args, **knobs: pytest.fail("looked"))
    plug_ins.check(compose(["speculative=draft", "model@speculative.model=qwen3"]))


def test_configurations_of_a_sweep_are_looked_at_in_one_process(
    user_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user_dir / "my_several.py").write_text(SOURCE)
    started, settings = counted(monkeypatch), compose([])
    arms = [
        {**settings, "batching": {"_target_": "my_several.Mine", "share": share}}
        for share in (1, "abc", 2, 1)
    ]
    plug_ins.look_at([settings, *arms])
    assert len(started) == 1
    plug_ins.look_at(arms)
    for arm in (settings, arms[0], arms[2], arms[3]):
        plug_ins.check(arm)
    with pytest.raises(BadInput, match=r"batching\.share='abc' must be a number"):
        plug_ins.check(arms[1])
    assert len(started) == 1


def test_a_class_that_ends_the_process_is_the_problem_of_its_own_configuration(
    user_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user_dir / "my_several.py").write_text(SOURCE)
    (user_dir / "my_ending.py").write_text("import os; os._exit(3)")
    settings = compose([])
    good, bad = (
        {**settings, "batching": {"_target_": target, "share": 3}}
        for target in ("my_several.Mine", "my_ending.Mine")
    )
    plug_ins.look_at([good, bad])
    plug_ins.check(good)
    with pytest.raises(BadInput, match=r"^batching: my_ending\.Mine: importing ended .* code 3"):
        plug_ins.check(bad)


def test_settings_of_one_s_own_are_added_with_a_plus(
    cli: Callable[..., Any], user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    plug_in("report", "mine", "percentiles: [50]\n")
    done = cli(f"--config-dir={user_dir / 'conf'}", "report=mine", "sweep.dry_run=true")
    assert done.code == 2 and "is added with a plus, as in +report=NAME" in done.err, done.err


def test_an_option_of_minivllm_in_a_knob_is_no_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafting model is an option of `model`, whose class takes its knobs as one object."""
    monkeypatch.setattr(plug_ins, "_problem", lambda nodes, path: f"looked at {nodes}")
    plug_ins.check(compose(["speculative=draft", "model@speculative.model=tiny"]))
