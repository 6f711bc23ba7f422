"""The C++ kernels against plain operations: their error, their bits in any batch, and life without
them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import cpp_extension

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from minivllm.kernels.cpu import library
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import Format, PanelLinear
from minivllm.kernels.device import BuildContext
from minivllm.models.cpu_layers import use_kernels
from minivllm.models.layers import RMSNorm
from minivllm.models.rope import rotate
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8, Int8GroupLinear, int8_group_linear, int8_linear
from minivllm.quant.nf4 import NF4
from minivllm.quant.plain import Plain
from tests.reference import make_checkpoint

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on(kernels: Kernels, method: Any) -> Any:
    """A method that packs for the kernels."""
    return method.within(BuildContext(torch.device("cpu"), kernels))


def largest_error(out: Tensor, exact: Tensor) -> float:
    assert out.isfinite().all()
    return float((out.double() - exact).abs().max())


METHODS = {
    "bf16": Plain(),
    "int8": Int8(),
    "int4": Int4(),
    "int4-32": Int4(group_size=32),
    "nf4": NF4(),
    "nf4-1024": NF4(block_size=1024),
}


def dense(layer: nn.Module, inputs: int) -> Tensor:
    """The weight that a layer multiplies with: [in, out] in float64."""
    eye = torch.eye(inputs, dtype=torch.bfloat16)
    none = torch.zeros(1, inputs, dtype=torch.bfloat16)
    return layer(eye).double() - layer(none).double()


# The matrix unit, where there is one, takes a multiple of 32 inputs.
@pytest.mark.parametrize(
    ("name", "outputs", "inputs"),
    [
        *itertools.product(METHODS, [128, 200], [1024]),
        *itertools.product(METHODS, [17], [3072]),
        *itertools.product(["bf16", "int8"], [200], [1008]),
    ],
)
def test_products_err_no_more_than_plain_ones(
    panels: Kernels, name: str, outputs: int, inputs: int
) -> None:
    method = on(panels, METHODS[name])
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).bfloat16()
    ours = method.pack(weight.clone(), None)
    assert isinstance(ours, PanelLinear)
    with torch.inference_mode():
        # The weight as it is stored, from products with unit vectors, which are rounded once, to
        # bfloat16.
        stored = dense(ours, inputs)
        step = {"bf16": 0.0, "int8": 0.05}.get(name, 0.6)
        assert float((stored.t() - weight.double()).abs().max()) <= step
        for rows in (1, 2, 6, 7, 20, 200):
            x = torch.randn(rows, inputs).bfloat16()
            exact = x.double() @ stored
            plain = largest_error(F.linear(x, stored.t().bfloat16()), exact)
            # Scales are kept apart, so the stored weight is finer than the bfloat16 that `dense`
            # sees.
            slack = 0.0 if name == "bf16" else 2.0**-9 * float(exact.abs().max())
            assert largest_error(ours(x), exact) <= 2 * plain + slack


def test_every_int8_is_itself(panels: Kernels) -> None:
    outputs, inputs = 70, 256
    weight = ((torch.arange(outputs * inputs) % 255) - 127).reshape(outputs, inputs).to(torch.int8)
    one, unit = torch.ones(1, outputs), torch.eye(inputs, dtype=torch.bfloat16)
    packed = panels.pack(weight.clone(), Format.INT8)
    ours = PanelLinear(panels, Format.INT8, [packed], (outputs, inputs), None, one)
    with torch.inference_mode():
        assert torch.equal(ours(unit), weight.t().bfloat16())
        for k in (0, 1, 100, 255):
            assert torch.equal(ours(unit[k : k + 1])[0], weight[:, k].bfloat16())


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 96), (128, 1024)])
def test_int8_in_groups_has_a_scale_for_each(panels: Kernels, outputs: int, inputs: int) -> None:
    torch.manual_seed(2)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scale = torch.rand(outputs, inputs // 32).add(0.5).bfloat16()
    ours = int8_group_linear(weight, scale, torch.randn(outputs).bfloat16(), on(panels, Int8()))
    plain = Int8GroupLinear(weight, scale.float(), ours.bias.float())
    assert isinstance(ours, PanelLinear)
    with torch.inference_mode():
        for rows in (1, 2, 6, 7, 20, 40, 300):
            x = torch.randn(rows, inputs).bfloat16()
            torch.testing.assert_close(ours(x).float(), plain(x.float()), rtol=2**-7, atol=0.05)
            assert torch.equal(ours(x)[-1:], ours(x[-1:]))


def test_int8_in_groups_that_the_kernels_do_not_have(panels: Kernels) -> None:
    least = torch.full((64, 64), -128, dtype=torch.int8)
    scale = torch.ones(64, 2, dtype=torch.bfloat16)
    for weight, dtype in ((least, torch.bfloat16), (least // 2, torch.float16)):
        method = on(panels, Int8(str(dtype).removeprefix("torch.")))
        layer = int8_group_linear(weight, scale.to(dtype), None, method)
        assert isinstance(layer, Int8GroupLinear)
        assert torch.equal(layer(torch.eye(64, dtype=dtype)), weight.t().to(dtype))
    with pytest.raises(BadInput, match="Triton's kernel has no int8 in groups"):
        int8_group_linear(least, scale, None, on(panels, Int8(kernel="triton")))


def test_a_weight_of_minus_128_is_itself(panels: Kernels) -> None:
    """A checkpoint may have it; the kernels store magnitudes of seven bits."""
    weight = torch.arange(-128, 128).repeat(64, 1).to(torch.int8)
    layer = int8_linear(weight, torch.ones(64).bfloat16(), None, on(panels, Int8()))
    assert torch.equal(layer(torch.eye(256).bfloat16()), weight.t().bfloat16())


@pytest.mark.parametrize(
    ("name", "inputs"), [*((name, 1024) for name in METHODS), ("bf16", 1008), ("int8", 1008)]
)
def test_a_row_has_the_same_bits_in_any_batch(panels: Kernels, name: str, inputs: int) -> None:
    torch.manual_seed(1)
    ours = on(panels, METHODS[name]).pack(
        torch.randn(96, inputs).bfloat16(), torch.randn(96).bfloat16()
    )
    x = torch.randn(300, inputs).bfloat16()
    with torch.inference_mode():
        whole = ours(x)
        few = (
            (10 * rows, 11 * rows) for rows in range(2, 7)
        )  # as many as are multiplied while a weight is converted
        for begin, end in ((0, 1), (299, 300), (5, 12), (190, 240), *few):
            assert torch.equal(ours(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize(
    "method",
    [Int8(kernel="torch"), Int4(kernel="torch"), NF4(kernel="bitsandbytes")],
    ids=lambda m: m.name,
)
def test_a_library_named_by_quant_kernel_multiplies_instead(panels: Kernels, method: Any) -> None:
    assert not isinstance(
        on(panels, method).pack(torch.randn(64, 128).bfloat16(), None), PanelLinear
    )


def test_strided_rows_and_bias(panels: Kernels) -> None:
    torch.manual_seed(2)
    weight, bias = torch.randn(70, 64).bfloat16(), torch.randn(70).bfloat16()
    ours = on(panels, Plain()).pack(weight.clone(), bias)
    x = torch.randn(9, 200).bfloat16()[:, 10:74]
    torch.testing.assert_close(ours(x), F.linear(x, weight, bias), atol=0.1, rtol=0.02)


def test_rows_are_looked_up_in_panels(panels: Kernels) -> None:
    weight = torch.randn(130, 32).bfloat16()
    ids = torch.tensor([0, 63, 64, 129, 5])
    packed = panels.pack(weight.clone(), 0)
    assert torch.equal(panels.embed(packed, ids), weight[ids])


def test_attention_refuses_tensors_that_do_not_fit(kernels: Kernels) -> None:
    """They would be read beyond their ends."""
    q, (k, v) = torch.randn(3, 4, 32), torch.randn(2, 3, 2, 32)
    caches = torch.randn(2, 5, 8, 2, 32)
    right: dict[str, Tensor] = {
        **{"q": q, "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1]},
        **{"slots": torch.tensor([8, 9, 16]), "starts": torch.tensor([0, 2, 3], dtype=torch.int32)},
        **{
            "lengths": torch.tensor([2, 1], dtype=torch.int32),
            "table": torch.tensor([[1], [2]], dtype=torch.int32),
        },
    }
    wrong: dict[str, list[Tensor]] = {
        "q": [q[:2], q[:, :3], q.bfloat16()],
        "k": [k[:2], k[:, :1], k[..., :16].contiguous()],
        "v": [v[:, :1].contiguous(), v.half()],
        "k_cache": [
            caches[0].flatten(1, 2),
            caches[0, :, :, :1].contiguous(),
            caches[0, ..., :16].contiguous(),
        ],
        "v_cache": [caches[1, :4], caches[1].transpose(1, 2), caches[1].bfloat16()],
        "slots": [right["slots"].int(), right["slots"][:2]],
        "starts": [right["starts"].long(), right["starts"][:2]],
        "lengths": [right["lengths"].long(), right["lengths"][:1]],
        "table": [right["table"].long(), right["table"][:1], right["table"][0]],
    }
    assert kernels.paged_attention(*right.values(), 1.0, 0, 0.0).shape == q.shape
    for name, tensors in wrong.items():
        for tensor in tensors:
            with pytest.raises(RuntimeError, match="paged_attention:"):
                kernels.paged_attention(*{**right, name: tensor}.values(), 1.0, 0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [1, 40])
def test_where_keys_lie_changes_no_bit(kernels: Kernels, dtype: torch.dtype, new: int) -> None:
    """Blocks of 4 whose first and last of four are as far apart as if all lay side by side, beside
    one block of 64."""
    torch.manual_seed(4)
    q = torch.randn(new, 4, 64, dtype=dtype)
    k, v = torch.randn(2, new, 2, 64, dtype=dtype)
    past = torch.randn(2, 64, 2, 64, dtype=dtype)
    numbers = torch.tensor([4, 9, 2, 7, 8, 1, 15, 11, 12, 5, 14, 3, 16, 6, 10, 13])
    assert numbers[3] - numbers[0] == 3
    outs = []
    for size, table in ((64, torch.tensor([1])), (4, numbers)):
        caches = torch.full((2, 17 if size == 4 else 2, size, 2, 64), float("nan"), dtype=dtype)
        positions = torch.arange(64)
        slots = table[positions // size] * size + positions % size
        for tokens, at in (
            ((past[0], *past), slice(0, 64 - new)),
            ((q, k, v), slice(64 - new, 64)),
        ):
            count = at.stop - at.start
            starts, lengths = (
                torch.tensor(values, dtype=torch.int32) for values in ([0, count], [at.stop])
            )
            arguments = (
                *(x[:count] for x in tokens),
                *caches,
                slots[at],
                starts,
                lengths,
                table[None].int(),
            )
            out = kernels.paged_attention(*arguments, 0.125, 0, 0.0)
        outs.append(out)
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


def test_products_refuse_tensors_that_do_not_fit(panels: Kernels) -> None:
    layer = on(panels, Int4(group_size=64)).pack(
        torch.randn(70, 128).bfloat16(), torch.randn(70).bfloat16()
    )
    assert isinstance(layer, PanelLinear)
    x = torch.randn(2, 128).bfloat16()
    right = (
        layer.weight,
        layer.scales,
        layer.zeros,
        layer.bias,
        layer.form,
        layer.outputs,
        layer.group,
    )
    assert panels.linear(x, *right).shape == (2, 70)
    assert layer.scales is not None and layer.bias is not None
    wrong: list[tuple[int, list[Any]]] = [
        (0, [layer.weight[:1], layer.weight[:, :-1], layer.weight.view(torch.int8)]),
        (1, [None, layer.scales[:1], layer.scales[..., :32].contiguous(), layer.scales.float()]),
        (2, [layer.scales.transpose(0, 1)]),
        (3, [layer.bias[:64], layer.bias.float()]),
        (6, [0, 48, 128]),
    ]
    for at, values in wrong:
        for value in values:
            with pytest.raises(RuntimeError, match="linear:"):
                panels.linear(x, *right[:at], value, *right[at + 1 :])
    wide = torch.randn(2, 512).bfloat16()
    packed = panels.pack(torch.zeros(64, 512, dtype=torch.uint8), 3)
    with pytest.raises(RuntimeError, match="at most 256"):  # what is converted at a time
        panels.linear(wide, packed, torch.ones(1, 1, 64).bfloat16(), None, None, 3, 64, 512)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for rows, size in ((1, 16), (5, 48), (40, 1024)):
        x, weight = 3 * torch.randn(rows, size, dtype=dtype), torch.randn(size, dtype=dtype)
        norm = RMSNorm(size, 1e-6)
        use_kernels(norm, kernels)
        norm.weight.data = weight
        assert norm.kernels is not None
        exact = F.rms_norm(x.double(), (size,), None, 1e-6) * weight.double()
        plain = largest_error(F.rms_norm(x, (size,), None, 1e-6) * weight, exact)
        assert largest_error(norm(x), exact) <= 2 * plain + 1e-6
        with pytest.raises(RuntimeError, match="as many weights"):
            kernels.rms_norm(x, weight[:-1], 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [64, 32])
def test_norm_and_rotation_of_heads(kernels: Kernels, dtype: torch.dtype, rotated: int) -> None:
    torch.manual_seed(4)
    for tokens in (1, 3, 50):
        qkv = torch.randn(tokens, 7 * 64, dtype=dtype)
        weight = torch.randn(5, 64, dtype=dtype)
        table = torch.randn(tokens, 2, 1, rotated, dtype=dtype)
        cos, sin = table.unbind(1)
        heads = qkv[:, : 5 * 64].view(tokens, 5, 64)

        def plain(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rotate(F.rms_norm(x, (64,), None, 1e-6) * weight, cos, sin)

        expected = plain(heads, weight, cos, sin)
        exact = plain(*(t.double() for t in (heads, weight, cos, sin)))
        untouched = qkv[:, 5 * 64 :].clone()
        kernels.norm_and_rotate_(heads, weight, 1e-6, cos, sin)
        assert largest_error(heads, exact) <= 2 * largest_error(expected, exact) + 1e-6
        assert torch.equal(qkv[:, 5 * 64 :], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    extreme = torch.tensor([0.0, -0.0, 200.0, -200.0, 60000.0, -60000.0, 1e-6, -1e-6]).repeat(4)
    both = torch.cat((10 * torch.randn(3, 64), torch.cat((extreme, torch.ones(32)))[None])).to(
        dtype
    )
    gate, up = both.double().chunk(2, -1)
    exact = F.silu(gate) * up
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(
        kernels.silu_and_multiply(both).double(),
        exact,
        atol=1e-6,
        rtol=2e-2 if dtype is torch.bfloat16 else 2e-3 if dtype is torch.float16 else 1e-5,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 1023, 1024, 1025, 9000])
def test_the_likeliest_is_the_first_of_the_largest(
    kernels: Kernels, dtype: torch.dtype, size: int
) -> None:
    torch.manual_seed(6)
    logits = 3 * torch.randn(12, size)
    logits[:4] = logits[:4].round()  # several are the largest
    for row, value in ((4, math.nan), (5, math.inf), (6, -math.inf)):
        logits[row, torch.rand(size) < 0.3] = value
    logits[7], logits[8] = -math.inf, math.nan
    logits = logits.to(dtype)
    assert torch.equal(kernels.argmax(logits), logits.max(dim=-1).indices)
    wide = torch.cat((logits, logits.new_full((12, 5), 1e3)), dim=1)[:, :size]
    assert torch.equal(kernels.argmax(wide), logits.max(dim=-1).indices)


PROMPTS = [[7, 3, 9] * 12, [5], [2] * 19, [11, 4, 8, 1]]


@pytest.mark.parametrize("tied", [True, False])
def test_on_says_what_off_says(kernels: Kernels, tmp_path: Path, tied: bool) -> None:
    """In float32 token for token; in bfloat16 with an error that is at most twice as large."""
    make_checkpoint(
        tmp_path,
        hidden_size=96,
        intermediate_size=160,
        head_dim=32,
        dtype=torch.bfloat16,
        tie_word_embeddings=tied,
    )
    said, scores, live = {}, {}, {}
    for quant, mode in itertools.product(("fp32", "bf16"), ("on", "off")):
        overrides = [f"runtime.cpu_kernels={mode!r}"]
        with LLM(str(tmp_path), quant=quant, device="cpu", overrides=overrides) as llm:
            results = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
            said[quant, mode] = [result.outputs[0].token_ids for result in results]
            scores[quant, mode] = llm.logits(PROMPTS[0])
            live[quant, mode] = llm.engine.runner.attention.name
            assert (llm.engine.loaded.kernels is not None) == (mode == "on")
    assert {mode: name for (_, mode), name in live.items()} == {"on": "cpu", "off": "sdpa"}
    assert said["fp32", "on"] == said["fp32", "off"]
    exact = scores["fp32", "off"].double()
    torch.testing.assert_close(scores["fp32", "on"].double(), exact, atol=1e-4, rtol=1e-4)
    errors = [largest_error(scores["bf16", mode], exact) for mode in ("on", "off")]
    assert errors[0] <= 2 * errors[1]


def test_without_a_compiler_auto_does_without_and_on_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    # what is loaded stays: a library of another compilation would be registered a second time
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    chosen, reason = library.choose("auto", CPU)
    assert chosen is None and reason is not None and "not used" in reason
    with pytest.raises(BadInput, match=r"runtime\.cpu_kernels=on"):
        library.choose("on", CPU)
    assert library.choose("off", CPU) == (None, None)
    left = [path.name for path in tmp_path.glob("minivllm/*")]
    assert left == ["minivllm_cpu.lock"]  # nothing half-written


def test_of_several_that_start_at_once_one_compiles(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, loaded, missing = [], [], threading.Barrier(3, timeout=60)
    compile_or_wait = library._compile

    def ask(path: Path) -> bool:
        missing.wait()  # all have found that there is none
        return compile_or_wait(path)

    def compile_slowly(name: str, sources: list[str], build_directory: str, **_: Any) -> None:
        compiled.append(name)
        time.sleep(0.1)
        (Path(build_directory) / f"{name}.so").touch()

    monkeypatch.setattr(library, "_compile", ask)
    monkeypatch.setattr(cpp_extension, "load", compile_slowly)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(library, "_cached_path", lambda: tmp_path / "new" / "kernels.so")
    load = library.load.__wrapped__
    with ThreadPoolExecutor(3) as pool:
        found = [one.result() for one in [pool.submit(load) for _ in range(3)]]
    assert len(compiled) == 1 and loaded == [str(tmp_path / "new" / "kernels.so")] * 2
    assert all(one.compile_s > 0.1 for one in found), "who waits loads nothing meanwhile"
    assert load().compile_s == 0.0
    assert {one.variant for one in found} == {"kernels"} and kernels.variant != "kernels"
