"""What a proof or a load has found, as data, text and JSON."""

from mapper.report.check import CheckReport, check
from mapper.report.layouts import LayoutsReport, check_layouts
from mapper.report.load import LoadReport
from mapper.report.names import NamesReport, check_names

__all__ = ["CheckReport", "LayoutsReport", "LoadReport", "NamesReport", "check", "check_layouts", "check_names"]
