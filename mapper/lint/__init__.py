"""What can be found in a spec without a checkpoint: overlaps, failed cases, doubtful rules."""

from mapper.lint.lint import lint

__all__ = ["lint"]
