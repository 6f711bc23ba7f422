"""A dictionary as the words of a command line."""

from __future__ import annotations

from minivllm.engines.servers.arguments import merged, words


def test_each_kind_of_value_has_its_form() -> None:
    given = {"a": True, "b": False, "c": None, "d": 3, "e": [1, 2], "f": {"k": 1}}
    line = words(given, negated=True)
    assert line == ["--a", "--no-b", "--d", "3", "--e", "1", "2", "--f", '{"k": 1}']
    assert words({"b": False}, negated=False) == []


def test_the_users_own_win_however_they_are_written() -> None:
    made = {"max-num-seqs": 4, "seed": 0}
    assert merged(made, {"max_num_seqs": 8, "--seed": None}) == {"max-num-seqs": 8, "seed": None}
    assert merged(made, None) == made
