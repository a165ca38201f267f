"""What is derived from loaded parameters: a graph of steps, run for what changed, in place, in one order on every path."""

from mapper.finalize.functions import register
from mapper.finalize.graph import Graph, iter_targets, targets_on
from mapper.finalize.state import TargetState

__all__ = ["Graph", "TargetState", "iter_targets", "register", "targets_on"]
