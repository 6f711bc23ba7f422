"""The formats of a GGUF file's tensors: their names, and the bytes of a block. Free of torch.

Q8_1 and Q8_K are missing: ggml makes them of activations, and no file has them. Source: ggml's
`ggml_type` and `type_traits` (https://github.com/ggml-org/ggml)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorFormat:
    """How values are stored: consecutive values of a row form a block."""

    name: str
    values: int  # of a block
    bytes: int  # of a block


FORMATS = {
    number: TensorFormat(name, values, count)
    for number, name, values, count in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20)),
        *((6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34)),
        *((10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144)),
        *((13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210)),
        *((16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98)),
        *((19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110)),
        *((22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2)),
        *((26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8), (29, "IQ1_M", 256, 56)),
        *((30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
        *((39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
    )
}
BY_NAME = {form.name: form for form in FORMATS.values()}
FLOATS = ("F32", "F16", "BF16")
QUANTIZED = (  # that blocks.py converts
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
# Codes are places in tables of up to 2,048 vectors, which the `gguf` package has: it converts them.
BY_PACKAGE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
READ = (*FLOATS, *QUANTIZED, *BY_PACKAGE)
# Formats that an option of quant computes with as they are stored, see packed.py.
AS_STORED = {"int4": ("Q4_0", "Q4_1"), "int8": ("Q8_0",), "nf4": ("IQ4_NL",)}
