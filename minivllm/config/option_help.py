"""What --help prints: all groups with their options, or the knobs of the options that the command
chooses."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf

from minivllm.config.groups import GROUPS, LLM_ROOT, ROOT, conf_dir
from minivllm.config.option_files import SCHEME, option_class
from minivllm.platform.described import field_words
from minivllm.platform.options import filled, type_hints

_LINE = re.compile(r"^(?P<indent> *)(?P<key>[\w.]+):(?P<value>.*)$")
ABOUT = {
    **GROUPS,
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
    explained = [_option(group, option) for group, option in chosen if _source(group, option)]
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
    roots = (OmegaConf.load(conf_dir() / f"{name}.yaml") for name in (LLM_ROOT, ROOT))
    items = (item for root in roots for item in root.defaults if OmegaConf.is_dict(item))
    first = {name: option for item in items for name, option in item.items()}
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


def _source(group: str, option: str) -> ConfigSource | None:
    """The folder of an option: the first in the search path."""
    sources = _loader().repository.get_sources()
    folders = (source for source in sources if source.scheme() in ("file", SCHEME))
    return next((one for one in folders if one.is_config(f"{group}/{option}")), None)


def _option(group: str, option: str) -> str:
    """An option: what it is, and each of its knobs with its default and sentence."""
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
    """An option's first comment, and its knobs as dotted key -> (value, sentence); what it starts
    from comes first. A comment in the file goes before the sentence of the class."""
    source = _source(group, option)
    assert source is not None
    path = f"{group}/{option}"
    content = Path(source.path, f"{path}.yaml").read_text(encoding="utf-8")
    lines = content.splitlines()
    head = [
        line.lstrip("# ")
        for line in lines[: next((i for i, x in enumerate(lines) if x[:1] != "#"), len(lines))]
    ]
    about = " ".join(line for line in head if not line.startswith("@package"))
    loaded = source.load_config(path)
    values: Any = OmegaConf.to_container(loaded.config, resolve=False)
    cls = option_class(group, values)
    inside = "" if loaded.header["package"] is None else f"{group}."  # of an ablation
    sentences = (
        {} if cls is None else {f"{inside}{key}": str(k) for key, k in declared(cls).items()}
    )
    knobs: dict[str, tuple[str, str]] = {}
    for base in values.pop("defaults", ()):
        if isinstance(base, str) and base != "_self_" and _source(group, base):
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
                knobs[chosen] = written(name), comment[1] if comment else sentences.get(place, "")
    comments = _comments(lines)
    for key, value in _flat(values, {} if cls is None else filled(cls, {})):
        knobs[key] = value, comments.get(key) or sentences.get(key) or knobs.get(key, ("", ""))[1]
    return about, knobs


class Knob(NamedTuple):
    """What an option dataclass declares of a knob, beside its default."""

    sentence: str  # what it is
    values: str  # its choices or its range; "" where its type says all

    def __str__(self) -> str:
        return f"{self.sentence} ({self.values})" if self.values else self.sentence


@cache
def declared(cls: type) -> dict[str, Knob]:
    """The knobs of an option dataclass by their dotted names. A class that declares a knob again
    inherits its sentence."""
    words: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(base):
            words |= {name: found.description for name, found in field_words(base).items()}
    knobs: dict[str, Knob] = {}
    for item in fields(cls):
        hint = type_hints(cls)[item.name]
        knobs[item.name] = Knob(words.get(item.name, ""), _values(hint, item.metadata))
        if is_dataclass(hint):
            assert isinstance(hint, type)
            knobs |= {f"{item.name}.{name}": knob for name, knob in declared(hint).items()}
    return knobs


def _values(hint: Any, rules: Mapping[str, Any]) -> str:
    """The choices of a knob, or its range."""
    arms = [arm for arm in get_args(hint) if arm is not NoneType]
    if get_origin(hint) is Literal or (arms and all(get_origin(arm) is Literal for arm in arms)):
        choices = get_args(hint) if get_origin(hint) is Literal else get_args(arms[0])
        return ", ".join(map(written, choices))
    limits = (("at least", "at_least"), ("above", "above"), ("at most", "at_most"))
    given = [(words, rules[rule]) for words, rule in limits if rules.get(rule) is not None]
    return ", ".join(
        f"{words} {limit:,}" if isinstance(limit, int) else f"{words} {limit:g}"
        for words, limit in given
    )


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


def _flat(
    values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, str]]:
    """Dotted keys with their values, as one writes them on the command line. A distribution that is
    a knob's default stays whole."""
    leaves: list[tuple[str, str]] = []
    for key, value in values.items():
        whole = "distribution" in value if isinstance(value, dict) else True
        if (whole and value == defaults.get(key)) or not isinstance(value, dict) or not value:
            leaves.append((f"{prefix}{key}", written(value)))
        else:
            leaves += _flat(value, {}, f"{prefix}{key}.")
    return leaves


def written(value: Any) -> str:
    """A value as one writes it on the command line; a long dictionary is cut."""
    if isinstance(value, dict) and value:
        given = (f"{key}: {written(item)}" for key, item in value.items() if item is not None)
        return textwrap.shorten(f"{{{', '.join(given)}}}", 60, placeholder=" ...}")
    return value if isinstance(value, str) else json.dumps(value, default=str)
