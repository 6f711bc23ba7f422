"""What --help prints: all groups with their options, or the knobs of the options that the command
chooses."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from minivllm.config import compose

_LINE = re.compile(r"^(?P<indent> *)(?P<key>[\w.]+):(?P<value>.*)$")
ABOUT = {
    **compose.GROUPS,
    "preset": "overrides that go together",
    "ablation": "what is each optimisation worth? added with a plus: +ablation=leave_one_out",
    "optimisations": "the list that an ablation is about",
}


def text(header: str, footer: str, arguments: Sequence[str]) -> str:
    """The page of --help.

    Args:
        header, footer: around the list of all groups.
        arguments: of the command; options that they choose are explained in place of all groups.
    """
    chosen = [
        match.groups()
        for text in arguments
        if (match := re.fullmatch(r"\+?([\w/]+)=([\w-]+)", text))
    ]
    explained = [_option(group, option) for group, option in chosen if _files(group, option)]
    if explained:
        # the page is a template, in which $ begins a name
        return "\n\n".join(explained).replace("$", "$$")
    return (
        f"{header}\n"
        "Groups (group=option; the first named is the default)\n"
        "\n"
        f"{_groups()}\n"
        "\n"
        f"{footer}"
    )


def _loader() -> Any:
    return cast(Any, GlobalHydra.instance().config_loader())


def _groups() -> str:
    defaults = OmegaConf.load(compose.conf_dir() / "config.yaml").defaults
    first = {
        name: option
        for item in defaults
        if OmegaConf.is_dict(item)
        for name, option in item.items()
    }
    # The loader's own get_group_options copies all that it has read, for each group.
    files = _loader().repository
    names = list(ABOUT) + [n for n in _loader().list_groups("") if n not in ABOUT and n != "hydra"]
    lines = []
    for name in names:
        options = sorted(
            files.get_group_options(name), key=lambda option: (option != first.get(name), option)
        )
        indent = " " * 14
        lines.append(f"  {name + ' ':<12}{ABOUT.get(name, '')}".rstrip())
        lines += textwrap.wrap(
            ", ".join(options), 100, initial_indent=indent, subsequent_indent=indent
        )
    return "\n".join(lines)


def _files(group: str, option: str) -> list[Path]:
    """The files of an option, in the order of the search path: the first one counts."""
    sources = [source for source in _loader().repository.get_sources() if source.scheme() == "file"]
    paths = (Path(source.path, group, f"{option}.yaml") for source in sources)
    return [path for path in paths if path.is_file()]


def _option(group: str, option: str) -> str:
    """An option: what it is, and each of its knobs with its default and comment."""
    about, knobs = _knobs(group, option)
    head = f"{group}={option}" + (f": {about}" if about else "")
    target = knobs.pop("_target_", ("", ""))[0]
    width = max((len(f"{group}.{key}={value}") for key, (value, _) in knobs.items()), default=0)
    width, room = min(width, 44), max(60, shutil.get_terminal_size((120, 24)).columns)
    prefix = "" if group in ("preset", "ablation") else f"{group}."
    lines = textwrap.wrap(head, room) + ([f"  {target}"] if target else [])
    for key, (value, comment) in knobs.items():
        left = f"  {'' if '@' in key else prefix}{key}={value}"
        wrapped = textwrap.wrap(comment, max(30, room - width - 5)) or [""]
        lines.append(f"{left:<{width + 4}} {wrapped[0]}".rstrip())
        lines += [" " * (width + 5) + line for line in wrapped[1:]]
    others = [name for name in _loader().repository.get_group_options(group) if name != option]
    if others:
        lines += textwrap.wrap(
            f"Other options of {group}: {', '.join(sorted(others))}", room, subsequent_indent="  "
        )
    return "\n".join(lines)


def _knobs(group: str, option: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """An option's first comment, and its knobs as dotted key -> (value, comment); what it starts
    from comes first."""
    content = _files(group, option)[0].read_text(encoding="utf-8")
    lines = content.splitlines()
    head = [
        line.lstrip("# ")
        for line in lines[: next((i for i, x in enumerate(lines) if x[:1] != "#"), 0)]
    ]
    about = " ".join(line for line in head if not line.startswith("@package"))
    values = yaml.safe_load(content) or {}
    knobs: dict[str, tuple[str, str]] = {}
    for base in values.pop("defaults", ()):
        if isinstance(base, str) and base != "_self_" and _files(group, base):
            knobs.update(_knobs(group, base)[1])
        elif isinstance(base, dict):  # a preset's: "override /workload": "chat"
            for key, name in base.items():
                chosen, _, place = str(key).split()[-1].lstrip("/").partition("@")
                if place:  # an option of another group in a knob: "/quant@quant": "int4"
                    chosen = f"{chosen}@{group}.{place}"
                    values.pop(place, None)
                comment = re.search(
                    rf"- {re.escape(str(key))}:.*?\s# ?(.*)$", content, re.MULTILINE
                )
                knobs[chosen] = _written(name), comment[1] if comment else ""
    comments = _comments(lines)
    for key, value in _flat(values):
        knobs[key] = (value, comments.get(key) or knobs.get(key, ("", ""))[1])
    return about, knobs


def _comments(lines: Sequence[str]) -> dict[str, str]:
    """The comment at the end of each key's line, by dotted key."""
    comments: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # indentation and key of what a line lies in
    for line in lines:
        if (match := _LINE.match(line)) is None:
            continue
        indent = len(match["indent"])
        above = [(depth, key) for depth, key in above if depth < indent] + [(indent, match["key"])]
        comment = re.search(r"\s# ?(.*)$", match["value"])
        if comment:
            comments[".".join(key for _, key in above)] = comment[1]
    return comments


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys with their values, as one writes them on the command line."""
    leaves: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            leaves += _flat(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", _written(value)))
    return leaves


def _written(value: Any) -> str:
    """A value as one writes it on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
