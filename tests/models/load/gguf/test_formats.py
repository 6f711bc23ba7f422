"""The sizes of blocks are those of the `gguf` package."""

from __future__ import annotations

import gguf

from minivllm.models.load.gguf.formats import FORMATS


def test_every_format_of_the_package_is_known_with_its_block() -> None:
    of_activations = (gguf.GGMLQuantizationType.Q8_1, gguf.GGMLQuantizationType.Q8_K)
    theirs = {
        int(kind): gguf.GGML_QUANT_SIZES[kind]
        for kind in gguf.GGMLQuantizationType
        if kind not in of_activations
    }
    ours = {number: (form.values, form.bytes) for number, form in FORMATS.items()}
    assert ours == theirs
    assert all(gguf.GGMLQuantizationType[form.name] == number for number, form in FORMATS.items())
