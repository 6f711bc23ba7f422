"""Tokens of simulated requests: counted, and cut like a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.workloads.lazy_prompt import LazyPrompt, answer_positions
from minivllm.engines.simulated.request import SimulatedTokens


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 12), st.data())
def test_simulated_tokens_are_cut_like_a_list(
    parts: list[int], answers: int, data: st.DataObject
) -> None:
    runs = tuple(range(100 * i, 100 * i + n) for i, n in enumerate(parts))
    tokens = SimulatedTokens(LazyPrompt(runs, 50, 0), "c")
    start = tokens.length
    tokens.length += answers
    plain = [p for run in (*runs, answer_positions("c", answers)) for p in run]
    assert len(tokens) == len(plain) == start + answers
    assert list(tokens) == plain and tokens[-1] == plain[-1]
    a = data.draw(st.integers(0, len(plain)))
    b = data.draw(st.integers(a, len(plain)))
    piece = tokens[a:b]
    flat = [p for part in piece for p in part] if isinstance(piece, tuple) else list(piece)
    assert flat == plain[a:b]
    hash(piece)


def test_slices_are_equal_where_tokens_are() -> None:
    def of(runs: list[range], request_id: str) -> SimulatedTokens:
        tokens = SimulatedTokens(LazyPrompt(tuple(runs), 50, 0), request_id)
        tokens.length += 20
        return tokens

    a, b = of([range(0, 40)], "a"), of([range(0, 40)], "b")
    assert a[16:32] == b[16:32] and hash(a[16:32]) == hash(b[16:32])
    assert a[32:48] != b[32:48]  # the answer has begun
    assert of([range(0, 20), range(60, 90)], "c")[:16] == a[:16] != of([range(7, 40)], "d")[:16]
    plain = SimulatedTokens([5, 6, 7], "e")
    assert plain[0:2] == (5, 6) and plain[1] == 6


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=4)


@given(st.lists(st.tuples(RUNS, st.sampled_from("ab"), st.integers(0, 12)), min_size=2, max_size=2))
def test_keys_of_blocks_are_equal_where_slices_are(
    cases: list[tuple[list[tuple[int, int]], str, int]],
) -> None:
    size, keyed = 4, []
    for parts, request_id, answers in cases:
        runs = tuple(range(8 * i, 8 * i + n) for i, n in parts)
        tokens = SimulatedTokens(LazyPrompt(runs, 50, 0), request_id)
        tokens.length += answers
        count = len(tokens) // size
        keys = tokens.block_keys(size, range(count))
        assert [tokens.block_keys(size, range(i, i + 1)) for i in range(count)] == [
            [key] for key in keys
        ]
        keyed.append((keys, [tokens[size * i : size * i + size] for i in range(count)]))
    (keys, slices), (other_keys, other_slices) = keyed
    for key, piece in zip(keys, slices, strict=True):
        for other_key, other_piece in zip(other_keys, other_slices, strict=True):
            assert (key == other_key) == (piece == other_piece)


def test_known_tokens_are_keyed_by_themselves() -> None:
    assert SimulatedTokens([5, 6, 7, 8, 9], "e").block_keys(2, range(1, 2)) == [(7, 8)]
