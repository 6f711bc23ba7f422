"""engine=openvino, against a stand-in that its interpreter imports: the mapping of knobs, the
stored precision, the failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import BadInput, SamplingParams
from minivllm.config.compose import build, compose
from minivllm.engines.openvino.engine import OpenVINOEngine
from minivllm.errors import NotInstalled
from tests.engines.driving import requests, run

RUNTIME = """
import json, os

class Type:
    def __init__(self, name, bits):
        self.name, self.bits = name, bits
    def get_type_name(self):
        return self.name
    def get_bitwidth(self):
        return self.bits

class Constant:
    def __init__(self, name, bits, values):
        self.kind, self.values = Type(name, bits), values
    def get_type_name(self):
        return "Constant"
    def get_element_type(self):
        return self.kind
    def get_output_shape(self, port):
        return (2, self.values // 2)

class Model:
    def __init__(self, path):
        self.parts = json.load(open(path))
    def get_ops(self):
        return [Constant(*part) for part in self.parts]

class Core:
    def __init__(self):
        self.known = {"INFERENCE_PRECISION_HINT": Type("f32", 32), "ENABLE_CPU_PINNING": True,
                      "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32, "KV_CACHE_PRECISION": "u8",
                      "KEY_CACHE_PRECISION": "u8", "VALUE_CACHE_PRECISION": "u8",
                      "INFERENCE_NUM_THREADS": 0, "FULL_DEVICE_NAME": "a processor"}
    def set_property(self, device, properties):
        if "NONSENSE" in properties:
            raise RuntimeError("no such property")
        self.known |= properties
    def get_property(self, device, name):
        return self.known[name]
    def read_model(self, path):
        return Model(path)

class Tensor:
    def __init__(self, array):
        (self.ids,) = array.tolist()

def get_version():
    return "1.2"
"""
# Echoes prompt tokens, one a step; the answer to [7, 7] has no end.
GENAI = """
import json, os
from types import SimpleNamespace as Names

def get_version():
    return "9.9"

def note(**fact):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(fact) + "\\n")

class SchedulerConfig:
    pass

class GenerationConfig:
    pass

class Handle:
    def __init__(self, ids, config):
        self.ids, self.config, self.count, self.new = ids, config, 0, []
    def can_read(self):
        return bool(self.new)
    def read(self):
        output, self.new = self.new[0], self.new[1:]
        return {0: output}
    def cancel(self):
        note(cancelled=self.ids)
        self.count = self.config.max_new_tokens
    def step(self):
        token = self.ids[self.count % len(self.ids)]
        self.count += self.ids != [7, 7]
        end = "STOP" if token in self.config.stop_token_ids else (
            "LENGTH" if self.count >= self.config.max_new_tokens else "NONE")
        if end == "STOP":
            self.count = self.config.max_new_tokens
        self.new.append(Names(generated_ids=[token], finish_reason=Names(name=end)))

class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, properties):
        print("this is not an answer", flush=True)
        if os.environ.get("FAULT") == "build":
            raise RuntimeError("cannot compile")
        note(scheduler=vars(scheduler), properties=properties, path=os.environ.get("PYTHONPATH"))
        self.handles = []
    def add_request(self, number, tensor, config):
        if tensor.ids == [66]:
            raise ValueError("prompts of 66 are refused")
        note(request={k: v for k, v in vars(config).items() if k != "stop_token_ids"})
        self.handles.append(Handle(tensor.ids, config))
        return self.handles[-1]
    def live(self):
        return [h for h in self.handles if h.count < h.config.max_new_tokens]
    def has_non_finished_requests(self):
        return bool(self.live())
    def step(self):
        if os.environ.get("FAULT") == "step":
            raise RuntimeError("out of memory")
        for handle in self.live():
            handle.step()
