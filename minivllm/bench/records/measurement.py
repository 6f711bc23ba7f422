"""One measurement to be made: one cell, one block."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm.bench.records.record import Ablation, Record
from minivllm.config.groups import Config
from minivllm.config.support import supported_settings

SIMULATED = (
    # the `_target_` of what predicts instead of measuring
    "minivllm.engines.simulated.engine.SimulatedEngine"
)
DEFAULT_ARM = "default"  # the name of an arm for which nothing was set


@dataclass(frozen=True)
class Measurement:
    """What the sweeper plans, the supervisor supervises and the worker measures; travels as JSON.

    Args:
        run_id: identifies this measurement (see identity.py).
        cell_id: identifies what is compared.
        sweep: name of the record folder under `runs_dir`.
        arm: the cell's name within its sweep.
        block: number of the repeat, from 0.
        directory: where the record goes, `<runs_dir>/<sweep>/<cell name>-<run_id>`.
        config: the resolved configuration.
        position: of the arm within its sweep; the report keeps this order, the first is the
            baseline.
        ablation: the fields of the record's `ablation`; None outside one.
    """

    run_id: str
    cell_id: str
    sweep: str
    arm: str
    block: int
    directory: str
    config: dict[str, Any]
    position: int = 0
    ablation: dict[str, Any] | None = None

    @property
    def path(self) -> Path:
        """The record directory."""
        return Path(self.directory)

    @cached_property
    def settings(self) -> Config:
        """The configuration as typed options."""
        return Config.of(self.config)

    @property
    def cell(self) -> str:
        """The readable part of the directory's name."""
        return self.path.name.removesuffix(f"-{self.run_id}")

    def record(self, status: str, **fields: Any) -> Record:
        """A record of this measurement: what is known before it is made, and the given fields."""
        return Record(
            run_id=self.run_id,
            cell_id=self.cell_id,
            sweep=self.sweep,
            arm=self.arm,
            block=self.block,
            status=status,
            config=self.config,
            position=self.position,
            ablation=Ablation(**self.ablation) if self.ablation else None,
            supported=supported_settings(self.config),
            **fields,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Measurement:
        """The inverse of `to_dict`."""
        return cls(**data)
