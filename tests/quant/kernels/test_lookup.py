"""Codes of four bits as registers widen them: the programs for GPUs are carried out here, an
instruction at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from minivllm.quant.bnb import import_bitsandbytes
from minivllm.quant.kernels.lookup import LEVELS, STRETCH, integers, program


def byte(value: int, place: int) -> int:
    return value >> 8 * place & 0xFF


def permute(a: int, b: int, selector: int) -> int:
    """PTX's prmt: each half byte of the selector names one of eight bytes; with its fourth bit,
    that byte's sign."""
    out = 0
    for i in range(4):
        choice = selector >> 4 * i & 15
        picked = byte(a | b << 32, choice & 7)
        out |= (picked if choice < 8 else 0xFF * (picked >> 7)) << 8 * i
    return out


def logic(a: int, b: int, c: int, table: int) -> int:
    """PTX's lop3: each bit of the result is the bit of the table that the three inputs' bits count
    to."""
    return sum(
        (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)
    )


def multiply_add(dtype: torch.dtype, *words: int) -> int:
    """PTX's fma.rn of two numbers a word; what it rounds here is exact."""
    a, b, c = (
        torch.tensor([word], dtype=torch.int64).to(torch.int32).view(dtype).double()
        for word in words
    )
    return int((a * b + c).to(dtype).view(torch.int32)) & 0xFFFFFFFF


OPERATIONS = {
    "mov.b32": lambda a: a,
    "fma.rn.bf16x2": partial(multiply_add, torch.bfloat16),
    "fma.rn.f16x2": partial(multiply_add, torch.float16),
    "prmt.b32": permute,
    "lop3.b32": logic,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
}


def run(text: str, word: int) -> list[int]:
    """What the program leaves in $0 to $3 for `word` in $4."""
    registers = {"$4": word}
    for instruction in text.strip("{}\n").split(";"):
        name, *operands = instruction.replace(",", " ").split() or [".reg"]
        if name != ".reg":
            # What is written may share a register with what is given.
            assert "$4" not in operands or not registers.keys() & {"$0", "$1", "$2", "$3"}
            values = [registers[o] if o in registers else int(o, 0) for o in operands[1:]]
            registers[operands[0]] = OPERATIONS[name](*values)
    return [registers[f"${i}"] for i in range(4)]


def test_the_levels_are_those_of_bitsandbytes() -> None:
    theirs = import_bitsandbytes("nf4").functional.get_4bit_type("nf4", device="cpu")
    assert torch.equal(torch.tensor(LEVELS), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [program, integers])
def test_every_byte_becomes_its_two_numbers_wherever_it_lies(
    kind: Callable[[torch.dtype], str], dtype: torch.dtype
) -> None:
    text = kind(dtype)
    stretched = torch.tensor(LEVELS, dtype=torch.float64) * STRETCH.value
    numbers = (stretched if kind is program else torch.arange(-8, 8)).to(dtype)
    for value in range(256):
        codes = [value, value ^ 0xFF, (value * 7 + 3) & 0xFF, 255 - value // 2]
        words = run(text, sum(code << 8 * i for i, code in enumerate(codes)))
        pairs = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(dtype)
        assert torch.equal(pairs[:4], numbers[[code >> 4 for code in codes]])
        assert torch.equal(pairs[4:], numbers[[code & 15 for code in codes]])


def test_stretched_levels_are_closer_to_what_is_meant() -> None:
    levels = torch.tensor(LEVELS, dtype=torch.float64)

    def error(stretch: float) -> float:
        return float(
            ((levels * stretch).bfloat16().double() / stretch - levels).norm() / levels.norm()
        )

    assert error(STRETCH.value) < 0.0007 < 0.001 < error(1.0)
