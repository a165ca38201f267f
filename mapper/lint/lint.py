"""What can be found in a spec without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mapper.cases.run import CaseResult, iter_results
from mapper.diagnostics import Diagnostic
from mapper.lint.advice import doubtful_biases, doubtful_cuts
from mapper.lint.parts import unpinned_parts
from mapper.lint.programs import attempt_all, compile_findings
from mapper.lint.reach import unreached
from mapper.spec.model import Spec


def lint(spec: Spec) -> tuple[Diagnostic, ...]:
    """Return every finding about a spec that needs no checkpoint, in file order.

    The spec is compiled with every config that it is for, every runtime that the config meets, and a few layouts; its
    cases are run. Errors are wrong whatever was meant; warnings are advice.
    """
    attempts = attempt_all(spec)
    results = list(iter_results(spec))
    compiled = compile_findings(attempts)
    found = [
        *compiled,
        *_case_failures(results, compiled),
        *unpinned_parts(attempts, results),
        *doubtful_cuts(spec),
        *doubtful_biases(attempts),
        *unreached(spec, attempts),
    ]
    return tuple(sorted(dict.fromkeys(found), key=_position))


def _case_failures(results: Iterable[CaseResult], compiled: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yield what the cases have found and compiling has not."""
    known = {(each.code, each.message, each.place) for each in compiled}
    for result in results:
        yield from (each for each in result.failures if (each.code, each.message, each.place) not in known)


def _position(diagnostic: Diagnostic) -> tuple[str, int, int, str]:
    place = diagnostic.place
    return (place.file, place.line, place.column, diagnostic.code) if place else ("", 0, 0, diagnostic.code)
