"""The linear layers of a model are found whatever passes have put around them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.kernels.modules import kernel_name
from minivllm.passes.linear_layers import linear_layers
from tests.reference import make_checkpoint


@pytest.mark.parametrize(
    ("family", "overrides", "counts"),
    [
        ("qwen3", [], {"PlainLinear": 13}),
        ("qwen3", ["runtime.determinism=batch"], {"PlainLinear": 13}),
        ("qwen3", ["quant=int8", "quant.skip=[down_proj]"], {"Int8Linear": 9, "PlainLinear": 4}),
        # Two projections and the gate in three layers, and the head; eight experts a layer have two
        # each, unless grouped.
        ("qwen3_moe", ["runtime.moe=grouped"], {"PlainLinear": 10}),
        ("qwen3_moe", ["runtime.moe=loop"], {"PlainLinear": 58}),
    ],
)
def test_each_is_counted_once(
    family: str,
    overrides: list[str],
    counts: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minivllm.quant.plain.can_pack", lambda dtype: False)
    make_checkpoint(tmp_path, family)
    model = ["model=hf", f"model.path={tmp_path}", "runtime.device=cpu", "runtime.cpu_kernels=off"]
    quant = [] if any("quant=" in one for one in overrides) else ["quant=fp32"]
    engine = build_engine(compose([*model, *quant, *overrides]))
    assert dict(Counter(map(kernel_name, linear_layers(engine.loaded)))) == counts
    engine.close()
