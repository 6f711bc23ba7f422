"""Dequantised values are those of the `gguf` package, to the bit."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minivllm.models.load.gguf import blocks
from minivllm.models.load.gguf.blocks import (
    dequantized,
    split_iq4_nl,
    split_q4_0,
    split_q4_1,
    split_q8_0,
)
from minivllm.models.load.gguf.formats import BY_NAME, BY_PACKAGE, QUANTIZED, READ
from minivllm.quant.iq4_nl import LEVELS
from tests.gguf_files import quantized

# What the package can make of floats.
MADE = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


def compare(raw: NDArray[np.uint8], form: str) -> None:
    """Equal NaNs and infinities included."""
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[form]).reshape(-1)
    ours = dequantized(torch.from_numpy(raw.reshape(-1)), form).float()
    assert ours.shape == (raw.size // BY_NAME[form].bytes * BY_NAME[form].values,)
    np.testing.assert_array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("form", READ)
def test_any_bytes_become_the_packages_values(form: str) -> None:
    compare(np.random.default_rng(3).integers(0, 256, (300, BY_NAME[form].bytes), np.uint8), form)


@pytest.mark.parametrize("form", READ)
@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 70), seed=st.integers(0, 1 << 32), byte=st.integers(0, 255))
def test_any_number_of_blocks_has_the_packages_values(
    form: str, count: int, seed: int, byte: int
) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, (count, BY_NAME[form].bytes), np.uint8)
    raw[count // 2] = byte
    compare(raw, form)


@pytest.mark.parametrize("form", MADE)
def test_weights_that_the_package_quantises_are_those_that_it_gives_back(form: str) -> None:
    values = np.random.default_rng(1).normal(0, 0.02, (40, 512)).astype(np.float32)
    values[3], values[4, ::2] = 0, -0.0
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[form])
    compare(raw.view(np.uint8), form)


def test_every_type_that_the_package_converts_is_read() -> None:
    theirs = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert theirs == {*READ}
    gridded = {kind.name for kind, of in gguf.quants._type_traits.items() if of.grid_hex}
    assert gridded == {*BY_PACKAGE} and len(QUANTIZED) + len(BY_PACKAGE) + 3 == len(READ)


def test_blocks_that_are_computed_as_they_are_need_no_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    for form in QUANTIZED:
        assert dequantized(torch.zeros(BY_NAME[form].bytes, dtype=torch.uint8), form).numel() > 0
    with pytest.raises(ImportError):
        dequantized(torch.zeros(BY_NAME["IQ3_S"].bytes, dtype=torch.uint8), "IQ3_S")


def test_codes_and_scales_are_the_same_values() -> None:
    values = torch.randn(64, 32).numpy()
    for form, split, middle in (("Q8_0", split_q8_0, 0), ("Q4_0", split_q4_0, 8)):
        raw = torch.from_numpy(quantized(values, form))
        codes, scale = split(raw)
        whole = (codes.float() - middle) * scale.float()
        assert torch.equal(whole.flatten(), dequantized(raw.flatten(), form))
    raw = torch.from_numpy(quantized(values, "Q4_1"))
    codes, scale, minimum = split_q4_1(raw)
    whole = codes.float() * scale.float() + minimum.float()
    assert torch.equal(whole.flatten(), dequantized(raw.flatten(), "Q4_1"))
    raw = torch.from_numpy(quantized(values, "IQ4_NL"))
    codes, scale = split_iq4_nl(raw)
    whole = torch.tensor(LEVELS)[codes.int()] * scale.float()
    assert torch.equal(whole.flatten(), dequantized(raw.flatten(), "IQ4_NL"))
    assert (whole - torch.from_numpy(values)).abs().max() < 0.4
    assert gguf.quants.IQ4_NL.kvalues == LEVELS
    assert gguf.quants.MXFP4.kvalues == blocks._E2M1
