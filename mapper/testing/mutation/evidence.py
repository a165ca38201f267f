"""Evidence about the meaning of a spec: what is pinned by hand, or recorded from an engine; never what follows from names and
shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mapper.cases.run import EVIDENCE, KINDS, iter_results
from mapper.spec.model import Spec

Failures = Callable[[Spec, Sequence[str]], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One kind of evidence. `failures` gives what speaks against a spec in the named runtimes, one sentence each.

    It is read only up to the first sentence, so a generator saves work. A spec that does not compile has no failures here:
    that is for the structure to find.
    """

    name: str
    failures: Failures


def pinned_cases(spec: Spec) -> Evidence:
    """Return the evidence of a spec's own cases."""

    def failures(mutant: Spec, runtimes: Sequence[str]) -> Iterator[str]:
        cases = tuple(case for case in spec.cases if case.runtime in runtimes)
        for result in iter_results(replace(mutant, cases=cases)):
            for each in result.failures:
                if each.code in KINDS:
                    yield f"{each.place}: {each.message}"

    return Evidence(EVIDENCE, failures)
