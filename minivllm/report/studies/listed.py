"""The studies of a report, in the order of their sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import BadInput
from minivllm.report.inputs import ReportInputs
from minivllm.report.studies.ablation import AblationStudy
from minivllm.report.studies.agents import AgentsStudy
from minivllm.report.studies.base import Study
from minivllm.report.studies.drafts import DraftsStudy
from minivllm.report.studies.images import ImagesStudy
from minivllm.report.studies.peers import PeersStudy
from minivllm.report.studies.precision import PrecisionStudy
from minivllm.report.studies.scale_out import ScaleOutStudy
from minivllm.report.studies.scaling import ScalingStudy
from minivllm.report.studies.searches.capacity import CapacityStudy
from minivllm.report.studies.searches.tuning import TuningStudy
from minivllm.report.studies.simulation import SimulationStudy
from minivllm.report.studies.speculation import SpeculationStudy
from minivllm.report.tables import summary_table

if TYPE_CHECKING:
    from rich.table import Table

STUDIES: tuple[Study[Any], ...] = (
    AblationStudy(),
    TuningStudy(),
    CapacityStudy(),
    ScalingStudy(),
    PeersStudy(),
    ScaleOutStudy(),
    PrecisionStudy(),
    SpeculationStudy(),
    DraftsStudy(),
    AgentsStudy(),
    ImagesStudy(),
    SimulationStudy(),
)


class Finding(NamedTuple):
    """A study with what it found in the records of a report."""

    study: Study[Any]
    result: Any


def configured(config: Mapping[str, Any]) -> tuple[Study[Any], ...]:
    """The studies of a report: minivllm's own, then those that `report.studies` names.

    Raises:
        BadInput: a class cannot be imported, is no study, or does not take its knobs.
    """
    from minivllm.config import plug_ins  # with Hydra, which a report from Python does without
    from minivllm.config.compose import build

    own: list[Study[Any]] = []
    for key, node in plug_ins.studies(config).items():
        if problem := plug_ins.problem_of(key, node):
            raise BadInput(problem)
        study = build(node)
        if not isinstance(study, Study):
            raise BadInput(f"{key}: {node['_target_']} is no subclass of {Study.__module__}.Study")
        own.append(study)
    return (*STUDIES, *own)


def findings(inputs: ReportInputs, studies: Sequence[Study[Any]] = STUDIES) -> list[Finding]:
    """The studies that find something in the records, with what they found."""
    pairs = (Finding(study, study.finding(inputs)) for study in studies)
    return [pair for pair in pairs if pair.result is not None]


def leading(known: Sequence[Finding], inputs: ReportInputs) -> Finding | None:
    """The finding that answers the question of the page; None where the page is a plain sweep's."""
    return next((one for one in known if one.study.leads_page(one.result, inputs)), None)


def terminal_tables(inputs: ReportInputs, known: Sequence[Finding]) -> Iterator[Table]:
    """The terminal's tables but for the leading study's: the summary, and those of the other
    studies.

    Where a study's tables say all that these would, they alone.
    """
    for study, result in known:
        if study.replaces_summary(result, inputs):
            yield from study.tables(result, inputs)
            return
    yield summary_table(inputs.cells, inputs.columns)
    for study, result in known:
        if not study.leads_page(result, inputs):
            yield from study.tables(result, inputs)
