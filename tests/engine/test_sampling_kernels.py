"""The sampler's kernels: Triton's in the interpreter where there is no GPU, on the GPU where there
is one; those for CPUs where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minivllm import SamplingParams
from minivllm.config.compose import compose
from minivllm.engine import sampler, sampling_kernels
from minivllm.engine.batch_inputs import SamplingColumns, pack_columns
from minivllm.engine.executor import sampler_ops
from minivllm.engine.request import Request
from minivllm.engine.sampler import SamplerCounters, exponential_noise
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.kernels.cpu import library
from tests.engine.sampling import sample
from tests.reference import make_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def some_columns(temperatures: Tensor) -> SamplingColumns:
    """Of as many rows, with seeds of all sizes."""
    count = len(temperatures)
    columns = SamplingColumns(
        seeds=torch.randint(-(2**63), 2**63 - 1, (count,)) >> torch.randint(64, (count,)),
        rows=torch.arange(count, dtype=torch.int32),
        positions=torch.randint(2**31 - 1, (count,), dtype=torch.int32),
        top_k=torch.zeros(count, dtype=torch.int32),
        temperatures=temperatures,
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
    )
    return SamplingColumns(*(column.to(DEVICE) for column in columns))


def race(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """What the largest of is drawn, in float64 [R, vocab]."""
    tokens = torch.arange(logits.shape[1], device=DEVICE)[None]
    noise = exponential_noise(columns.seeds, columns.positions.long(), tokens)
    return logits.double() / columns.temperatures.double()[:, None] - noise.double().log()


Draw = Callable[[Tensor, SamplingColumns], Tensor]


@pytest.fixture(params=["triton", "c++"])
def draw(request: pytest.FixtureRequest) -> Draw:
    if request.param == "triton":
        return sampling_kernels.draw
    if DEVICE.type != "cpu":
        pytest.skip("tensors are on the GPU")
    return sampler_ops(library.load(), triton=False).draw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 2047, 2048, 2049, 6500])
def test_the_likeliest_is_the_first_of_the_largest(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(7, size)
    logits[:3] = logits[:3].round()  # several are the largest
    logits[3] = logits[3].round().clamp(max=-1.0)  # what lies beyond the last token is not 0
    logits[4, torch.rand(size) < 0.3], logits[5] = torch.inf, -torch.inf
    logits = logits.to(dtype).to(DEVICE)
    assert torch.equal(sampling_kernels.argmax(logits)[:6], logits[:6].max(dim=-1).indices)
    wide = torch.cat((logits, logits.new_full((7, 5), 1e3)), dim=1)[:, :size]
    assert torch.equal(sampling_kernels.argmax(wide), sampling_kernels.argmax(logits))


def test_draws_are_those_of_torch(draw: Draw) -> None:
    torch.manual_seed(1)
    # the interpreter takes some milliseconds a row
    rows, vocab = 250 if draw is sampling_kernels.draw and DEVICE.type == "cpu" else 1000, 2500
    logits = (torch.randn(rows, vocab) * torch.rand(rows, 1) * 8).to(DEVICE)
    logits[::4] = 0.0  # the noise decides alone
    columns = some_columns(10 ** (torch.rand(rows) * 3 - 2))
    drawn, scores = draw(logits, columns), race(logits, columns)
    missing = scores.max(dim=-1).values - scores.gather(1, drawn[:, None])[:, 0]
    assert missing.max() < 1e-5
    assert (drawn == sampler.draw(logits, columns)).float().mean() >= 0.999
    assert len(drawn.unique()) > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_s_draw_does_not_depend_on_the_others(draw: Draw, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    logits = (torch.randn(6, 4100) * 2).to(dtype).to(DEVICE)
    columns = some_columns(torch.tensor([0.7, 1.0, 2.0, 0.05, 1.3, 0.9]))
    together = draw(logits, columns)
    assert torch.equal(together, sampler.draw(logits, columns))
    for row in range(6):
        alone = SamplingColumns(*(column[row : row + 1] for column in columns))
        assert torch.equal(draw(logits[row : row + 1], alone), together[row : row + 1])


def test_a_low_temperature_takes_no_digits_from_the_noise(draw: Draw) -> None:
    """Among tokens that are equally likely it decides, however large logit / temperature is."""
    torch.manual_seed(3)
    logits = torch.full((40, 4100), 19.0)
    logits[:, ::5] = 20.0
    columns = some_columns(torch.full((40,), 1e-6))
    drawn = draw(logits.to(DEVICE), columns)
    assert torch.equal(drawn, sampler.draw(logits.to(DEVICE), columns))
    assert (drawn % 5 == 0).all() and len(drawn.unique()) > 30


def test_tokens_without_probability_are_never_drawn_and_none_beyond_the_vocabulary(
    draw: Draw,
) -> None:
    logits = torch.full((6, 4100), -torch.inf)
    logits[0, 4000], logits[1, [7, 2060]] = -3.0, torch.tensor([-900.0, -900.0])
    logits[2], logits[3, 5], logits[4] = torch.nan, torch.nan, 1.0
    columns = some_columns(torch.tensor([1.0, 0.01, 1.0, 1.0, 0.0, 1.0]))  # 0: padding of a graph
    drawn = draw(logits.to(DEVICE), columns).tolist()
    assert drawn[0] == 4000 and drawn[1] in (7, 2060)
    most_likely = sampling_kernels.argmax(logits.to(DEVICE)).tolist()
    assert all(0 <= token < 4100 for token in [*drawn, *most_likely])


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_step_is_sampled_as_by_torch_and_draws_are_counted(one_by_one: bool) -> None:
    torch.manual_seed(4)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, logit_bias={3: 2.0}, allowed_token_ids=range(60)),
        SamplingParams(temperature=1.0, min_tokens=5),
    ]
    filtered = SamplingParams(temperature=1.0, top_k=5)
    logits = torch.randn(5, 100).bfloat16().to(DEVICE)
    kernels = sampler_ops(None, triton=True)
    for params in (kinds, [*kinds, filtered]):
        requests = [
            Request(str(i), [1, 2], one, max_num_tokens=50, seed=i, eos_token_ids=(5,))
            for i, one in enumerate(params)
        ]
        results, counters = [], [SamplerCounters(), SamplerCounters()]
        for with_kernels, count in zip((sampler.TORCH, kernels), counters, strict=True):
            some = logits[: len(requests)]
            results.append(sample(some, requests, count, one_by_one, with_kernels))
        assert results[0] == results[1]
        assert counters[0].drawn_fused == 0 and counters[1].drawn_fused == 3
        assert counters[1].tokens_drawn == counters[0].tokens_drawn == len(requests) - 1


def test_columns_of_any_number_of_requests() -> None:
    """They are views of one tensor, which begin anywhere."""
    for count in (1, 2, 3, 5):
        params = SamplingParams(temperature=0.9)
        requests = [
            Request(str(i), [3] * (i + 1), params, max_num_tokens=9, seed=-i) for i in range(count)
        ]
        columns = SamplingColumns.upload(
            pack_columns(requests, range(count), [r.num_tokens for r in requests]), DEVICE
        )
        logits = torch.randn(count, 50).to(DEVICE)
        assert torch.equal(sampling_kernels.draw(logits, columns), sampler.draw(logits, columns))


def test_the_record_counts_what_the_kernel_drew(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    tokens = []
    for knob in ("'off'", "triton"):
        runtime = {"device": DEVICE.type, "fused_kernels": knob, "cuda_graphs": "auto"}
        knobs = (f"runtime.{name}={value}" for name, value in runtime.items())
        engine = MinivllmEngine(
            compose(["model=hf", f"model.path={tmp_path}", "quant=fp32", *knobs])
        )
        for i, top_k in enumerate((0, 0, 9)):
            params = SamplingParams(
                max_tokens=3, temperature=0.8, top_k=top_k, seed=i, ignore_eos=True
            )
            engine.submit(str(i), [5 + i, 6], params)
            while engine.engine.has_unfinished:
                tokens.extend(output.token_ids for output in engine.poll())
        live = engine.liveness()["decoding"]
        assert live["tokens_drawn"] == 9 and live["drawn_fused"] == (6 if knob == "triton" else 0)
        engine.close()
    assert tokens[: len(tokens) // 2] == tokens[len(tokens) // 2 :]
