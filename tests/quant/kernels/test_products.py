"""Triton's products with quantised weights: in the interpreter where there is no GPU, on the GPU
where there is one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minivllm import LLM, SamplingParams
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import BadInput
from minivllm.extras.scoring import sequence_logits
from minivllm.kernels import common
from minivllm.kernels.cpu import library
from minivllm.kernels.device import BuildContext
from minivllm.quant import plain
from minivllm.quant.base import Quantizer
from minivllm.quant.int4 import Int4, Int4Linear
from minivllm.quant.int8 import Int8, Int8Linear
from minivllm.quant.kernels import products
from minivllm.quant.kernels.products import StreamedLinear
from minivllm.quant.nf4 import NF4, NF4Linear, quantize, single_scales
from minivllm.quant.plain import PlainLinear
from tests.reference import make_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Streamed(Quantizer):
    """Plain layers with runtime.linear_kernel=triton."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return StreamedLinear(weight, bias)


METHODS = {
    "plain": Streamed,
    "int8": lambda dtype: Int8(dtype, kernel="triton"),
    "int4": lambda dtype: Int4(dtype, group_size=32, kernel="triton"),
    "int4, groups of 128": lambda dtype: Int4(dtype, kernel="triton"),
    "nf4": lambda dtype: NF4(dtype, kernel="triton"),
    "nf4, plain scales": lambda dtype: NF4(dtype, double_quant=False, kernel="triton"),
    "nf4, large blocks": lambda dtype: NF4(dtype, block_size=256, kernel="triton"),
}


