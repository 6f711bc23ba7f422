"""task=kernels: outputs are checked, times add up, and record, table and plot say so; tiny
shapes."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.microbench import attention, linear, mixture, sampling, small, suite
from minivllm.bench.microbench.case import Case, Setting, Side
from minivllm.bench.microbench.timing import check, measure, median
from minivllm.config.compose import compose
from minivllm.engine import sampler
from minivllm.engine.executor import sampler_ops
from minivllm.errors import BadInput
from minivllm.kernels.cpu import library
from minivllm.models.config import ModelConfig
from minivllm.report.studies.standalone import kernels as report
from minivllm.tasks.kernels import run
from tests.reference import FAMILIES, SMALL

Cli = Callable[..., Any]
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
DENSE = ModelConfig.from_dict(
    SMALL | FAMILIES["qwen3"] | {"architectures": ["Qwen3ForCausalLM"]} | SHAPES
)
SPARSE = ModelConfig.from_dict(
    SMALL
    | FAMILIES["qwen3_moe"]
    | {"architectures": ["Qwen3MoeForCausalLM"]}
    | SHAPES
    | {"moe_intermediate_size": 64}
)
LIMITS = Roofline(bandwidth_bytes_per_s=1e9, matrix_flops_per_s=1e10, matrix_dtype="bfloat16")
BY_DTYPE = {"bfloat16": LIMITS, "int8": LIMITS}


def setting(triton: bool, model: ModelConfig = DENSE, **changes: Any) -> Setting:
    knobs = {
        "cache_bytes": 4096,
        "rows": (1, 3),
        "contexts": (40,),
        "drafts": 2,
        "formats": ("bf16", "int8", "int4", "nf4", "w8a8", "w4a8"),
    }
    return Setting(model, DEVICE if triton else CPU, triton, **(knobs | changes))


@pytest.fixture
def compiled() -> None:
    try:
        library.load()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"the C++ kernels cannot be had here: {str(error).splitlines()[0]}")


def checked(where: Setting, part: Any) -> dict[str, float]:
    """The largest difference of each kernel, all within its tolerance."""
    found: dict[str, float] = {}
    for case in part.cases(where):
        assert case.bytes > 0 and case.copies >= 1
        difference = check(case)
        if difference is not None:
            assert difference <= case.tolerance, f"{case.kernel} {case.part} {case.rows}"
            found[case.kernel] = max(difference, found.get(case.kernel, 0.0))
    return found


@pytest.mark.parametrize("part", [linear, attention, small, sampling])
def test_each_cpu_kernel_gives_what_the_reference_gives(part: Any, compiled: None) -> None:
    found = checked(setting(False), part)
    assert found or (part is linear and not library.load().has_linear)


@pytest.mark.parametrize("part", [linear, attention, small, sampling])
def test_each_triton_kernel_gives_what_the_reference_gives(part: Any) -> None:
    formats = ("int8", "int4", "nf4", "w8a8", "w4a8")
    where = setting(True, rows=(2,), cache_bytes=16, formats=formats)
    expected = {
        linear: {f"linear {form}" for form in formats},
        attention: {"attention decode", "attention verify", "attention prefill"},
        small: {"sum + RMSNorm", "norm + rotary", "norm + rotary + write", "SwiGLU"},
        sampling: {"sampling greedy", "sampling top_k 20 top_p 0.9", "sampling from all"},
    }
    assert set(checked(where, part)) == expected[part]


@pytest.mark.parametrize("triton", [True, False])
def test_the_sampler_is_timed_with_the_kernels_that_an_engine_gives_it(
    triton: bool, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def choose(logits: Any, sampled: Any, ops: Any) -> Any:
        given.append(ops)
        return sampler.choose(logits, sampled, ops)

    monkeypatch.setattr(sampling, "choose", choose)
    next(sampling.cases(setting(triton))).ours.call(0)
    assert given == [sampler_ops(None if triton else library.load(), triton)]


@pytest.mark.parametrize("triton", [True, False])
def test_a_mixture_counts_the_experts_that_it_reads(triton: bool, compiled: None) -> None:
    # In bfloat16 a CPU's own layer is no plain one, so there the grouped products are those of
    # another test.
    where = setting(triton, SPARSE)
    one, three = mixture.cases(where)
    expert = 3 * 64 * 64 * 2
    assert one.bytes == pytest.approx(2 * expert + 2 * 2 * 64)
    assert 2 * expert < three.bytes <= 6 * expert + 2 * 6 * 64
    assert (check(one) or 0) <= one.tolerance and (check(three) or 0) <= three.tolerance


def test_a_dense_model_has_no_mixture() -> None:
    assert list(mixture.cases(setting(False))) == []


def test_what_has_to_be_moved_and_computed(compiled: None) -> None:
    where = setting(False, formats=("bf16",))
    head = [case for case in linear.cases(where) if case.part.startswith("lm_head")]
    assert [case.operations for case in head] == [2 * rows * 128 * 64 for rows in (1, 3)]
    assert [case.bytes for case in head] == [2 * (128 * 64 + rows * (128 + 64)) for rows in (1, 3)]
    decode, _, verify, _, prefill = attention.cases(where)
    token = 2 * 1 * 32 * 2  # key and value, one head of 32, two bytes
    assert decode.bytes == 40 * token + 2 * 2 * 32 * 2 + token
    assert decode.operations == 4 * 2 * 32 * 40
    assert verify.bytes == 40 * token + 3 * (2 * 2 * 32 * 2 + token)
    assert verify.operations == 4 * 2 * 32 * (38 + 39 + 40)
    without = [case.kernel for case in attention.cases(setting(False, rows=(1,), drafts=0))]
    assert without == ["attention decode", "attention prefill"]
    assert prefill.operations == 4 * 2 * 32 * 40 * 41 / 2


def test_inputs_go_round_until_they_have_left_the_cache(compiled: None) -> None:
    where = setting(False, formats=("bf16",), cache_bytes=1 << 16)
    for case in (*linear.cases(where), *small.cases(where)):
        assert where.is_from_memory(case) and case.copies > 1
    seen = []
    case = Case(
        "k", "p", 1, Side("a", lambda i: seen.append(i) or torch.ones(1)), None, 1.0, 0.0, 3
    )  # type: ignore[func-returns-value]
    measure(case, LIMITS, 2, 1e-5, lambda: None)
    assert seen == list(range(len(seen)))  # each call is another copy


def test_a_wrong_output_is_told(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Case(
        "k",
        "p",
        1,
        Side("a", lambda i: torch.ones(4)),
        Side("b", lambda i: torch.ones(4)),
        8.0,
        2.0,
        1,
    )
    bad = Case(
        "k", "p", 2, Side("a", lambda i: torch.full((4,), torch.nan)), good.theirs, 8.0, 2.0, 1
    )
    rows = [
        {"part_of": "x", **measure(case, LIMITS, 6, 1e-5, lambda: None), "from_memory": False}
        for case in (good, bad)
    ]
    assert [row["ok"] for row in rows] == [True, False]
    record = {"rows": json.loads(json.dumps(rows).replace("Infinity", "null"))}
    assert report.cells(record["rows"][1])[-1] == "WRONG"
    assert "1 of them WRONG: k, p, 2 rows" in report.findings(record)[0]
    many = report.findings({"rows": [record["rows"][1]] * 6})[0]
    assert many.endswith("6 of them WRONG: " + "k, p, 2 rows; " * 5 + "and 1 more.")
    alone = {"rows": [{**record["rows"][0], "reference": None}]}
    assert report.findings(alone)[0] == "No output was compared with a reference's."
    stopped, late = report.findings({**record, "interrupted": True, "others_percent": 93.4})[-2:]
    assert stopped == "Interrupted after 2 cases: others were not measured"
    assert late.startswith(
        "Other processes used 93 % of a core meanwhile: times may be worse for it"
    )
    assert report.findings({**record, "others_percent": 5.0}) == report.findings(record)


def test_the_floor_is_the_longer_of_the_two(compiled: None) -> None:
    def row(moved: float, operations: float) -> dict[str, Any]:
        case = Case("k", "p", 1, Side("a", lambda i: torch.ones(1)), None, moved, operations, 1)
        return measure(case, LIMITS, 1, 1e-5, lambda: None)

    memory, matrix = row(1e6, 1e3), row(1e3, 1e9)
    assert memory["floor_s"] == 1e-3 and memory["bound"] == "memory"
    assert matrix["floor_s"] == 0.1 and matrix["bound"] == "matrix"
    assert memory["of_floor"] == pytest.approx(1e-3 / memory["seconds"]["median"])


class OutOfResources(Exception):
    """Triton's is no RuntimeError."""


