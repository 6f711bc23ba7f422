"""Chains of a grammar's rules and of a schema's references, which llguidance follows by recursion.

Depth and size do not bound them: a rule names the next one. So they are measured here, without
recursion, before llguidance sees them. Torch-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

from minivllm.errors import BadInput

MOST_CHAIN = 2000  # rules, or references
MOST_LEVELS = 10_000  # of brackets along a chain; each takes up to 8 kB of the stack
STACK = 128 << 20  # bytes, for a chain of so many levels
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")  # by which a reference may find a schema
# What a Lark grammar is made of; a name before a colon that begins a line is what is defined.
_LARK = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|(?P<skip>[ \t\r]+|(?:#|//)[^\n]*|<[^<>\s]+>)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/)|(?P<json>%(?:json|regex|llguidance)\b)"
    r"|(?P<name>[A-Za-z_][\w-]*)|(?P<mark>::|[^\w])",
    re.DOTALL,
)
_OPEN, _CLOSE = "([{", ")]}"
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def longest_chain(weights: Sequence[int], edges: Sequence[Sequence[int]]) -> int:
    """A bound of the longest path in a graph, none of whose nodes comes twice: nodes that reach
    each other count as one path.

    Args:
        weights: steps of each node.
        edges: the nodes that each node names.

    Source: the strongly connected components are Tarjan's (1972), without recursion.
    """
    order = [0] * len(weights)  # when a node was found; 0: not yet
    low = [0] * len(weights)
    steps = [0] * len(weights)  # from a node on, once its component is known
    open_nodes: list[int] = []
    count = 0
    for root in range(len(weights)):
        walk = [] if order[root] else [(root, iter(edges[root]))]
        while walk:
            node, further = walk[-1]
            if not order[node]:
                count += 1
                order[node] = low[node] = count
                open_nodes.append(node)
            for other in further:
                if not order[other]:
                    walk.append((other, iter(edges[other])))
                    break
                if not steps[other]:  # it is open
                    low[node] = min(low[node], order[other])
            else:
                walk.pop()
                if walk:
                    parent = walk[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == order[node]:
                    members = [open_nodes.pop()]
                    while members[-1] != node:
                        members.append(open_nodes.pop())
                    below = max((steps[o] for member in members for o in edges[member]), default=0)
                    whole = sum(weights[member] for member in members) + below
                    for member in members:
                        steps[member] = whole
    return max(steps, default=0)


def require_short_schema(schema: Any) -> tuple[int, int]:
    """The longest chain of a schema's references, and of the levels along it.

    Raises:
        BadInput: one of them is too long.
    """
    parts = [part for part, _ in _parts(schema)]
    referring = [
        (part, reference)
        for part in parts
        if isinstance(part, dict)
        for name in _REFERENCES
        if isinstance(reference := part.get(name), str)
    ]
    named = [part for part in parts[1:] if isinstance(part, dict) and _has_name(part)]
    led_to = {id(part): [*_pointed(schema, reference)] for part, reference in referring}
    # What a chain passes: the whole schema, and all that a reference leads to.
    targets = {id(schema): 0}
    for part in (*named, *(target for found in led_to.values() for target in found)):
        targets.setdefault(id(part), len(targets))
    anywhere = len(targets)  # whatever has a name, where a reference may lead
    edges: list[list[int]] = [[] for _ in targets] + [[0, *range(1, 1 + len(named))]]
    owners, levels = {id(schema): (0, 1)}, [0] * (len(targets) + 1)
    for part, above in _parts(schema):
        owner, level = owners.get(id(above), (0, 0))
        if id(part) in targets:
            target = targets[id(part)]
            edges[owner].append(target)
            owner, level = target, 0
        owners[id(part)] = owner, level + 1
        levels[owner] = max(levels[owner], level + 1)
        edges[owner] += [targets[id(target)] for target in led_to.get(id(part), ())]
    for part, reference in referring:
        if named or not reference.startswith("#"):
            edges[owners[id(part)][0]].append(anywhere)
    return _require_short("the JSON schema", [1] * len(targets) + [0], levels, edges)


def _has_name(part: dict[str, Any]) -> bool:
    return any(isinstance(part.get(name), str) for name in _NAMES)


def _parts(schema: Any) -> Iterator[tuple[Any, Any]]:
    """The objects and lists of a schema from the outside in, each with the one that it lies in."""
    found: list[tuple[Any, Any]] = [(schema, None)]
    for part, above in found:  # which grows
        yield part, above
        values = part.values() if isinstance(part, dict) else part
        found += [(value, part) for value in values if isinstance(value, dict | list)]


def _pointed(schema: Any, reference: str) -> Iterator[Any]:
    """The parts of a schema that a JSON pointer (RFC 6901) leads to, escaped as in a URL or not."""
    pointer = reference.partition("#")[2]
    for form in {pointer, unquote(pointer)}:
        part = schema
        for step in form.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            else:
                part = part.get(key) if isinstance(part, dict) else None
        if isinstance(part, dict | list):
            yield part


def require_short_grammar(grammar: str) -> None:
    """Raise BadInput where the rules and terminals of a Lark grammar, with the schemas in it, form
    too long a chain."""
    numbers = {"": 0}  # what comes before the first rule
    chain, levels, edges = [0], [0], [list[int]()]

    def number(name: str) -> int:
        if name not in numbers:
            numbers[name] = len(chain)
            chain.append(0)
            levels.append(0)
            edges.append([])
        return numbers[name]

    owner, at, depth = 0, 0, 0
    line: list[str] = []  # the names of a line that has no colon yet
    while (token := _LARK.match(grammar, at)) is not None:
        at, kind, text = token.end(), token.lastgroup, token[0]
        if kind == "json":
            value, at = _json_value(grammar, at)
            if text == "%json" and isinstance(value, dict):
                more_references, more_levels = require_short_schema(value)
                chain[owner] += more_references
                levels[owner] += more_levels
        elif kind == "name":
            line.append(text)
            edges[owner].append(number(text))
        elif text == ":" and depth == 0 and line:
            del edges[owner][-len(line) :]
            owner = number(line[0])
            chain[owner] += 1  # a name may be given to several rules
            levels[owner] += 1
            edges[owner] += map(number, line[1:])
            line = []
        elif text == "\n":
            line = []
        elif kind == "mark":
            depth = max(0, depth + (text in _OPEN) - (text in _CLOSE))
    _require_short("the grammar", chain, levels, edges)


def _json_value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins in a grammar behind some space, and where it ends."""
    space = _SPACE.match(text, at)
    begin = at if space is None else space.end()
    try:
        return _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin  # an error that llguidance shows


def _require_short(
    what: str, chain: Sequence[int], levels: Sequence[int], edges: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """The longest chain and the levels along it. Raises BadInput where one is too long."""
    found = longest_chain(chain, edges), longest_chain(levels, edges)
    for count, most, words in (
        (found[0], MOST_CHAIN, "rules or references"),
        (found[1], MOST_LEVELS, "levels"),
    ):
        if count > most:
            raise BadInput(
                f"{what} has a chain of {count:,} {words}, each of which leads to the next one: "
                f"at most {most:,}"
            )
    return found