"""
FLOATS = [["bf16", 16, 64], ["f32", 32, 2]]
BYTES = [["u8", 8, 64], ["f16", 16, 4]]
NIBBLES = [["u4", 4, 64], ["u8", 8, 40]]  # a small model's head has most bytes


@pytest.fixture
def interpreter(tmp_path: Path) -> dict[str, str]:
    """Environment variables with which this interpreter has the stand-in."""
    site = tmp_path / "site"
    site.mkdir()
    for name, text in {"openvino": RUNTIME, "openvino_genai": GENAI}.items():
        (site / f"{name}.py").write_text(text)
    for kind, parts in {"bf16": FLOATS, "int8": BYTES, "int4": NIBBLES}.items():
        folder = tmp_path / f"ir-{kind}"
        folder.mkdir()
        (folder / "openvino_model.xml").write_text(json.dumps(parts))
    return {"PYTHONPATH": str(site), "NOTES": str(tmp_path / "notes")}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is only there with `engine.env`, which the question for versions does not
    use."""
    monkeypatch.setattr(
        "minivllm.engines.installed.peer_packages",
        lambda python: {"openvino-genai": "9.9"},
    )


def make(interpreter: dict[str, str], *overrides: str, **given: Any) -> OpenVINOEngine:
    config = compose(["engine=openvino", "runtime.device=cpu", "runtime.threads=3", *overrides])
    env = {**interpreter, **given.pop("env", {})}
    ir = str(Path(interpreter["NOTES"]).with_name("ir-{type}"))
    config["engine"] |= {"python": sys.executable, "ir": ir, "env": env, **given}
    engine = build(config["engine"], config=config)
    assert isinstance(engine, OpenVINOEngine)
    return engine


@pytest.fixture
def engine(interpreter: dict[str, str]) -> Iterator[OpenVINOEngine]:
    built = make(interpreter)
    yield built
    built.close()


def notes(interpreter: dict[str, str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(interpreter["NOTES"]).read_text().splitlines()]


def test_tokens_come_as_they_are_made(engine: OpenVINOEngine) -> None:
    traces = run(engine, requests([(5, 6, 7)] * 3, (4, 2, 1)))
    assert [trace.token_ids for trace in traces] == [[5, 6, 7, 5], [5, 6], [5]]
    assert {trace.finish_reason for trace in traces} == {"length"}
    counts = engine.liveness()
    assert counts["engine"] == {"version": "9.9", "runtime": "1.2", "steps": 4.0}
    assert counts["batching"]["largest_batch"] == 3
    assert engine.info.memory["weights"] == 2 * 64 + 4 * 2


def test_what_is_asked_reaches_openvino(interpreter: dict[str, str]) -> None:
    overrides = ("batching.max_num_seqs=2", "batching.max_num_batched_tokens=99", "quant=int8")
    given = {"kv_cache_gb": 2, "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}}
    engine = make(interpreter, *overrides, "quant.activations=int8", "cache.kv_dtype=int8", **given)
    try:
        run(engine, requests([(5, 6)], (2,)), temperature=0.5, top_k=3, seed=1)
    finally:
        engine.close()
    built, asked = notes(interpreter)
    assert built["scheduler"] == {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 99,
        "dynamic_split_fuse": True,
        "enable_prefix_caching": False,
        "cache_size": 2,
    }
    assert built["properties"] == {
        "INFERENCE_NUM_THREADS": 3,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "u8",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    assert built["path"] == interpreter["PYTHONPATH"]
    assert asked["request"]["temperature"] == 0.5 and asked["request"]["top_k"] == 3
    assert asked["request"]["do_sample"] and asked["request"]["max_new_tokens"] == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["quant=bf16"], "none"),
        (["quant=int8", "quant.activations=int8"], "int8"),
        (["quant=int4", "quant.activations=int8"], "int8"),
        (["quant=int8"], "none"),
    ],
)
def test_the_record_says_who_multiplies_eight_bit_activations(
    interpreter: dict[str, str], overrides: list[str], said: str
) -> None:
    engine = make(interpreter, *overrides)
    engine.close()
    counts = engine.liveness()["quant"]
    assert counts["activations"] == said
    assert counts["activations_group_size"] == (32 if said == "int8" else 0)