@pytest.mark.parametrize(
    "kind", [RuntimeError, BadInput, OutOfResources]
)  # no memory, no bitsandbytes, no registers
def test_a_case_that_fails_is_a_row_and_the_others_go_on(
    kind: type[Exception], compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Setting) -> Any:
        raise kind("CUDA out of memory")
        yield

    monkeypatch.setattr(linear, "cases", failing)
    where = setting(False, rows=(1,), contexts=(16,))
    rows = list(suite.rows(where, BY_DTYPE, 1, 1e-5, lambda: None))
    assert rows[0] == {
        "part_of": "products",
        "kernel": "products",
        "ok": False,
        "error": "CUDA out of memory",
    }
    assert {row["part_of"] for row in rows[1:]} == {"attention", "small steps", "sampling"}
    text = report.markdown(
        {"rows": rows, "limits": {"cache_bytes": 1}, "provenance": {}, "config": {}}
    )
    assert "products failed: CUDA out of memory" in text


def test_a_case_that_runs_out_of_memory_takes_no_other_along(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases(_: Setting) -> Iterator[Case]:
        def full(_: int) -> torch.Tensor:
            raise RuntimeError("CUDA out of memory")

        for rows in (1, 2, 3):
            yield Case(
                "k",
                "p",
                rows,
                Side("a", full if rows == 2 else lambda i: torch.ones(1)),
                None,
                1e6,
                1e3,
                1,
            )

    monkeypatch.setattr(suite, "PARTS", {"products": SimpleNamespace(cases=cases)})
    rows = list(
        suite.rows(setting(False, rows=(1,), contexts=(16,)), BY_DTYPE, 1, 1e-5, lambda: None)
    )
    assert [row.get("rows") for row in rows] == [1, None, 3]
    assert rows[1]["kernel"] == "k (p, 2 rows)" and rows[1]["error"] == "CUDA out of memory"


@pytest.mark.parametrize(
    ("n", "low", "high"),
    [(1, None, None), (5, None, None), (6, 0, 5), (9, 1, 7), (15, 3, 11), (20, 5, 14)],
)
def test_the_interval_of_a_median(n: int, low: int | None, high: int | None) -> None:
    """Ranks as in Conover's table; the smallest coverage of at least 95 %."""
    found = median([float(i) for i in reversed(range(n))])
    assert (found["median"], found["low"], found["high"], found["n"]) == ((n - 1) / 2, low, high, n)
    if low is not None:
        outside = sum(math.comb(n, i) for i in range(low + 1)) / 2**n
        assert outside <= 0.025 < outside + math.comb(n, low + 1) / 2**n


def test_record_table_and_plot(cli: Cli, compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minivllm.bench.hardware.limits.probe", lambda device, dtype: (LIMITS, ["a note"])
    )
    monkeypatch.setattr("minivllm.bench.hardware.limits.last_level_cache", lambda: 1 << 18)
    knobs = [
        "task.rows=[1,2]",
        "task.contexts=[32]",
        "task.formats=[bf16,int8]",
        "task.sample_ms=0.1",
    ]
    shapes = [f"++model.architecture.{name}={value}" for name, value in SHAPES.items()]
    done = cli("preset=kernels", "task.repeats=6", "runtime.device=cpu", "name=k", *knobs, *shapes)
    assert done.code == 0, done.err + done.out
    record = json.loads(Path("runs/k/kernels.json").read_text())
    assert record["status"] == "ok" and record["kind"] == "kernels"
    assert record["provenance"]["code_hash"] and record["limits"]["bandwidth_bytes_per_s"] == 1e9
    kernels = {row["kernel"] for row in record["rows"]}
    assert {
        "linear bf16",
        "linear int8",
        "attention decode",
        "RMSNorm",
        "SwiGLU",
        "sampling greedy",
    } <= kernels
    row = record["rows"][0]
    assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
    folder = Path("reports/k")
    with (folder / "kernels.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(record["rows"])
    assert float(written[0]["seconds.median"]) == row["seconds"]["median"]
    assert (folder / "kernels.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "kernels.md").read_text()
    assert "all of them equal or close" in text and "note: a note" in text
    assert text == report.markdown(record)  # from the record alone
    assert "linear bf16" in done.out and "record: runs/k/kernels.json" in done.out


def test_whoever_interrupts_it_has_what_was_measured(
    compiled: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rows(*_: Any) -> Iterator[dict[str, Any]]:
        for kernel in ("linear bf16", "linear bf16", "linear int8"):
            yield {"part_of": "products", "kernel": kernel, "part": "q", "ok": True}
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minivllm.bench.hardware.limits.probe", lambda device, dtype: (LIMITS, []))
    monkeypatch.setattr(suite, "rows", rows)
    with pytest.raises(KeyboardInterrupt):
        run(compose(["preset=kernels", "runtime.device=cpu", "name=k"]))
    record = json.loads(Path("runs/k/kernels.json").read_text())
    assert record["status"] == "error" and [r["kernel"][7:] for r in record["rows"]] == [
        "bf16",
        "bf16",
        "int8",
    ]
    assert record["interrupted"] and record["others_percent"] >= 0
    told = capsys.readouterr()
    assert told.out == (
        "1 case done, the last: linear bf16 q\n3 cases done, the last: linear int8 q\n"
    )
    assert told.err.startswith(
        "record so far: runs/k/kernels.json; task=report 'runs=[k]' makes its table"
    )


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written to"):
        report.write({}, tmp_path / "file" / "k")


def test_mistakes_are_told_before_anything_is_measured(cli: Cli) -> None:
    for argv, words in (
        (["task.rows=[0]"], "task.rows=[0] must be a list of whole numbers of at least 1"),
        (["task.formats=[fp3]"], "task.formats=['fp3'] must be a list"),
        (
            ["runtime.cpu_kernels=off", "runtime.device=cpu", "runtime.fused_kernels=off"],
            "nothing to measure",
        ),
    ):
        done = cli("task=kernels", *argv)
        assert done.code == 2 and words in done.err and done.err.count("\n") == 1
    assert not Path("runs").exists()


def test_the_preset_is_the_task_on_shapes_alone() -> None:
    config = compose(["preset=kernels"])
    assert config["choices"]["task"] == "kernels" and config["choices"]["model"] == "qwen3"
    assert config["model"]["weights"] == "random" and config["task"]["repeats"] >= 6
