"""Checkpoints, from their headers alone; nothing here imports torch."""

from mapper.checkpoint.checkpoint import Checkpoint
from mapper.checkpoint.header import FileStamp, TensorHeader
from mapper.checkpoint.names import CheckpointNames, read_names

__all__ = ["Checkpoint", "CheckpointNames", "FileStamp", "TensorHeader", "read_names"]
