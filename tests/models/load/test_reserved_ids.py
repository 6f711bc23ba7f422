"""Which ids no random prompt may hold."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from minivllm.models.load.reserved_ids import UNNAMED, reserved_ids, runs_of_ids
from minivllm.models.load.tokenizer import Tokenizer

TINY = Path(__file__).resolve().parents[3] / "minivllm" / "assets" / "tiny"


def test_special_tokens_the_end_and_what_has_no_text_are_reserved() -> None:
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    size = tokenizer.size
    silent = [i for i in range(size) if not tokenizer.decode([i])]
    assert tokenizer.special_ids == silent != []
    found = reserved_ids(tokenizer, (9, size + 50), size + 4)
    assert found == runs_of_ids([*silent, 9, *range(size, size + 4)])


def test_without_a_tokenizer_the_first_id_stands_for_what_is_not_known() -> None:
    assert reserved_ids(None, (), 10) == UNNAMED
    assert reserved_ids(None, (1, 9), 10) == (range(2), range(9, 10))


@given(st.sets(st.integers(0, 40)))
def test_runs_hold_the_ids_and_do_not_touch(ids: set[int]) -> None:
    runs = runs_of_ids(ids)
    assert {token for run in runs for token in run} == ids
    assert all(a.stop < b.start for a, b in itertools.pairwise(runs))
