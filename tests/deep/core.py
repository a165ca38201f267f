"""What the deep run is about: the core, the specs, and the tests that judge them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "evidence" / "deep.json"

CORE = (
    "mapper/pattern.py",
    "mapper/expressions.py",
    "mapper/regions.py",
    "mapper/layout.py",
    "mapper/compiler/*.py",
    "mapper/plan/*.py",
)

PENDING = ("mapper/pattern.py", "mapper/layout.py", "mapper/compiler/*.py", "mapper/plan/*.py")
"""Modules whose mutants have not all been judged since they were last changed: each leaves this list when it is judged."""

RULES = (
    "tests/test_sizes.py",
    "tests/test_families.py",
    "tests/test_disk.py",
    "tests/test_mesh.py",
    "tests/test_program.py",
    "tests/test_matching.py",
    "tests/test_targets.py",
    "tests/test_ties.py",
    "tests/test_reroot.py",
    "tests/test_operations.py",
    "tests/test_parts.py",
)
"""Quick tests of single rules, from a spec to the boxes of a plan."""

JUDGES: dict[str, tuple[str, ...]] = {
    "mapper/pattern.py": ("tests/test_pattern.py", "tests/test_conflicts.py", "tests/test_reroot.py"),
    "mapper/expressions.py": ("tests/test_expressions.py", "tests/test_expressions_messages.py", "tests/test_names.py"),
    "mapper/regions.py": ("tests/test_regions.py",),
    "mapper/layout.py": ("tests/test_layout.py", *RULES),
    "mapper/compiler/cuts.py": ("tests/test_geometry.py", *RULES),
    "mapper/compiler/conflicts.py": ("tests/test_conflicts.py", *RULES),
    "mapper/compiler/names.py": ("tests/test_names.py", *RULES),
    "mapper/compiler/resolve.py": ("tests/test_resolve.py", *RULES),
    "mapper/compiler/program.py": ("tests/test_program.py", *RULES),
    "mapper/compiler/families.py": ("tests/test_families.py", *RULES),
    "mapper/compiler/disk.py": ("tests/test_disk.py", *RULES),
    "mapper/compiler/mesh.py": ("tests/test_mesh.py", *RULES),
    "mapper/compiler/counts.py": ("tests/test_counts.py", *RULES),
    "mapper/compiler/exclusions.py": ("tests/test_exclusions.py", *RULES),
    "mapper/compiler/operations.py": ("tests/test_operations.py", *RULES),
    "mapper/compiler/options.py": ("tests/test_options.py", *RULES),
    "mapper/compiler/finalize.py": ("tests/test_finalize.py", *RULES),
    "mapper/compiler/*.py": RULES,
    "mapper/plan/geometry.py": ("tests/test_geometry.py", "tests/test_geometry_grids.py", *RULES),
    "mapper/plan/matching.py": ("tests/test_matching.py", *RULES),
    "mapper/plan/targets.py": ("tests/test_targets.py", *RULES),
    "mapper/plan/weave.py": ("tests/test_weave.py", *RULES),
    "mapper/plan/ranges.py": ("tests/test_ranges.py", *RULES),
    "mapper/plan/derived.py": ("tests/test_finalize.py", *RULES),
    "mapper/plan/digest.py": ("tests/test_digest.py",),
    "mapper/plan/*.py": RULES,
}
"""The test files that judge a module: its own first, then the few quick ones that put it to use. The first fit decides."""

TOO_SLOW = (
    "tests/test_geometry.py::test_sizes_said_to_work_are_those_that_work",
    "tests/test_session.py::test_any_order_and_any_split_give_the_bytes_and_counts_of_a_file_load",
    "tests/test_session.py::test_what_was_not_fed_is_named_at_finish_and_can_be_fed_then",
)
"""Tests in these files that would cost seconds on every mutant that lives."""

MACHINERY = ("tests/conftest.py", "tests/commands.py", "tests/loads.py", "tests/manifests.py", "tests/small.py")
"""What the judges stand on."""

TRIALS = ("tests/deep/mutants.py", "tests/deep/trial.py")
"""What makes the mutants and runs the judges."""


def paths_of(patterns: Iterable[str]) -> list[str]:
    """Return the files that the patterns name, relative to the root, in sorted order."""
    paths = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def judges_of(path: str) -> tuple[str, ...]:
    """Return the test files that judge a module of the core, in the order they run."""
    files = next(files for pattern, files in JUDGES.items() if fnmatch(path, pattern))
    return tuple(dict.fromkeys(files))


def is_too_slow(test: str) -> bool:
    """Return whether the test, with or without parameters in brackets, judges no mutant."""
    return test.split("[")[0] in TOO_SLOW


def digest_of(path: str) -> str:
    """Return a hash of all that decides which mutants of one module live: the module, its judges, and how they are run.

    The rest of the core is not in it: it has to pass the same judges, or no mutant is judged at all.
    """
    return digest_of_files((path, *judges_of(path), *MACHINERY, *TRIALS))


def digest_of_guarantees() -> str:
    """Return a hash of all that decides whether the guarantees hold: the engine, the specs, and the tests of the guarantees."""
    return digest_of_files(("mapper/**/*.py", "specs/*.yaml", "specs/configs/*.json", "tests/testing/*.py"))


def digest_of_files(patterns: Iterable[str]) -> str:
    """Return a hash of the files; blank lines and lines that are comments do not count."""
    found = hashlib.sha256()
    for path in paths_of(patterns):
        lines = map(str.rstrip, (ROOT / path).read_text(encoding="utf-8").splitlines())
        kept = [line for line in lines if not re.fullmatch(r"\s*(#.*)?", line)]
        found.update("\n".join((path, *kept, "")).encode())
    return found.hexdigest()
