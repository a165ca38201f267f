"""The way back: parameters of all ranks -> the checkpoint they came from."""

from mapper.export.digest import digest_rank, digest_tensors
from mapper.export.export import ExportReport, export

__all__ = ["ExportReport", "digest_rank", "digest_tensors", "export"]
