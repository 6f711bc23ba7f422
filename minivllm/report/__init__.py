"""Records in, tables, plots and one page out. Reads nothing but records."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.report.material import read
    from minivllm.report.page import build_report, write_report
    from minivllm.report.studies.precision import summary_tables
    from minivllm.report.tables import summary_table

__all__ = ["build_report", "read", "summary_table", "summary_tables", "write_report"]

_HOMES = {
    "build_report": "minivllm.report.page",
    "write_report": "minivllm.report.page",
    "read": "minivllm.report.material",
    "summary_table": "minivllm.report.tables",
    "summary_tables": "minivllm.report.studies.precision",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the analysis of an ablation reads cells without the page."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
