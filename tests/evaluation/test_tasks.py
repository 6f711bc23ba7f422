"""Whole tasks through lm-eval: its evaluator, its command line, how it finds the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import tomllib
import urllib.request
from functools import partialmethod
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from minivllm.evaluation import __main__ as runner
from tests.engines import fake_server
from tests.evaluation.conftest import ASSETS, Pair

ROOT = Path(__file__).resolve().parents[2]
HELDOUT = (ASSETS / "heldout.txt").read_text()

CHOICES = [
    {"question": "import numpy as", "choices": [" np", " plt", " pd"], "answer": 0},
    {"question": "for i in", "choices": [" while", " range", " class"], "answer": 1},
    {"question": "if x is not", "choices": [" None", " import", " def"], "answer": 0},
    {"question": "def __init__(", "choices": ["other", "self", "cls"], "answer": 0},
    {
        "question": "try:\n    f()\nexcept",
        "choices": [" lambda", " ValueError", " yield"],
        "answer": 2,
    },
]
QUESTIONS = [
    {"question": "import numpy as ", "answer": "np"},
    {"question": "def __init__(", "answer": "self"},
    {"question": "    def __len__(self):\n        return ", "answer": "len(self._data)"},
    {"question": "class Foo(", "answer": "object"},
]
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "local_choice": (
        CHOICES,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
            "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
        },
    ),
    "local_generation": (
        QUESTIONS,
        {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {
                "until": ["\n", ",", ")"],
                "max_gen_toks": 12,
                "do_sample": False,
            },
            "metric_list": [{"metric": "exact_match"}],
        },
    ),
    "local_perplexity": (
        [{"text": HELDOUT[i : i + 700]} for i in range(0, 2100, 700)],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
        },
    ),
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of tasks, their data beside them: nothing is downloaded."""
    for name, (rows, task) in TASKS.items():
        data = tmp_path / f"{name}.json"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "datasets")}
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": source,
            "test_split": "test",
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(common | task))
    return tmp_path


def metrics(results: dict[str, Any]) -> dict[str, float]:
    """Every number of every task's result."""
    return {
        f"{task} {name}": value
        for task, row in results["results"].items()
        for name, value in row.items()
        if isinstance(value, float) and value == value
    }


def test_tasks_give_the_results_of_hf(pair: Pair, tasks: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    hf, ours = (
        simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=10)
        for model in (pair.hf, pair.ours)
    )
    # Relative for a perplexity in the hundreds: hf adds up log-probabilities in float32.
    assert metrics(ours) == pytest.approx(metrics(hf), rel=1e-6, abs=1e-4)
    for name in ("local_choice acc,none", "local_generation exact_match,none"):
        assert 0 < metrics(ours)[name] < 1, name  # else equal results would say little
    assert metrics(ours)["local_perplexity bits_per_byte,none"] > 0
    for a, b in zip(ours["samples"]["local_choice"], hf["samples"]["local_choice"], strict=True):
        for (mine,), (theirs,) in zip(a["resps"], b["resps"], strict=True):
            assert float(mine[0]) == pytest.approx(float(theirs[0]), rel=0, abs=1e-4)
            assert mine[1] == theirs[1]
    for a, b in zip(
        ours["samples"]["local_generation"], hf["samples"]["local_generation"], strict=True
    ):
        assert a["resps"] == b["resps"]


# lm-eval's index of its own tasks, thousands of files, takes seconds of a processor.
WITHOUT_DEFAULTS = """
import runpy
from functools import partialmethod
from lm_eval.tasks import TaskManager
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
runpy.run_module("minivllm.evaluation", run_name="__main__", alter_sys=True)
"""


def command(tasks: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    """`python -m minivllm.evaluation` in a process of its own."""
    words = ["--model", "minivllm", "--include_path", str(tasks), "--tasks", "local_choice"]
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_DEFAULTS, *words, "--device", "cpu", *extra],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.real  # lm-eval in a process of its own
def test_the_command_line_runs_a_task(pair: Pair, tasks: Path) -> None:
    arguments = "pretrained=tiny,quant=fp32,cache.block_size=32"
    done = command(tasks, "--model_args", arguments, "--output_path", str(tasks / "out"))
    assert done.returncode == 0, done.stderr
    assert "local_choice" in done.stdout and "minivllm" in done.stdout
    (file,) = (tasks / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert (
        results["config"]["model"] == "minivllm"
        and results["config"]["minivllm"]["quant"] == "fp32"
    )
    assert 0 < results["results"]["local_choice"]["acc,none"] < 1


def test_a_mistake_is_one_line_and_exit_code_2(
    pair: Pair, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    index = partialmethod(TaskManager.__init__, include_defaults=False)  # of thousands of files
    monkeypatch.setattr(TaskManager, "__init__", index)
    words = ["--model", "minivllm", "--include_path", str(tasks), "--tasks", "local_choice"]
    monkeypatch.setattr(
        sys, "argv", ["minivllm.evaluation", *words, "--model_args", "pretrained=tiny,quantt=nf4"]
    )
    assert runner.main() == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: quantt: no such model argument; did you mean quant?")


def test_a_data_set_that_cannot_be_reached_is_one_line(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the hub its libraries are told so, and do not try again and again."""
    import lm_eval.__main__

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in runner.OFFLINE:
        monkeypatch.setenv(name, "")

    def evaluate() -> None:
        assert [os.environ[name] for name in runner.OFFLINE] == ["1", "1"]
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub\nmore of it")

    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", evaluate)
    assert runner.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: a task's data set cannot be reached (Couldn't reach 'allenai/ai2_arc' on the Hub)"
    )


def test_a_hub_that_answers_anything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server, url = fake_server.in_thread()
    monkeypatch.setenv("HF_ENDPOINT", url)  # it knows no HEAD
    assert runner.hub_answers()
    server.shutdown()
    server.server_close()
    assert not runner.hub_answers()


def test_a_hub_that_never_answers_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = threading.Event()

    def look_up(*_: Any, **__: Any) -> None:
        tested.wait()
        raise OSError("no such host")

    monkeypatch.setattr(runner, "ASK_S", 0.01)
    monkeypatch.setattr(urllib.request, "urlopen", look_up)
    assert not runner.hub_answers()
    tested.set()


def test_offline_is_what_the_libraries_take_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(runner, "hub_answers", ask)
    monkeypatch.setattr(sys, "argv", ["lm-eval", "--help"])
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    for value, asks in (("1", 0), ("yes", 0), ("0", 1), ("", 1)):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        asked.clear()
        with pytest.raises(SystemExit):
            runner.main()
        assert len(asked) == asks


def test_without_lm_eval_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    assert runner.main() == 2
    command = "pip install -e '.[eval]' -c constraints.txt"
    assert capsys.readouterr().err == f"error: lm-eval is not installed: {command}\n"


def test_the_entry_point_names_the_model(pair: Pair) -> None:
    from lm_eval.api.registry import get_model

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["lm_eval.models"].items()
    assert (
        EntryPoint(name, value, "lm_eval.models").load() is get_model("minivllm") is type(pair.ours)
    )
    assert get_model("hf") is type(pair.hf)  # ours does not stand in the way of lm-eval's own
