"""The lengths that a row of a file of prompts has, under whichever of their usual names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from minivllm.bench.workloads.from_file.tables import Tally, short_name
from minivllm.errors import BadInput
from minivllm.platform.given import whole

# Names of the output's length, as `plain` writes them.
OUTPUT = frozenset(
    (
        *("maxtokens", "maxcompletiontokens", "maxnewtokens", "maxoutputtokens"),
        *("maxgentokens", "maxgentoks", "outputlen", "outputlength", "outputtokens"),
        *("outputtokenscount", "numoutputtokens", "outputtokencount", "expectedoutputlen"),
        *("targetoutputlen", "maxoutputlen", "npredict", "numpredict", "completiontokens"),
        *("generatedtokens", "responsetokens", "genlen", "generationlen", "generationlength"),
        *("decodelen", "osl", "completionlen", "completionlength", "numcompletiontokens"),
    )
)
# Names of the prompt's length.
INPUT = frozenset(
    (
        *("inputlen", "inputlength", "inputtokens", "inputtokenscount", "inputtokencount"),
        *("numinputtokens", "promptlen", "promptlength", "prompttokens", "prompttokenscount"),
        *("prompttokencount", "numprompttokens", "contexttokens", "requesttokens"),
        *("prefilllen", "isl"),
    )
)
# Numbers whose names look like a length of the output, though they are none of these, and of the
# input's they are not.
LOOKS_LIKE_LENGTH = re.compile(r"tok|len|predict|output|generat|complet|respons|answer|repl(y|ies)")
OTHER_LENGTH = re.compile(
    r"prompt|input|context|total|question|histor|block|vocab|penalty|id$|^min|^request"
)


def plain(key: str) -> str:
    """A key without capitals, underscores and dashes: maxTokens and max_tokens are one."""
    return re.sub(r"[\W_]", "", key).lower()


def input_len(row: dict[str, Any], where: str) -> int | None:
    """What a row says of its prompt's length; None where it says nothing.

    Raises:
        BadInput: starting with `where`: it is no length, or is given twice.
    """
    return _one(row, INPUT, where)


def output_len(row: dict[str, Any], where: str, tally: Tally) -> int | None:
    """What a row says of its output's length; None where it says nothing, and numbers of similar
    names are then counted.

    Raises:
        BadInput: starting with `where`: it is no length, or is given twice.
    """
    length = _one(row, OUTPUT, where)
    if length is None:
        for name in _lookalikes(row):
            tally.unused[
                f"lines have {name}, which is no known name of the output's length: "
                "workload.output_len is taken; name it max_tokens if it is meant"
            ] += 1
    return length


def _one(row: dict[str, Any], names: frozenset[str], where: str) -> int | None:
    given = [key for key in row if plain(key) in names and row[key] is not None]
    if len(given) > 1:
        raise BadInput(f"{where}: {' and '.join(map(short_name, given))} mean the same; give one")
    if not given:
        return None
    value = whole(row[given[0]])
    if type(value) is not int or value < 1:
        raise BadInput(
            f"{where}: {short_name(given[0])}={value!r:.60} must be a whole number of at least 1"
        )
    return value


def _lookalikes(row: dict[str, Any]) -> Iterator[str]:
    """Names of numbers that may be meant for the output's length, also those a level below."""
    for key, value in row.items():
        inner = value if isinstance(value, dict) else {}
        for name, number in (
            (key, value),
            *((f"{key}.{below}", item) for below, item in inner.items()),
        ):
            last = plain(name.rpartition(".")[2])
            known = last in OUTPUT or (
                LOOKS_LIKE_LENGTH.search(last) and not OTHER_LENGTH.search(last)
            )
            if known and type(number) in (int, float):
                yield short_name(name)
