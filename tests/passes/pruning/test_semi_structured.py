"""What of torch's semi-structured tensors a CPU can show: which layers are compressed, what they
store, and where the kernels are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from minivllm import LLM
from minivllm.bench.records.identity import cell_id
from minivllm.bench.targets.liveness import pruning_counters
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.models.pass_report import PassReport
from minivllm.passes.pruning.options import MagnitudeOptions, WandaOptions
from minivllm.passes.pruning.plan import by_magnitude
from minivllm.passes.pruning.semi_structured import (
    SemiStructured,
    SemiStructuredLinear,
    is_compressible,
    require_semi_structured,
)
from minivllm.quant.plain import PlainLinear


class Halves(Tensor):
    """A matrix with torch's parts of it, which multiplies as it is."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "meta"], None


def compressed(weight: Tensor) -> Tensor:
    """What torch stores on a GPU, for a CPU that multiplies the whole matrix."""
    made: Any = weight.as_subclass(Halves)
    made.packed, made.meta = sparse_semi_structured_from_dense_cutlass(weight)
    return made  # type: ignore[no-any-return]


def masked(rows: int, columns: int) -> Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    return weight.masked_fill(by_magnitude(0.5, "2:4")("", weight), 0)


def loaded(**weights: Tensor) -> Any:
    """As much of a loaded model as the pass looks at."""
    bias = torch.ones(1).bfloat16()
    model = nn.ModuleDict({n: PlainLinear(w, bias.expand(len(w))) for n, w in weights.items()})
    inputs = {name: weight.shape[1] for name, weight in weights.items()}
    size = sum(weight.nbytes for weight in weights.values())
    return SimpleNamespace(model=model, linear_inputs=inputs, linear_bytes=size, weight_bytes=size)


def test_masked_layers_are_compressed_and_others_stay() -> None:
    dense = torch.ones(64, 64).bfloat16()
    given = loaded(masked=masked(64, 128), dense=dense, narrow=masked(64, 96), short=masked(40, 64))
    x = torch.randn(3, 128).bfloat16()
    before, size = given.model["masked"](x), given.linear_bytes
    report = SemiStructured(compressed).apply(given, Any)
    kinds = {name: type(module) for name, module in given.model.items()}
    assert kinds.pop("masked") is SemiStructuredLinear and {*kinds.values()} == {PlainLinear}
    torch.testing.assert_close(given.model["masked"](x), before, rtol=0, atol=0)
    # Of 16 bits a weight half, and 2 bits for where each of these was.
    stored = 64 * 128 * 2 * 9 // 16
    assert report.count == 1 and report.bytes == stored - 64 * 128 * 2
    assert given.linear_bytes == given.weight_bytes == size + report.bytes
    layer = given.model["masked"]
    whole = sparse_semi_structured_to_dense_cutlass(layer.packed, layer.meta)
    assert torch.equal(whole, masked(64, 128))
    with pytest.raises(BadInput, match="multiples of 32 and 64"):
        SemiStructured(compressed).apply(loaded(narrow=masked(64, 96)), Any)


def test_three_of_four_are_too_many() -> None:
    weight = masked(32, 64)
    assert is_compressible(weight) and is_compressible(torch.zeros(32, 64))
    row = weight[5]
    row[8:12] = torch.tensor([1.0, 2.0, 0.0, 3.0])
    assert not is_compressible(weight)


def test_the_record_says_what_is_stored() -> None:
    reports = [PassReport("prune", counters={"zeroed": 50}), PassReport("semi_structured", 7, -88)]
    counters = pruning_counters(reports, 112, 100)["pruning"]
    assert counters["realised_bytes"] == 112 and counters["nonzero_bytes"] == 100
    assert counters["layers_compressed"] == 7
    assert "layers_compressed" not in pruning_counters(reports[:1], 200, 100)["pruning"]


@pytest.mark.parametrize("options", [MagnitudeOptions, WandaOptions])
def test_another_pattern_has_no_such_kernels(options: Any) -> None:
    assert options(pattern="2:4", kernels="semi_structured").kernels == "semi_structured"
    with pytest.raises(BadInput, match=r'pruning\.kernels.* needs pruning\.pattern="2:4"'):
        options(kernels="semi_structured")


def test_a_processor_has_no_such_kernels() -> None:
    asked = ["pruning=magnitude", "pruning.pattern='2:4'", "pruning.kernels=semi_structured"]
    with pytest.raises(
        BadInput, match=r"pruning\.kernels=semi_structured needs runtime\.device=cuda"
    ):
        LLM("tiny", quant="bf16", device="cpu", overrides=["runtime.threads=1", *asked])


@pytest.mark.parametrize(
    ("capability", "quant", "words"),
    [((7, 5), "bf16", r"8\.0, and this one has 7\.5"), ((9, 0), "fp32", "needs quant=bf16")],
)
def test_another_gpu_or_dtype_has_no_such_kernels(
    capability: tuple[int, int], quant: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minivllm.config.compose import build

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    method = build(compose([f"quant={quant}"])["quant"])
    knobs = {"kernels": "semi_structured"}
    with pytest.raises(BadInput, match=words):
        require_semi_structured(knobs, method, torch.device("cuda"))
    require_semi_structured({"kernels": "dense"}, method, torch.device("cuda"))


def test_dense_kernels_are_the_cell_that_was_before_there_was_a_choice() -> None:
    config = compose(["pruning=magnitude", "pruning.pattern='2:4'"])
    older = {**config, "pruning": {k: v for k, v in config["pruning"].items() if k != "kernels"}}
    assert cell_id(config, "f") == cell_id(older, "f")