def stored(layer: nn.Module) -> Tensor:
    """The weight [out, in] that the layer's bytes stand for, in float64."""
    if isinstance(layer, PlainLinear):
        return layer.weight.double()
    if isinstance(layer, Int8Linear):
        return layer.weight.double() * layer.scale.double()[:, None]
    if isinstance(layer, Int4Linear):
        return (
            layer.transposed(0, layer.scales_and_zeros.shape[1])[: layer.shape[1]]
            .t()[: layer.shape[0]]
            .double()
        )
    assert isinstance(layer, NF4Linear)
    state = layer.state
    scales = single_scales(layer.library.functional, state).double()
    codes = torch.cat((layer.codes >> 4, layer.codes & 15), 1).int()
    return (state.code.double()[codes].view(-1, state.blocksize) * scales[:, None]).view(
        state.shape
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_error_is_at_most_twice_that_of_the_converted_weight(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    method: Quantizer = METHODS[name](dtype)
    inputs = 512 if "large" in name else 192  # 192 is no multiple of 128, the step of most
    weight = (torch.randn(96, inputs) * 0.05).to(method.dtype).to(DEVICE)
    bias = torch.randn(96).to(method.dtype).to(DEVICE)
    layer = method.pack(weight, bias)
    exact = stored(layer)
    for rows in (1, 9, 20):
        x = torch.randn(rows, inputs).to(method.dtype).to(DEVICE)
        out = layer(x)
        assert out.dtype is method.dtype
        expected = x.double() @ exact.t() + bias.double()
        plain = torch.nn.functional.linear(x, exact.to(method.dtype), bias)
        errors = [float((y.double() - expected).norm() / expected.norm()) for y in (out, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-6, (rows, errors)


@pytest.mark.parametrize("name", ["plain", "int8", "int4", "nf4"])
@torch.inference_mode()
def test_the_kernel_runs_up_to_its_rows_and_no_further(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    for kernel in ("whole_product", "int4_product", "nf4_product"):
        monkeypatch.setattr(
            products, kernel, lambda x, *rest: ran.append(x.shape[0]) or x.new_zeros(x.shape[0], 64)
        )
    layer = METHODS[name]("bfloat16").pack(torch.randn(64, 128).bfloat16().to(DEVICE), None)
    for rows in (1, products.MOST_ROWS, products.MOST_ROWS + 1):
        assert layer(torch.randn(rows, 128).bfloat16().to(DEVICE)).shape == (rows, 64)
    assert ran == [1, products.MOST_ROWS]


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_it_is_taken_before_the_kernels_of_the_cpu(name: str) -> None:
    context = BuildContext(DEVICE, library.choose("auto", DEVICE)[0])
    method = METHODS[name]("bfloat16").within(context)
    layer = method.pack(torch.randn(64, 128).bfloat16().to(DEVICE), None)
    assert getattr(layer, "layout", layer).products is products


def test_nf4_that_the_kernel_cannot_read_goes_the_old_way() -> None:
    """Blocks that begin within a row, and levels other than those that it holds in registers."""
    layer = NF4("float32", kernel="triton").pack(torch.randn(32, 96, device=DEVICE), None)
    assert isinstance(layer, NF4Linear)
    assert layer.products is None
    method = NF4("float32", kernel="triton")
    codes, state = quantize(method.library, torch.randn(32, 128, device=DEVICE), 64, False)
    assert getattr(method.linear(codes, state, None), "products", None) is products
    state.code = state.code * 0.99
    assert getattr(method.linear(codes, state, None), "products", None) is None


@pytest.mark.parametrize(("quant", "other"), [("int8", "torch"), ("nf4", "bitsandbytes")])
def test_tokens_are_those_of_the_other_kernel(quant: str, other: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", hidden_size=64, num_hidden_layers=1)
    results = []
    for kernel in ("triton", other):
        overrides = [f"quant.kernel={kernel}", "quant.dtype=float32", "cache.num_blocks=20"]
        with LLM(str(tmp_path), device=DEVICE.type, quant=quant, overrides=overrides) as llm:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            results.append(llm.generate([[5, 6, 7], [9]], params))
    tokens = [[o.outputs[0].token_ids for o in result] for result in results]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("family", "knob"),
    [
        ("llama", "runtime.determinism=off"),
        ("llama", "runtime.determinism=batch"),
        ("qwen3_moe", "runtime.moe=loop"),
    ],
)
def test_plain_layers_take_it_too(
    family: str, knob: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "can_pack", lambda dtype: False)  # oneDNN's order is on CPUs alone
    make_checkpoint(tmp_path, family, hidden_size=64, num_hidden_layers=1)
    knobs = [
        knob,
        "model=hf",
        f"model.path={tmp_path}",
        "quant=bf16",
        "cache.num_blocks=20",
        "runtime.cpu_kernels=off",
    ]
    seen, logits = [], []
    for kernel in ("torch", "triton"):
        config = compose(
            [*knobs, f"runtime.device={DEVICE.type}", f"runtime.linear_kernel={kernel}"]
        )
        with closing(MinivllmEngine(config)) as engine:
            seen.append(engine.liveness()["quant"]["kernels"])
            logits.append(sequence_logits(engine.engine, [5, 6, 7]))
    assert [text.split(" ", 1)[1] for text in seen] == ["PlainLinear", "StreamedLinear"]
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < 0.01


def test_without_gpu_or_interpreter_it_is_refused_and_auto_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    weight = torch.randn(64, 128).bfloat16()
    with pytest.raises(BadInput, match=r"quant.kernel=triton needs a GPU.*quant.kernel=torch"):
        Int8(kernel="triton").pack(weight, None)
    layer = Int8().pack(weight, None)
    assert isinstance(layer, Int8Linear)
    assert layer.products is None
    with pytest.raises(
        BadInput, match=r"runtime.linear_kernel=triton needs a GPU.*runtime.linear_kernel=torch"
    ):
        LLM("tiny", device="cpu", overrides=["runtime.linear_kernel=triton"])
    with pytest.raises(BadInput, match="must be auto or triton or bitsandbytes"):
        NF4(kernel="fast").pack(weight, None)


def layer_and_input(rows: int, outputs: int, inputs: int, name: str) -> tuple[nn.Module, Tensor]:
    """A layer of the method with a bias, and activations."""
    torch.manual_seed(0)
    method: Quantizer = METHODS[name]("bfloat16")
    weight = (torch.randn(outputs, inputs) * 0.05).to(method.dtype).to(DEVICE)
    layer = method.pack(weight, torch.randn(outputs).to(method.dtype).to(DEVICE))
    return layer, torch.randn(rows, inputs).to(method.dtype).to(DEVICE)


class Ends:
    """How products end from now on: `later` is that of their cuts, if not None. Their memory is NaN
    first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.later: bool | None = None
        self.cuts: list[products._Cut] = []
        self.counters = torch.zeros(products._TILES, dtype=torch.int32, device=DEVICE)
        ends, make = self, products._Cut.__init__

        def cut(cut: products._Cut, *args: Any, **kwargs: Any) -> None:
            make(cut, *args, **kwargs)
            if ends.later is not None and cut.grid[1] > 1:
                cut.later = ends.later
            for tensor in (cut.out, cut.partial):
                tensor.fill_(torch.nan)
            ends.cuts.append(cut)

        monkeypatch.setattr(products._Cut, "__init__", cut)
        monkeypatch.setattr(products, "_counters", lambda device: ends.counters)


class Parted:
    """A kernel that is told that there are several parts."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return lambda *args, **kwargs: self.kernel[grid](*args, **{**kwargs, "PARTED": True})


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    return Ends(monkeypatch)


@pytest.mark.parametrize("name", ["plain", "int8", "int4", "nf4"])
@torch.inference_mode()
def test_the_last_program_adds_what_a_kernel_of_its_own_adds(name: str, ends: Ends) -> None:
    """To the bit, with rows and outputs that fill no tile; and it leaves the counters as it found
    them."""
    for rows in (1, 3, 8):
        layer, x = layer_and_input(rows, 96, 448, name)
        outs = []
        for ends.later in (False, True):
            outs.append(layer(x))
            assert not ends.counters.any()
        assert not outs[0].isnan().any()
        assert torch.equal(*outs)
    assert all(cut.grid[1] > 1 for cut in ends.cuts)


@pytest.mark.parametrize("name", ["plain", "int8", "int4", "nf4"])
@torch.inference_mode()
def test_one_part_is_the_sum_of_its_parts(
    name: str, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of one part rounds as the sum of one part would: the program's end is the same."""
    layer, x = layer_and_input(5, 96, {"int4": 32, "nf4": 64}.get(name, 128), name)
    whole = layer(x)
    assert ends.cuts[-1].grid[1] == 1 and not ends.cuts[-1].later
    run = products._Cut.run

    def parted(cut: products._Cut, *args: Any, **kwargs: Any) -> Tensor:
        """All the same, but with a sum of one part."""
        launch = Parted(args[0])
        cut.partial = torch.full((1, cut.rows, cut.outputs), torch.nan, device=DEVICE)
        cut.later = True
        return run(cut, launch, *args[1:], **kwargs)

    monkeypatch.setattr(products._Cut, "run", parted)
    assert torch.equal(layer(x), whole)
    assert not whole.isnan().any()


@torch.inference_mode()
def test_parts_beyond_those_fetched_at_once_are_added(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "INTERPRETED", False)  # which cuts into few
    layer, x = layer_and_input(2, 64, 64 * 19, "nf4")
    for ends.later in (False, True):
        out = layer(x)
        assert ends.cuts[-1].grid == (1, 19)
        assert not ends.counters.any()
        assert layer.bias is not None
        expected = x.double() @ stored(layer).t() + layer.bias.double()
        assert float((out.double() - expected).norm() / expected.norm()) < 0.005


@torch.inference_mode()
def test_many_rows_are_added_later_and_the_cut_is_that_of_few(ends: Ends) -> None:
    layer, x = layer_and_input(20, 96, 448, "nf4")
    outs = [layer(x[:rows]) for rows in (1, 8, 9, 20)]
    assert [cut.later for cut in ends.cuts] == [False, False, True, True]
    assert len({cut.grid for cut in ends.cuts}) == 1
    assert torch.equal(outs[0], outs[1][:1])  # their tiles are of one width
    for out in outs:
        torch.testing.assert_close(out, outs[-1][: out.shape[0]])
