"""Reading recorded sessions, in whichever form they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.agents.chats import read_chats
from minivllm.bench.workloads.agents.session import AgentSession
from minivllm.bench.workloads.agents.tensorrt_llm import EventReader, is_events
from minivllm.bench.workloads.agents.text import TextSpace
from minivllm.bench.workloads.agents.weka import WekaReader, is_weka
from minivllm.bench.workloads.from_file.tables import Row, json_rows
from minivllm.errors import BadInput
from minivllm.platform import untrusted

FORMATS = {"weka": is_weka, "tensorrt_llm": is_events}
CHATS = ("bailian", "mooncake")
FIELDS = {"weka": "requests and block_size", "tensorrt_llm": "events"}
MOST_FILES = 100_000
LARGEST_FILE = 512 * untrusted.MIB  # of one JSON value
LONGEST_LINE = 64 * untrusted.MIB
DEEPEST = 100  # levels of lists and objects in a session: 50 of agents
HELP = (
    "a session is a JSON object with requests and block_size (weka) or events (tensorrt_llm); "
    "lines with timestamp, input_length and output_length are of a bailian or mooncake trace"
)


def read_sessions(path: Path, format: str, knob: str) -> Iterator[AgentSession]:
    """The sessions of a file or a folder, each read when it is needed.

    Args:
        path: a folder of .json files, each with one session; a file with one, or with one a line;
            or a trace of single requests.
        format: weka (the sessions that AgentX replays), tensorrt_llm (execution traces), bailian,
            mooncake, or auto, which tells by the fields.
        knob: how messages name the path.

    Raises:
        BadInput: naming the file and, where one is to blame, the line; no session is there, or it
            is not of the format.
    """
    if format in CHATS:
        yield from read_chats(path, format, str(path))
        return
    shared, number = TextSpace(0), 0
    for where, _, row, *_ in _rows(path, knob):
        if format == "auto" and isinstance(row, dict) and "timestamp" in row:
            yield from read_chats(path, format, str(path))
            return
        known = [name for name, fits in FORMATS.items() if fits(row)]
        if format != "auto" and format not in known:
            raise BadInput(
                f"{where}: workload.format={format} needs a JSON object with {FIELDS[format]}"
            )
        if not known:
            raise BadInput(f"{where}: not a session of an agent; {HELP}")
        reader = EventReader if known[0] == "tensorrt_llm" else WekaReader
        number += 1
        if _is_deeper(row, DEEPEST):
            raise BadInput(f"{where}: agents or branches are nested too deeply")
        yield reader(row, where, TextSpace(number), shared).read()
    if not number:
        raise BadInput(f"{knob} holds no session; {HELP}")


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects of a JSON value are nested in more levels."""
    level = [value]
    for _ in range(levels):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for ones in inner for one in ones if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _rows(path: Path, knob: str) -> Iterator[Row]:
    """JSON values: one a file, or one a line."""
    if path.is_dir():
        for file in sorted(path.glob("*.json"))[:MOST_FILES]:
            yield _whole_file(file)
        return
    # One value a line, unless the first line is only the beginning of one.
    with untrusted.open_file(path, knob) as opened:
        first = opened.readline(LONGEST_LINE)
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        yield _whole_file(path)
        return
    yield from json_rows(path, knob, longest=LONGEST_LINE)


def _whole_file(path: Path) -> Row:
    name = untrusted.printable(str(path))
    return Row(name, 1, untrusted.read_json(path, name, limit=LARGEST_FILE), name)
