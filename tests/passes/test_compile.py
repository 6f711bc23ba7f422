"""runtime.compile: the same tokens as without, whatever the compiler leaves to others; one graph
for every length."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from minivllm import LLM, SamplingParams
from minivllm.assembly import build_part
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import BadInput
from minivllm.extras.scoring import sequence_logits
from minivllm.models.layers import Attention
from minivllm.parallel.ranks import GroupRanks
from minivllm.passes import compile
from minivllm.passes.compile import CompiledPart, Compiler, OpaqueLinear
from minivllm.passes.shard import SummedOverRanks
from tests.reference import make_checkpoint

PROMPTS = [list(range(2, 2 + count)) for count in (7, 1, 40, 23)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def load(folder: Path, *overrides: str, quant: str = "fp32", attention: str = "sdpa") -> LLM:
    knobs = ["runtime.cpu_kernels=off", "model.max_model_len=96", "cache.num_blocks=64", *overrides]
    return LLM(str(folder), quant=quant, attention=attention, device="cpu", overrides=knobs)


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]


def parts(llm: LLM) -> list[CompiledPart]:
    return [
        module for module in llm.engine.loaded.model.modules() if isinstance(module, CompiledPart)
    ]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor takes seconds a graph; what the compiler made of the Python code runs without it
    just as well."""

    def trace(
        self: Compiler, graph: torch.fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        self.counters["graphs"] += 1
        return graph

    monkeypatch.setattr(Compiler, "__call__", trace)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_backend_stays_what_it_is(tmp_path: Path, attention: str) -> None:
    make_checkpoint(tmp_path, "qwen3")
    plain, whole = (
        load(tmp_path, f"runtime.compile={on}", attention=attention) for on in ("false", "true")
    )
    assert (len(parts(plain)), len(parts(whole))) == (0, 3)
    assert tokens(whole) == tokens(plain)
    torch.testing.assert_close(whole.logits(PROMPTS[2]), plain.logits(PROMPTS[2]))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("family", "moe"),
    [
        ("llama", "auto"),
        ("gemma3_text", "auto"),
        ("mixtral", "loop"),
        ("qwen3_moe", "loop"),
        ("qwen3_moe", "grouped"),
    ],
)
def test_one_graph_serves_all_layers_and_lengths(tmp_path: Path, family: str, moe: str) -> None:
    make_checkpoint(tmp_path, family)
    llm, plain = (
        load(tmp_path, f"runtime.compile={on}", f"runtime.moe={moe}") for on in ("true", "false")
    )
    made = parts(llm)
    compiler = made[0].compiler
    assert [part.layer for part in made] == [0, 1, 2]
    # What torch may compile in must be the same in all layers.
    assert {m.layer for m in llm.engine.loaded.model.modules() if isinstance(m, Attention)} == {0}
    # Of a layer with experts only the attention module is compiled.
    assert (type(made[0].inner).__name__ == "Attention") == (family in ("mixtral", "qwen3_moe"))
    assert compiler.counters["graphs"] == 2  # one token, and several
    for count in (2, 3, 1, 17, 96):
        ids = list(range(2, 2 + count))
        torch.testing.assert_close(llm.logits(ids), plain.logits(ids))
    assert tokens(llm) == tokens(plain)
    assert compiler.counters["graphs"] == 2


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_products_of_their_own_are_left_as_they_are(tmp_path: Path, quant: str) -> None:
    make_checkpoint(tmp_path)
    llm, plain = load(tmp_path, "runtime.compile=true", quant=quant), load(tmp_path, quant=quant)
    opaque = {
        type(m.inner).__name__
        for m in llm.engine.loaded.model.modules()
        if isinstance(m, OpaqueLinear)
    }
    assert ("Int4Linear" in opaque) == (quant == "int4")
    assert not opaque & {"Int8Linear", "FP8Linear"}
    graphs = parts(llm)[0].compiler.counters["graphs"]
    for count in (1, 5, 9, 41, 90):
        ids = list(range(2, 2 + count))
        torch.testing.assert_close(llm.logits(ids), plain.logits(ids))
    assert parts(llm)[0].compiler.counters["graphs"] == graphs


