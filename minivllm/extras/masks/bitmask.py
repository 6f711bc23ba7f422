"""Masks of the vocabulary, a bit for each token, and their application to logits in one operation.

A row is int32 [ceil(vocab / 32)] in memory, token i in bit i % 32 of word i // 32, as llguidance
and vLLM have it; bits beyond the vocabulary are 0. On the host a row is a bytearray.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from minivllm.kernels.transfer import upload

WORD = 32  # bits


def num_bytes(vocab_size: int) -> int:
    """Bytes of a row."""
    return -(-vocab_size // WORD) * WORD // 8


def every_token(vocab_size: int) -> bytearray:
    """The row that allows all tokens."""
    return row_of(np.ones(vocab_size, dtype=np.bool_))


def row_of(allowed: Tensor | np.ndarray) -> bytearray:
    """The row of a mask, bool [vocab] on the host."""
    packed = np.packbits(np.asarray(allowed), bitorder="little").tobytes()
    return bytearray(packed.ljust(num_bytes(len(allowed)), b"\0"))


def row_from(bits: bytes, vocab_size: int) -> bytearray:
    """A row of bits in the same order, which may be of a larger or smaller vocabulary: tokens that
    it does not have are not allowed."""
    row = bytearray(bits[: -(-vocab_size // 8)].ljust(num_bytes(vocab_size), b"\0"))
    if spare := vocab_size % 8:
        row[vocab_size // 8] &= (1 << spare) - 1
    return row


def allow(row: bytearray, token_ids: Iterable[int]) -> None:
    """Allow tokens, too."""
    for token in token_ids:
        row[token >> 3] |= 1 << (token & 7)


def forbid(row: bytearray, token_ids: Iterable[int]) -> None:
    """Allow these tokens no more."""
    for token in token_ids:
        row[token >> 3] &= ~(1 << (token & 7))


def intersect(row: bytearray, other: bytes | bytearray) -> None:
    """Keep only what another row allows, too."""
    words = np.frombuffer(row, dtype=np.uint8)
    words &= np.frombuffer(other, dtype=np.uint8)


def allows_any(row: bytearray) -> bool:
    """Whether a token is allowed."""
    return bool(np.frombuffer(row, dtype=np.uint8).any())


def apply_bitmask(logits: Tensor, rows: Sequence[int], bits: bytearray) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    What is added comes from a table with the 8 numbers of every byte: a seventh of the time that
    shifts of every bit take on a CPU.

    Args:
        logits: float32 [S, vocab].
        rows: of the logits, M of them in order.
        bits: M rows of masks, one after another.
    """
    device, vocab_size = logits.device, logits.shape[1]
    mask = upload(bits, device).view(torch.uint8).int()
    added = functional.embedding(mask, _added(device)).view(len(rows), -1)[:, :vocab_size]
    if len(rows) == len(logits):
        logits.add_(added)
    else:
        index = torch.tensor(rows, device=device)
        logits.index_copy_(0, index, logits.index_select(0, index).add_(added))


@cache
def _added(device: torch.device) -> Tensor:
    """What is added to the logits of 8 tokens, by the byte of their bits: float32 [256, 8]."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)
