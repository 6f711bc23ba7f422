"""A user's own classes are checked before anything waits for a device: imported, and their knobs
held against their types.

Such a class may need torch, which the process that plans does without, so a child process looks at
them.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from minivllm.config import compose
from minivllm.errors import BadInput, first_line, last_frame
from minivllm.platform.children import module_path
from minivllm.platform.options import convert
from minivllm.platform.plug_ins import locate, names_class

ANSWER = "minivllm plug-ins: "  # begins the line with the answer: what is imported may print, too
SECONDS = 120.0  # for importing all of them
# knobs of other types are the class's own matter
KINDS = frozenset((int, float, str, bool, type(None)))
Node = Mapping[str, Any]


def check(settings: Mapping[str, Any]) -> None:
    """Check every class that is none of minivllm's own: those of a configuration's groups and
    knobs, and the studies.

    Raises:
        BadInput: the class cannot be imported, or a knob is none of its arguments or has another
            type.
    """
    nodes = {
        group: node
        for group, node in settings.items()
        if group in compose.GROUPS and _is_users(node)
    }
    nodes |= studies(settings)
    nodes |= _in_knobs(settings)
    if nodes and (problem := _problem(json.dumps(nodes, default=str), module_path())):
        raise BadInput(problem)


def studies(settings: Mapping[str, Any]) -> dict[str, Node]:
    """The studies of a report that a resolved configuration adds, by the keys of their knobs."""
    named = (settings.get("report") or {}).get("studies") or {}
    return {f"report.studies.{name}": node for name, node in named.items()}


def _in_knobs(settings: Mapping[str, Any]) -> dict[str, Node]:
    """The classes that knobs of groups name, by the knobs' keys: as a value, or within a list or a
    dictionary."""
    nodes: dict[str, Node] = {}
    for group in filter(settings.__contains__, compose.GROUPS):
        for name, value in settings[group].items():
            key = f"{group}.{name}"
            if isinstance(value, list):
                nodes |= {f"{key}[{i}]": node for i, node in enumerate(value)}
            elif names_class(value):
                nodes[key] = value
            elif isinstance(value, Mapping):
                nodes |= {f"{key}.{part}": node for part, node in value.items()}
    return {key: node for key, node in nodes.items() if names_class(node)}


def _is_users(node: Node) -> bool:
    target = str(node.get("_target_", ""))
    return "." in target and target not in compose.OPTIONS


@cache  # arms of a sweep have them in common
def _problem(nodes: str, path: str) -> str | None:
    """The first thing that is wrong with these groups, a JSON object; `path` is where their modules
    lie."""
    names = ", ".join(f"{group}: {node['_target_']}" for group, node in json.loads(nodes).items())
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=nodes,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return f"{names}: importing took more than {SECONDS:g} s"
    answers = [
        line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)
    ]
    if done.returncode or not answers:
        last_line = (done.stderr.strip() or "nothing").splitlines()[-1]
        return f"{names}: importing ended the process with exit code {done.returncode}: {last_line}"
    problem: str | None = json.loads(answers[-1])
    return problem


def problem_of(group: str, node: Node) -> str | None:
    """What is wrong with a group's class or knobs, as one line; None where nothing is."""
    target = str(node["_target_"])
    try:
        factory = locate(target)
        parameters = inspect.signature(factory).parameters
    except BadInput as error:
        return f"{group}: {error}"
    except Exception as error:  # somebody else's module may raise anything
        return (
            f"{group}: importing {target} raises {type(error).__name__}: {first_line(error)} "
            f"({last_frame(error)})"
        )
    hints = _hints(factory, parameters)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in node.items():
        if name == "_target_":
            continue
        if name not in parameters and not open_ended:
            return (
                f"{group}.{name}: {target} takes no such argument; "
                f"{compose.nearest(name, [*parameters])}"
            )
        try:
            if name in hints:
                convert(value, hints[name])
        except TypeError as error:
            return f"{group}.{name}={value!r} must be {error}, says {target}"
    return None


def _hints(
    factory: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """The types of its arguments that are plain; those of others, and ones that cannot be read, are
    left out."""
    names = vars(sys.modules.get(factory.__module__, object))
    hints = {}
    for name, parameter in parameters.items():
        hint = parameter.annotation
        with suppress(Exception):  # a name that exists for type checkers alone
            hint = eval(hint, dict(names)) if isinstance(hint, str) else hint
            if {*_parts(hint)} <= KINDS:
                hints[name] = hint
    return hints


def _parts(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type: itself, or those of a union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _main() -> None:
    nodes = json.load(sys.stdin)
    problems = (problem_of(group, node) for group, node in nodes.items())
    print("\n" + ANSWER + json.dumps(next(filter(None, problems), None)))


if __name__ == "__main__":
    _main()
