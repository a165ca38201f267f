"""Checkpoints, from their headers alone; nothing here imports torch."""

from mapper.checkpoint.checkpoint import Checkpoint
from mapper.checkpoint.header import FileStamp, TensorHeader

__all__ = ["Checkpoint", "FileStamp", "TensorHeader"]
