"""Chains of rules and references are measured before llguidance follows them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.extras.masks.chains import (
    MOST_CHAIN,
    longest_chain,
    require_short_grammar,
    require_short_schema,
)

GRAPHS = st.integers(1, 8).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(0, size - 1), max_size=4), min_size=size, max_size=size
    )
)


def longest_path(edges: list[list[int]], path: tuple[int, ...] = ()) -> int:
    """The most nodes that a walk passes without one twice, by trying every walk."""
    following = edges[path[-1]] if path else range(len(edges))
    ends = [longest_path(edges, (*path, node)) for node in following if node not in path]
    return max(ends, default=len(path))


def schema_of(edges: list[list[int]]) -> dict[str, Any]:
    """A schema whose definitions refer to each other as the nodes of a graph."""

    def refer(node: int) -> dict[str, str]:
        return {"$ref": f"#/$defs/d~1%7B{node}"}

    defs = {
        f"d/{{{node}": {"anyOf": [{"type": "null"}, *map(refer, found)]}
        for node, found in enumerate(edges)
    }
    return {"$defs": defs, **refer(0)}


def grammar_of(edges: list[list[int]]) -> str:
    """A grammar whose rules name each other as the nodes of a graph."""
    lines = ["// r0: r0", "start: r0 | /[^r0: ]/ "]
    for node, found in enumerate(edges):
        lines += [f'r{node}[capture="r0"]: "r0:"', *(f"  | ( r{other} )?" for other in found)]
    return "\n".join(lines)


@given(GRAPHS)
def test_a_chain_is_never_measured_too_short(edges: list[list[int]]) -> None:
    bound = longest_chain([1] * len(edges), edges)
    has_cycle = any(node in reached(edges, node) for node in range(len(edges)))
    path = longest_path(edges)
    assert path <= bound <= len(edges) if has_cycle else bound == path


def reached(edges: list[list[int]], node: int) -> set[int]:
    found: set[int] = set()
    further = list(edges[node])
    while further:
        if (other := further.pop()) not in found:
            found.add(other)
            further += edges[other]
    return found


@given(GRAPHS)
def test_graphs_of_schemas_and_grammars(edges: list[list[int]]) -> None:
    """From the first definition on: what it does not reach may be longer."""
    own = sorted({0} | reached(edges, 0))
    numbers = {node: number for number, node in enumerate(own)}
    path = longest_path([[numbers[other] for other in edges[node]] for node in own])
    chain, levels = require_short_schema(schema_of(edges))
    assert min(path, len(own)) <= chain <= len(edges) + 1 and chain <= levels
    require_short_grammar(grammar_of(edges))


def test_long_chains_are_bad_input() -> None:
    count = MOST_CHAIN + 1
    chain = [[node + 1] for node in range(count)] + [[]]
    # With the whole schema, and with the start.
    words = f"a chain of {count + 2:,} rules or references"
    with pytest.raises(BadInput, match=words):
        require_short_schema(schema_of(chain))
    rules = grammar_of(chain)
    for text in (rules, rules.replace("r", "R").replace("staRt", "start").replace("R0]", "r0]")):
        with pytest.raises(BadInput, match=words):
            require_short_grammar(text)
    inner = f"start: %json {json.dumps(schema_of(chain))}"
    with pytest.raises(BadInput, match="the JSON schema has a chain"):
        require_short_grammar(inner)


def test_references_by_other_names_than_pointers() -> None:
    count = MOST_CHAIN + 1
    defs = {f"d{i}": {"$anchor": f"a{i}", "$ref": f"#a{i + 1}"} for i in range(count)}
    with pytest.raises(BadInput, match="a chain of"):
        require_short_schema({"$ref": "#a0", "$defs": {**defs, "end": {"$anchor": f"a{count}"}}})
    ids = {f"d{i}": {"$id": f"https://x/d{i}", "$ref": f"d{i + 1}"} for i in range(count)}
    with pytest.raises(BadInput, match="a chain of"):
        require_short_schema({"$ref": "https://x/d0", "$defs": ids})


def test_levels_along_a_chain_are_bounded() -> None:
    deep: dict[str, Any] = {"$ref": "#/$defs/NEXT"}
    for _ in range(30):
        deep = {"items": deep}
    text = json.dumps(deep)
    defs = {f"d{i}": json.loads(text.replace("NEXT", f"d{i + 1}")) for i in range(400)}
    with pytest.raises(BadInput, match=r"a chain of 12,\d+ levels"):
        require_short_schema({"$defs": defs, "$ref": "#/$defs/d0"})


def test_shared_definitions_are_no_chain() -> None:
    """Thousands of references to a few definitions, some of which hold themselves."""
    defs = {
        "a": {"type": "object", "properties": {"id": {"$ref": "#/$defs/b"}}},
        "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    }
    users = {f"p{i}": {"$ref": f"#/$defs/{'ab'[i % 2]}"} for i in range(5000)}
    assert require_short_schema({"$defs": defs, "properties": users})[0] == 3
    terms = "\n".join(f"t{i}: NUMBER | text" for i in range(5000))
    require_short_grammar(f"start: t1\n{terms}\nNUMBER: /[0-9]+/\ntext: /a/")
