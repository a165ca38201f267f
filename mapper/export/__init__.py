"""The way back: parameters of all ranks -> the checkpoint they came from."""

from mapper.export.export import ExportReport, export

__all__ = ["ExportReport", "export"]