@pytest.mark.usefixtures("traced")
def test_the_record_says_so() -> None:
    with closing(MinivllmEngine(compose(["runtime.device=cpu", "runtime.compile=true"]))) as engine:
        runtime = engine.liveness()["runtime"]
        assert (runtime["compiled"], runtime["compiled_graphs"], runtime["cpu_kernels"]) == (
            8,
            2,
            "off",
        )
        assert engine.info.compile_s is not None and engine.info.compile_s > 0
        left_out = (
            "does without cpu_kernels and fused_kernels and native_layers and trim_last_layer"
        )
        assert any(left_out in one for one in engine.info.warnings)
        assert not engine.engine.loaded.model.trims


@pytest.mark.parametrize(
    ("knob", "words"),
    [
        ("runtime.cpu_kernels=on", "cannot look into the kernels of runtime.cpu_kernels=on"),
        (
            "runtime.fused_kernels=triton",
            "cannot look into the kernels of runtime.fused_kernels=triton",
        ),
        ("runtime.determinism=batch", "may differ between one token and several"),
    ],
)
def test_what_it_does_not_go_with(knob: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        compose(["runtime.compile=true", knob])


@pytest.mark.parametrize("stage", ["trace", "compile"])
def test_what_cannot_be_compiled_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(
        self: Compiler, graph: torch.fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    def run(part: Any, x: Any, *others: Any) -> Any:
        torch._dynamo.graph_break()
        return x

    if stage == "compile":
        monkeypatch.setattr(Compiler, "__call__", fail)
    else:
        monkeypatch.setattr(compile, "_run", run)
    make_checkpoint(tmp_path)
    with pytest.raises(BadInput, match=r"runtime\.compile=true: .*or runtime\.compile=false"):
        load(tmp_path, "runtime.compile=true")


@pytest.mark.real  # the C++ compiler
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.usefixtures("inductor")
def test_tokens_are_those_of_plain_steps() -> None:
    knobs = ["runtime.cpu_kernels=off"]
    plain, whole = (
        LLM("tiny", quant="fp32", device="cpu", overrides=[*knobs, *more])
        for more in ([], ["runtime.compile=true"])
    )
    assert tokens(whole) == tokens(plain)
    for ids in PROMPTS:
        torch.testing.assert_close(whole.logits(ids), plain.logits(ids), atol=1e-4, rtol=1e-4)
    assert parts(whole)[0].compiler.counters["graphs"] == 2


@pytest.mark.usefixtures("traced")
def test_ranks_compile_their_parts_and_sum_outside_of_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "LENGTHS", (8, 1))
    make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1)
    knobs = ["model=hf", f"model.path={tmp_path / 'model'}", "quant=fp32", "attention=sdpa"]
    knobs += ["runtime.device=cpu", "runtime.threads=1", "cache.num_blocks=16"]
    knobs += ["model.max_model_len=64", "parallel.tensor=2", "runtime.compile=true"]

    def part(rank: int) -> torch.Tensor:
        store = FileStore(str(tmp_path / "store"), 2)
        engine, _ = build_part(compose(knobs), lambda device: GroupRanks(store, rank, 2, 2, device))
        model = engine.loaded.model
        (layer,) = (one for one in model.modules() if isinstance(one, CompiledPart))
        opaque = [one.inner for one in layer.modules() if isinstance(one, OpaqueLinear)]
        assert sum(isinstance(one, SummedOverRanks) for one in opaque) == 2
        return sequence_logits(engine, PROMPTS[3])

    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(part, range(2))
    alone = load(tmp_path / "model").logits(PROMPTS[3])
    torch.testing.assert_close(first, alone, atol=1e-5, rtol=0)