def test_the_end_of_sequence_ends_a_request_unless_ignored(engine: OpenVINOEngine) -> None:
    engine.info.eos_token_ids = (6,)
    (ended,) = run(engine, requests([(5, 6, 7)], (9,), False))
    assert (ended.token_ids, ended.finish_reason) == ([5, 6], "stop")
    (ignored,) = run(engine, requests([(5, 6, 7)], (9,)))
    assert len(ignored.token_ids) == 9


def test_reset_leaves_nothing_behind(engine: OpenVINOEngine, interpreter: dict[str, str]) -> None:
    engine.submit("endless", [7, 7], SamplingParams(max_tokens=100_000, ignore_eos=True))
    assert engine.poll(10)
    engine.reset()
    assert engine.poll(0.05) == [] and engine.liveness()["engine"]["steps"] == 0
    assert {"cancelled": [7, 7]} in notes(interpreter)
    assert [trace.token_ids for trace in run(engine, requests([(5, 6)], (2,)))] == [[5, 6]]


def test_a_request_that_is_refused_is_told(engine: OpenVINOEngine) -> None:
    (refused,) = run(engine, requests([(66,)], (3,)))
    assert refused.status == "aborted" and "prompts of 66 are refused" in str(refused.error)


@pytest.mark.parametrize(
    ("overrides", "given", "message"),
    [
        ((), {"ir": None}, "engine.ir is missing.*save_openvino"),
        ((), {"ir": "/nowhere"}, "has no openvino_model.xml: convert the checkpoint with .*bf16"),
        (("quant=int8",), {"ir": "/nowhere"}, "int8 weights.*names one folder: write {type}"),
        (("quant=nf4",), {}, "quant=nf4 is not supported by engine=openvino"),
        (("cache.kv_dtype=fp8",), {}, "cache.kv_dtype=fp8 is not supported .* auto or int8"),
        (("model=qwen3", "model.weights=random"), {}, "model.weights=random is not supported"),
        ((), {"properties": {"NONSENSE": 1}}, "OpenVINO rejects.*NONSENSE=1: no such property"),
        ((), {"env": {"PYTHONPATH": "nowhere"}}, "cannot import OpenVINO"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_built(
    interpreter: dict[str, str], overrides: tuple[str, ...], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        make(interpreter, *overrides, **given)


@pytest.mark.parametrize(("asked", "there"), [("int8", "bf16"), ("bf16", "int4"), ("int4", "int8")])
def test_a_folder_of_another_precision_is_an_error(
    interpreter: dict[str, str], asked: str, there: str
) -> None:
    root = Path(interpreter["NOTES"]).parent
    (root / f"ir-{asked}").rename(root / "gone")
    (root / f"ir-{there}").rename(root / f"ir-{asked}")
    with pytest.raises(BadInput, match=r"holds its weights as .*: set quant accordingly"):
        make(interpreter, f"quant={asked}")


@pytest.mark.parametrize(
    ("fault", "message"), [("build", "cannot compile"), ("step", "RuntimeError: out of memory")]
)
def test_a_failure_is_told(interpreter: dict[str, str], fault: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(make(interpreter, env={"FAULT": fault}), requests([(5,)], (3,)))


def test_a_prefix_cache_is_said_to_be_kept(interpreter: dict[str, str]) -> None:
    engine = make(interpreter, "cache.prefix_caching=true")
    engine.close()
    assert engine.info.keeps_prefixes
    assert any("empties its prefix cache" in warning for warning in engine.info.warnings)


def test_without_an_interpreter_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIVLLM_OPENVINO_PYTHON", raising=False)
    config = compose(["engine=openvino"])
    with pytest.raises(NotInstalled, match=r"~/openvino/bin/pip install openvino-genai"):
        build(config["engine"], config=config)
