"""What an engine declares in its options: what it needs, and which knobs of other groups it
supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from minivllm.errors import install
from minivllm.platform.options import Options, knob

ALL = ("*",)
# The groups that configure an engine. The others say which requests it gets and how it is measured.
ENGINE_GROUPS = (
    *("model", "quant", "pruning", "attention", "batching", "cache", "decoding", "speculative"),
    *("vision", "runtime", "parallel"),
)
# Options of quant that peers have formats of their own for.
INT8, INT4 = "minivllm.quant.int8.Int8", "minivllm.quant.int4.Int4"
FP8, NF4 = "minivllm.quant.fp8.FP8", "minivllm.quant.nf4.NF4"
NGRAM = "minivllm.extras.speculative.proposers.ngram.NgramProposer"
SEQUENTIAL = "minivllm.extras.scheduling.batching.Sequential"
INSTALL = install("peers")


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


# What several peers support of a group.
MODEL = Knobs(
    ("path", "package", "weights", "max_model_len", "seed", "architecture"),
    says="model.* but model.rope_scaling",
)
PRECISION = Knobs(("dtype",), says="quant=bf16, fp16 or fp32")
INTEGERS = Knobs(("dtype", "activations"), (INT8, INT4), "quant=bf16, fp16, fp32, int8 or int4")
SAMPLING = Knobs(("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos"))
RUNTIME = Knobs(("device", "threads"))
# What servers that are started here do.
SERVED_SAMPLING = Knobs(
    (
        *("max_tokens", "temperature", "top_p", "seed", "ignore_eos"),
        *("presence_penalty", "frequency_penalty"),
    )
)
SERVED_BATCHING = Knobs(
    ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill"),
    (SEQUENTIAL,),
    "batching=sequential, batching.max_num_seqs, max_num_batched_tokens and chunked_prefill",
)
# The knobs of an engine that is built from every group.
EVERY_KNOB: Mapping[str, Knobs] = dict.fromkeys(ENGINE_GROUPS, Knobs(ALL, ALL))


@dataclass(frozen=True)
class Support:
    """What an engine needs, and which knobs of other groups it supports: none but those that it
    declares.

    A class of the user's own has it as its attribute `support`, or inherits it from the engine that
    it is derived from. It supports the knobs of `parallel` but `tensor` only where it names them,
    as it starts its replicas itself.

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
        replicated: whether its replicas are engines that are built around it, and not the class's
            own work: a class that is derived from it has none.
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
    replicated: bool = False

    def supports(self, group: str, name: str) -> bool:
        """Whether a knob of another group may be set."""
        known = self.knobs.get(group, Knobs()).names
        return known == ALL or name in known

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


@dataclass(frozen=True)
class ServerOptions(EngineOptions):
    """What every engine has whose server is started here.

    Attributes:
        decisive: for a knob of this engine, by its name below `engine` (arguments as
            "args.some_name"), the counters of liveness ("group.name") that show its work.
    """

    decisive: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    port: int | None = knob(None, at_least=1, at_most=65535)
    """Port of the server; null: a free one."""
    start_timeout_s: float = knob(600.0, above=0)
    """Longest wait until the server is ready."""
    idle_timeout_s: float = knob(300.0, above=0)
    """Longest time without a token for any request in flight."""
    linger_s: float = knob(0.0, at_least=0)
    """Seconds that the server stays started after a measurement, for the next one with the same
    command; 0: stopped at once."""
    suspend: bool = True
    """With linger_s: suspend the processes of the server between measurements, so that they take no
    processor time."""
    max_connections: int = knob(256, at_least=1)
    """Most requests in flight; others wait in the client, which counts as latency."""
    args: dict[str, Any] | None = None
    """Further arguments of the server by their names, e.g. {enforce_eager: true}, which win over
    what is made of the other groups; null leaves one out."""
    env: dict[str, Any] | None = None
    """Further environment variables of the server."""
