"""Options as typed objects: made from plain nodes, and the view of a configuration that has them.

A configuration is a plain dictionary where it is written, sent to another process, masked or read
from a record. Code that runs on a validated one in the same process reads it through `Config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from minivllm.config.groups import GROUPS, OPTIONS, TARGETLESS
from minivllm.config.options import RootOptions, RuntimeOptions
from minivllm.errors import BadInput, nearest
from minivllm.platform.options import type_hints, typed
from minivllm.platform.plug_ins import knobs_of

T = TypeVar("T")

ROOT = tuple(item.name for item in fields(RootOptions))  # settings outside every group


def make_options(
    cls: type[T], node: Any, path: str, owner: str | None, known: Sequence[str] | None = None
) -> T:
    """The option dataclass of a node; nested dataclasses likewise.

    Args:
        cls: the dataclass.
        node: its knobs; those that are missing take their defaults.
        path: key of the node, for messages.
        owner: the option that the knobs are of, for messages; None outside every group.
        known: names that a misspelt one may have meant; None is the knobs.

    Raises:
        BadInput: a knob is unknown, is missing or has another type; names its key.
    """
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    if not isinstance(node, Mapping):
        raise BadInput(f"{path}={node!r} must be a group of settings, e.g. {path}.{names[0]}=...")
    hints: dict[str, Any] = type_hints(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    prefix = f"{path}." if path else ""
    for name, value in node.items():
        if name not in names:
            what = f"no such option of {owner}" if owner else "no such setting"
            raise BadInput(f"{prefix}{name}: {what}; {nearest(str(name), known or names)}")
        if is_dataclass(nested := hints[name]):
            assert isinstance(nested, type)
            values[name] = make_options(nested, value, f"{prefix}{name}", f"{prefix}{name}")
        else:
            values[name] = typed(cls, name, value, f"{prefix}{name}")
    for item in fields(cls):  # type: ignore[arg-type]
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise BadInput(
                f"{prefix}{item.name} is missing: {owner} needs it, e.g. {prefix}{item.name}=..."
            )
    return cls(**values)


def plain(options: Any) -> dict[str, Any]:
    """The knobs of an option dataclass as a configuration holds them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(options).items()
    }


class Config(Mapping[str, Any]):
    """A validated configuration whose groups and sections are attributes: typed options, made once.

    The options of a user's own class, which has no dataclass, are an object with its knobs. As a
    mapping it is the plain dictionary.

    Args:
        tree: as `minivllm.config.compose.compose()` returns it. What is missing has its defaults.
    """

    runtime: RuntimeOptions

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = dict(tree)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Config:
        """The view of a configuration, which may be one already."""
        return config if isinstance(config, Config) else cls(config)

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __getattr__(self, name: str) -> Any:
        """The options of a group or section, or a setting outside all of them; kept once made."""
        node = {} if name == "tree" else self.tree.get(name, {})
        if (cls := TARGETLESS.get(name)) is not None:
            options: Any = make_options(cls, node, name, name)
        elif name in ROOT:
            present = {key: self.tree[key] for key in ROOT if key in self.tree}
            options = getattr(make_options(RootOptions, present, "", None), name)
        elif name not in self.tree:
            raise AttributeError(f"the configuration has no {name}")
        elif name not in GROUPS:
            options = node
        elif (cls := OPTIONS.get(str(node.get("_target_")))) is not None:
            options = make_options(cls, knobs_of(node), name, name)
        else:
            options = SimpleNamespace(**knobs_of(node))
        setattr(self, name, options)
        return options

    def target(self, group: str) -> str:
        """The `_target_` of a group."""
        return str(self.tree[group].get("_target_"))
