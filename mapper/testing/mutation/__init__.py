"""Every single change of a spec, and what finds it: a check of the structure, or evidence about the meaning."""

from mapper.testing.mutation.evidence import Evidence, pinned_cases
from mapper.testing.mutation.mutant import KINDS, Kind, Mutant
from mapper.testing.mutation.mutants import mutants_of
from mapper.testing.mutation.report import MutationReport, Outcome
from mapper.testing.mutation.run import mutate

__all__ = ["KINDS", "Evidence", "Kind", "Mutant", "MutationReport", "Outcome", "mutants_of", "mutate", "pinned_cases"]
