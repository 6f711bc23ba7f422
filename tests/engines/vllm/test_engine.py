"""engine=vllm, against a stand-in for vLLM that its interpreter imports: the protocol, the mapping,
the failures."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm import BadInput, SamplingParams
from minivllm.bench.workloads.arrivals import Concurrency
from minivllm.bench.workloads.synthetic import Workload, WorkloadRequest
from minivllm.config.compose import build, compose
from minivllm.engines.vllm.engine import VllmEngine
from minivllm.errors import NotInstalled
from tests.engines.driving import requests, run

# Echoes prompt tokens, one a step, for as many requests as max_num_seqs says. What it was told goes
# to a file.
STAND_IN = """
import json, os, sys, time
from types import SimpleNamespace as Names

__version__ = "9.9"

class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(given)

class EngineArgs:
    def __init__(self, **given):
        if "nonsense" in given:
            raise TypeError("unexpected keyword argument 'nonsense'")
        self.__dict__.update(given)

class LLMEngine:
    @classmethod
    def from_engine_args(cls, args):
        print("this is not an answer", flush=True)
        engine = cls()
        engine.args, engine.live, engine.told = args, {}, []
        if os.path.isdir(args.model) and os.path.exists(args.model + "/config.json"):
            engine.model = json.load(open(args.model + "/config.json"))
        if os.environ.get("FAULT") == "build":
            raise ValueError("no such architecture")
        engine.vllm_config = Names(
            cache_config=Names(block_size=getattr(args, "block_size", 128), num_gpu_blocks=7,
                               enable_prefix_caching=args.enable_prefix_caching),
            scheduler_config=Names(max_num_seqs=args.max_num_seqs,
                                   max_num_batched_tokens=args.max_num_batched_tokens),
            model_config=Names(
                dtype="torch." + args.dtype, max_model_len=args.max_model_len or 4096
            ),
            device_config=Names(device_type="cpu"))
        kept = {k: v for k, v in args.__dict__.items() if k != "model"}
        engine.note(args=kept, model=engine.model,
                    threads=os.environ["OMP_NUM_THREADS"], path=os.environ.get("PYTHONPATH"))
        return engine

    def note(self, **fact):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps(fact) + "\\n")

    def has_unfinished_requests(self):
        return bool(self.live)

    def add_request(self, request_id, prompt, params):
        if prompt["prompt_token_ids"] == [66]:
            raise ValueError("prompts of 66 are refused")
        kept = {k: v for k, v in params.__dict__.items() if k != "output_kind"}
        self.note(request=request_id, params=kept)
        self.live[request_id] = [prompt["prompt_token_ids"], params, 0]

    def abort_request(self, ids):
        self.note(aborted=sorted(ids))
        for request_id in ids:
            del self.live[request_id]

    def reset_prefix_cache(self):
        self.note(cache="reset")

    def step(self):
        if os.environ.get("FAULT") == "step":
            raise RuntimeError("out of memory")
        if os.environ.get("FAULT") == "die":
            print("something terrible", flush=True)
            os._exit(3)
        time.sleep(float(os.environ.get("STEP_S", "0.002")))
        outputs = []
        for request_id, entry in list(self.live.items())[: self.args.max_num_seqs]:
            prompt, params, count = entry
            token = prompt[count % len(prompt)]
            entry[2] += 1
            reason = "length" if entry[2] == params.max_tokens else None
            if token in params.stop_token_ids:
                reason = "stop"
            if reason:
                del self.live[request_id]
            completion = Names(token_ids=(token,), finish_reason=reason)
            cached = len(prompt) - 1
            outputs.append(
                Names(request_id=request_id, outputs=[completion], num_cached_tokens=cached))
        return outputs
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> dict[str, str]:
    """Environment variables with which this interpreter has the stand-in."""
    for name, text in {
        "vllm/__init__.py": STAND_IN,
        "vllm/engine/__init__.py": "",
        "vllm/engine/arg_utils.py": "from vllm import EngineArgs",
        "vllm/v1/__init__.py": "",
        "vllm/v1/engine/__init__.py": "",
        "vllm/v1/engine/llm_engine.py": "from vllm import LLMEngine",
        "vllm/sampling_params.py": "class RequestOutputKind:\n    DELTA = 1",
        "vllm-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n",
    }.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"PYTHONPATH": str(tmp_path / "site"), "NOTES": str(tmp_path / "notes")}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is only there with `engine.env`, which the question for versions does not
    use."""
    monkeypatch.setattr("minivllm.engines.installed.peer_packages", lambda python: {"vllm": "9.9"})


def configuration(interpreter: dict[str, str], *overrides: str, **env: str) -> dict[str, Any]:
    config = compose(["engine=vllm", "runtime.device=cpu", "runtime.threads=3", *overrides])
    config["engine"] |= {"python": sys.executable, "env": {**interpreter, **env}}
    return config


def make(interpreter: dict[str, str], *overrides: str, **env: str) -> VllmEngine:
    config = configuration(interpreter, *overrides, **env)
    engine = build(config["engine"], config=config)
    assert isinstance(engine, VllmEngine)
    return engine


@pytest.fixture
def engine(interpreter: dict[str, str]) -> Iterator[VllmEngine]:
    built = make(interpreter)
    yield built
    built.close()


def notes(interpreter: dict[str, str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(interpreter["NOTES"]).read_text().splitlines()]


def workload(*lengths: int, ignore_eos: bool = True) -> Workload:
    return requests([(5, 6, 7)] * len(lengths), lengths, ignore_eos)


def test_tokens_come_as_they_are_made(interpreter: dict[str, str]) -> None:
    # A step takes longer than a busy machine does to look again.
    with closing(make(interpreter, STEP_S="0.1")) as engine:
        traces = run(engine, workload(4, 2, 1))
        counts = engine.liveness()
    assert [trace.token_ids for trace in traces] == [[5, 6, 7, 5], [5, 6], [5]]
    assert {trace.finish_reason for trace in traces} == {"length"}
    assert len(set(traces[0].token_times)) == 4, "each step's tokens are told at once"
    assert traces[2].token_times[0] <= traces[1].token_times[1] < traces[0].token_times[3]
    assert counts["engine"] == {"version": "9.9", "steps": 4.0}
    assert counts["batching"]["largest_batch"] == 3


def test_what_is_asked_reaches_vllm(interpreter: dict[str, str]) -> None:
    overrides = ("batching.max_num_seqs=2", "batching.max_num_batched_tokens=99", "quant=fp32")
    engine = make(interpreter, *overrides, "cache.prefix_caching=true", "cache.block_size=32")
    try:
        run(engine, workload(2, 2, 2), Concurrency(2), temperature=0.5, top_k=3, seed=1)
    finally:
        engine.close()
    built, *rest = notes(interpreter)
    assert built["args"]["dtype"] == "float32" and built["args"]["block_size"] == 32
    assert (built["args"]["max_num_seqs"], built["args"]["max_num_batched_tokens"]) == (2, 99)
    assert built["args"]["enable_prefix_caching"] and built["args"]["skip_tokenizer_init"]
    assert built["args"]["kv_cache_memory_bytes"] == 4_000_000_000
    assert built["threads"] == "3" and built["path"] == interpreter["PYTHONPATH"]
    params = [fact["params"] for fact in rest if "request" in fact]
    assert {p["temperature"] for p in params} == {0.5} and {p["top_k"] for p in params} == {3}
    assert len({p["seed"] for p in params}) == 3 and not any(p["detokenize"] for p in params)
    assert engine.info.max_num_seqs == 2 and engine.liveness()["cache"]["block_size"] == 32


def test_left_alone_vllm_chooses_its_block_size(
    engine: VllmEngine, interpreter: dict[str, str]
) -> None:
    assert "block_size" not in notes(interpreter)[0]["args"]
    assert engine.liveness()["cache"]["block_size"] == 128


def test_random_weights_are_a_config_and_dummies(interpreter: dict[str, str]) -> None:
    engine = make(
        interpreter, "model=qwen3", "model.weights=random", "engine.args={load_format: auto}"
    )
    engine.close()
    built = notes(interpreter)[0]
    assert built["model"]["num_hidden_layers"] == 28 and built["model"]["model_type"] == "qwen3"
    assert built["args"]["load_format"] == "auto", "engine.args wins"
    assert any("dummy weights" in warning for warning in engine.info.warnings)
    assert engine.info.weights == "random"


def test_the_end_of_sequence_ends_a_request_unless_ignored(engine: VllmEngine) -> None:
    engine.info.eos_token_ids = (6,)
    (ended,) = run(engine, workload(9, ignore_eos=False))
    assert (ended.token_ids, ended.finish_reason) == ([5, 6], "stop")
    (ignored,) = run(engine, workload(9))
    assert len(ignored.token_ids) == 9


def test_reset_leaves_nothing_behind(engine: VllmEngine, interpreter: dict[str, str]) -> None:
    engine.submit("long", [5, 6], SamplingParams(max_tokens=900, ignore_eos=True))
    assert engine.poll(10)
    engine.submit("waiting", [5], SamplingParams(max_tokens=3))
    engine.reset()
    assert engine.poll(0.05) == [] and engine.liveness()["engine"]["steps"] == 0
    assert {"aborted": ["long"]} in notes(interpreter) and {"cache": "reset"} in notes(interpreter)
    assert [trace.token_ids for trace in run(engine, workload(2))] == [[5, 6]]


def test_counting_anew_keeps_the_cache(engine: VllmEngine, interpreter: dict[str, str]) -> None:
    assert [trace.cached_tokens for trace in run(engine, workload(2))] == [2]
    engine.recount()
    assert engine.liveness()["engine"]["steps"] == 0
    assert {"cache": "reset"} not in notes(interpreter)


def test_a_warm_cache_is_kept(interpreter: dict[str, str]) -> None:
    engine = make(interpreter, "measure.prefix_cache=warm", "cache.prefix_caching=true")
    engine.reset()
    engine.close()
    assert {"cache": "reset"} not in notes(interpreter)


def test_what_vllm_refuses_is_told(engine: VllmEngine) -> None:
    load = Workload((WorkloadRequest("a", (66,), 3, True), WorkloadRequest("b", (5,), 3, True)))
    refused, served = run(engine, load)
    assert refused.status == "aborted" and "prompts of 66 are refused" in str(refused.error)
    assert served.status == "ok"
    with pytest.raises(BadInput, match="empty"):
        engine.submit("x", [], SamplingParams())


def test_the_process_ends_with_the_engine(engine: VllmEngine) -> None:
    process = psutil.Process(engine._child.process.pid)
    engine.close()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    engine._child.stop(0)  # again does no harm
    engine._results = os.open(os.devnull, os.O_RDONLY)  # for the fixture


@pytest.mark.parametrize(
    ("env", "overrides", "kind", "message"),
    [
        ({"FAULT": "build"}, (), BadInput, "vLLM rejects this configuration: no such architecture"),
        ({}, ("engine.args={nonsense: 1}",), BadInput, "nonsense"),
        ({"PYTHONPATH": "nowhere"}, (), BadInput, "cannot import vLLM"),
        ({}, ("runtime.device=cuda",), BadInput, "built for cpu"),
        ({}, ("quant=nf4",), BadInput, "quant=nf4 is not supported by engine=vllm"),
        ({}, ("cache.num_blocks=5",), BadInput, "cache.num_blocks=5 is not supported"),
    ],
)
def test_what_cannot_be_built(
    interpreter: dict[str, str],
    env: dict[str, str],
    overrides: tuple[str, ...],
    kind: type,
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        make(interpreter, *overrides, **env)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("step", "RuntimeError: out of memory"), ("die", "exit code 3.*something terrible")],
)
def test_a_failure_under_way_is_told_with_its_last_words(
    interpreter: dict[str, str], fault: str, message: str
) -> None:
    engine = make(interpreter, FAULT=fault)
    try:
        with pytest.raises(RuntimeError, match=message):
            run(engine, workload(3))
    finally:
        engine.close()


def test_a_killed_process_is_told(engine: VllmEngine) -> None:
    engine.submit("a", [5], SamplingParams(max_tokens=4000, ignore_eos=True))
    assert engine.poll(10)
    os.kill(engine._child.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exit code -9"):
        while True:
            engine.poll(10)


def test_what_it_prints_goes_to_the_log(
    interpreter: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    make(interpreter).close()
    assert "this is not an answer" in capfd.readouterr().err


def test_without_an_interpreter_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIVLLM_VLLM_PYTHON", raising=False)
    config = compose(["engine=vllm"])
    with pytest.raises(
        NotInstalled, match=r"python3 -m venv ~/vllm && ~/vllm/bin/pip install vllm"
    ):
        build(config["engine"], config=config)


def test_a_cell_from_the_command_line(
    cli: Any, interpreter: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interpreter that has the stand-in, as an environment of vLLM's has vLLM.
    python = Path(interpreter["NOTES"]).with_name("python")
    variables = " ".join(f"{name}='{value}'" for name, value in interpreter.items())
    python.write_text(f"#!/bin/sh\n{variables} exec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setenv("MINIVLLM_VLLM_PYTHON", str(python))
    result = cli(
        *("engine=vllm", "quant=fp32", "runtime.device=cpu", "name=peer"),
        *(
            "workload=smoke",
            "workload.num_requests=4",
            "workload.input_len=20",
            "workload.output_len=8",
        ),
    )
    assert result.code == 0, result.err
    (path,) = Path("runs/peer").glob("*/record.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok" and record["validity"]["ok"], record["validity"]
    assert record["metrics"]["output_tokens"] == 32 and record["liveness"]["engine"]["steps"] == 8
    assert record["breakdown"]["steps"] == 0 and record["memory"]["weights"] is None
    # What the environment gives is stored as it is written.
    assert record["config"]["engine"]["python"] == "${oc.env:MINIVLLM_VLLM_PYTHON,null}"
    assert record["provenance"]["peer_packages"]["vllm"] == "9.9"
    assert "this is not an answer" in (path.parent / "run.log").read_text()
