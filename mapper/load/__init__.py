"""Plan -> effect: `Loader` fills a model from files or from a stream, and reports."""

from mapper.load.loader import Loader
from mapper.report.load import LoadReport

__all__ = ["LoadReport", "Loader"]
