"""What a proof or a load has found, as data, text and JSON."""

from mapper.report.check import CheckReport, check
from mapper.report.load import LoadReport

__all__ = ["CheckReport", "LoadReport", "check"]
