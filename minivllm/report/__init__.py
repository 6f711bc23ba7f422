"""Records in, tables, plots and one page out. Reads nothing but records."""

from __future__ import annotations

from minivllm.report.page import build_report
from minivllm.report.precision import summary_tables
from minivllm.report.tables import summary_table

__all__ = ["build_report", "summary_table", "summary_tables"]
