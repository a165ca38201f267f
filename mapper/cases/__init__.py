"""The facts that a spec pins about itself, checked without a checkpoint."""

from mapper.cases.run import CaseReport, run_cases

__all__ = ["CaseReport", "run_cases"]
