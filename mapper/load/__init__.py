"""Plan -> effect: `Loader` fills a model from files or from a stream, and reports; `allocate` makes an empty one."""

from mapper.export.digest import digest_tensors
from mapper.load.loader import Loader
from mapper.report.load import LoadReport
from mapper.session import UpdateSession
from mapper.transfer.bind import allocate

__all__ = ["LoadReport", "Loader", "UpdateSession", "allocate", "digest_tensors"]
