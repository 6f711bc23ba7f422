"""Dequantised values are those of the `gguf` package, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from minivllm.models.load.gguf.blocks import dequantized, split_q4_0, split_q8_0
from minivllm.models.load.gguf.formats import BY_NAME, FLOATS, QUANTIZED


@pytest.mark.parametrize("form", [*FLOATS, *QUANTIZED])
def test_any_bytes_become_the_packages_values(form: str) -> None:
    raw = np.random.default_rng(3).integers(0, 256, (300, BY_NAME[form].bytes), np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[form]).reshape(-1)
    ours = dequantized(torch.from_numpy(raw.reshape(-1)), form).float()
    assert ours.shape == (300 * BY_NAME[form].values,)
    np.testing.assert_array_equal(ours.numpy(), theirs)  # equal NaNs and infinities included


def test_codes_and_scales_are_the_same_values() -> None:
    values = torch.randn(64, 32).numpy()
    for form, split, middle in (("Q8_0", split_q8_0, 0), ("Q4_0", split_q4_0, 8)):
        raw = torch.from_numpy(gguf.quantize(values, gguf.GGMLQuantizationType[form]))
        codes, scale = split(raw)
        whole = (codes.float() - middle) * scale.float()
        assert torch.equal(whole.flatten(), dequantized(raw.flatten(), form))
