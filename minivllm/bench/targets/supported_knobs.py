"""Which knobs a peer engine honours, and the refusal of all others. Free of torch.

A knob that a peer cannot honour must not be set: a result under a configuration that was not run is worse than
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from typing import Any

from minivllm.config.compose import compose
from minivllm.config.groups import GROUPS, OPTIONS
from minivllm.errors import BadInput

ALL = ("*",)
# These say what is asked of the engine and how it is measured; every engine is given them.
HARNESS = ("task", "workload", "arrival", "engine", "measure")


@dataclass(frozen=True)
class Knobs:
    """What a peer honours of one group.

    Args:
        names: the knobs; ALL for every one.
        targets: `_target_`s that it can stand for besides the default option's.
        says: how messages call it; None makes it of the names.
    """

    names: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    says: str | None = None


@dataclass(frozen=True)
class Honoured:
    """The table of one peer.

    Args:
        peer: what the user chose, e.g. "engine=transformers".
        groups: by group; a group that is missing must be left at its default.
    """

    peer: str
    groups: Mapping[str, Knobs]

    def check(self, config: Mapping[str, Any]) -> None:
        """Compare a resolved configuration with the defaults.

        Args:
            config: as `minivllm.config.compose.compose` returns it; groups that it lacks are not checked.

        Raises:
            BadInput: a knob that the peer does not honour is set away from its default; names it.
        """
        standard = defaults()
        choices = config.get("choices") or {}
        for group in GROUPS:
            if group not in HARNESS and isinstance(node := config.get(group), dict):
                self._check(group, node, standard[group], choices.get(group), standard["choices"][group])

    def _check(
        self, group: str, node: Mapping[str, Any], standard: Mapping[str, Any], choice: Any, usual: Any
    ) -> None:
        knobs = self.groups.get(group, Knobs())
        target = node.get("_target_")
        if target != standard.get("_target_"):
            if target not in knobs.targets:
                raise self._refusal(group, f"{group}={choice or target}", f"{group}={usual}")
            standard = _knob_defaults(str(target))
        if knobs.names == ALL:
            return
        for name, value in node.items():
            if name == "_target_" or name in knobs.names:
                continue
            if name not in standard or value != standard[name]:
                usual_value = f"{group}.{name}={standard[name]!r}" if name in standard else f"no {name}"
                raise self._refusal(group, f"{group}.{name}={value!r}", usual_value)

    def _refusal(self, group: str, what: str, instead: str) -> BadInput:
        advice = (
            f"use {instead}" if group in self.groups else f"leave it out, {self.peer} has its own {group}"
        )
        return BadInput(f"{what} is not honoured by {self.peer}: {advice}; it honours {self.summary()}")

    def usual(self, group: str, name: str, value: Any) -> bool:
        """Whether a knob has its default, which leaves the choice to the peer where units differ."""
        return bool(value == defaults()[group].get(name))

    def summary(self) -> str:
        """What the peer honours, for messages."""
        parts = [
            knobs.says
            or (f"{group}.*" if knobs.names == ALL else ", ".join(f"{group}.{name}" for name in knobs.names))
            for group, knobs in self.groups.items()
        ]
        return ", ".join([*parts, "engine.*"])


@cache
def defaults() -> dict[str, Any]:
    """The configuration without any override, composed once."""
    return compose([])


def _knob_defaults(target: str) -> dict[str, Any]:
    """The knobs of an option that is not its group's default one, as its dataclass presets them."""
    options = OPTIONS.get(target)
    if options is None or any(
        item.default is MISSING and item.default_factory is MISSING for item in fields(options)
    ):
        return {}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(options()).items()}
