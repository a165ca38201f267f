"""One mutant before its judges: a process of its own, in which a module is imported with other text than the file has."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import coverage
import hypothesis
import pytest

from tests.deep.core import CORE, ROOT, is_too_slow

SURVIVED, KILLED, BROKEN, NO_IMPORT, NOT_RUN = 0, 1, 2, 4, 5
"""Exit codes of pytest; where not even the test modules or their conftest can be imported the mutant is dead as well."""
OUT_OF_TIME = 99
VERDICTS = (SURVIVED, KILLED, BROKEN, NO_IMPORT, NOT_RUN, OUT_OF_TIME)

NUM_EXAMPLES = 60
MEMORY = 2 * 2**30
"""What a trial may take beyond what it starts with; a loop that a mutant has made endless can fill more in a second."""

PREPARED = ("numpy", "torch", "yaml", "jsonschema", "safetensors", "safetensors.torch", "hypothesis", "tqdm", "xdist")
"""What the tests import and no mutant changes: imported once, before any trial."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What one run of all judges on the unchanged core shows: who runs which line, and how long each test takes."""

    tests_by_line: Mapping[str, Mapping[int, frozenset[str]]]
    seconds: Mapping[str, float]

    def judges(self, path: str, first: int, last: int, files: Sequence[str]) -> list[str]:
        """Return the tests in `files` that run any of the lines (where none does: that run the module), quick ones first."""
        lines = self.tests_by_line.get(path, {})
        own = frozenset().union(*(tests for line, tests in lines.items() if first <= line <= last))
        tests = own or frozenset().union(*lines.values())
        chosen = [test for test in tests if test.split("::")[0] in files]
        return sorted(chosen, key=lambda test: (test.split("::")[0] != files[0], self.seconds[test]))


def prepare() -> None:
    """Import what all trials share; the package under test must not be among it."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in PREPARED:
        __import__(name)
    os.chdir(ROOT)
    hypothesis.settings.register_profile(
        "trial",
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("trial")
    loaded = [name for name in sys.modules if name.split(".")[0] == "mapper"]
    assert not loaded, f"{loaded} would be the same in every trial"


def measure(files: Sequence[str], folder: Path) -> Coverage:
    """Run all judges on the unchanged core, in a process of their own; they must pass."""
    report, log = folder / "coverage.json", folder / "coverage.log"
    code = os.waitstatus_to_exitcode(os.waitpid(in_process(partial(_measure, files, report), log), 0)[1])
    assert code == 0, f"the judges fail without any mutant:\n{log.read_text()}"
    raw = json.loads(report.read_text())
    lines = {path: {int(line): frozenset(tests) for line, tests in by_line.items()} for path, by_line in raw["lines"].items()}
    return Coverage(lines, raw["seconds"])


def _measure(files: Sequence[str], report: Path) -> int:
    measured = coverage.Coverage(data_file=None, config_file=False, include=[str(ROOT / pattern) for pattern in CORE])
    watch = _Watch(measured)
    measured.start()
    code = _pytest(files, [watch, _Quick()])
    measured.stop()
    data = measured.get_data()
    lines = {
        Path(path).relative_to(ROOT).as_posix(): {
            line: sorted(filter(None, contexts)) for line, contexts in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }
    report.write_text(json.dumps({"lines": lines, "seconds": watch.seconds}))
    return code


def judge(path: str, text: str, tests: Sequence[str], seconds: Mapping[str, float]) -> int:
    """Run the tests with other text for one module of the core; returns the exit code of pytest, or OUT_OF_TIME."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    sys.meta_path.insert(0, _Mutated(path, text))
    # File by file: most mutants are seen by the module's own tests, and the others need not be imported then.
    for file in dict.fromkeys(test.split("::")[0] for test in tests):
        code = _pytest([file], [_Chosen(tests, seconds)])
        if code != SURVIVED:
            return code
    return SURVIVED


def in_process(run: Callable[[], int], log: Path) -> int:
    """Start `run` in a process of its own; returns its id. Its exit code is what `run` returns."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        code = run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _pytest(files: Sequence[str], plugins: list[object]) -> int:
    place = Path(tempfile.mkdtemp(prefix="trial-"))
    options = ["-x", "-q", "-o", "addopts=", "--import-mode=importlib", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
    try:
        return int(pytest.main([*options, "-p", "no:xdist", f"--basetemp={place / 'tests'}", *files], plugins=plugins))
    finally:
        shutil.rmtree(place, ignore_errors=True)


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Finds one module of the core and gives it another text."""

    def __init__(self, path: str, text: str) -> None:
        self.path = str(ROOT / path)
        self.name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.text = text

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str) -> bytes:
        return self.text.encode()

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec")


class _Watch:
    """Notes the test that is running for coverage, and how long it takes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        self.seconds[item.nodeid] = 0
        result = yield
        self.measured.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration


class _Quick:
    """Leaves out the tests that are too slow to judge."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not is_too_slow(item.nodeid)]


class _Chosen:
    """Keeps the chosen tests, in their order, and ends the process when one takes far longer than it should."""

    def __init__(self, tests: Sequence[str], seconds: Mapping[str, float]) -> None:
        self.rank = {test: number for number, test in enumerate(tests)}
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.rank), key=lambda item: self.rank[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        signal.signal(signal.SIGPROF, _out_of_time)
        signal.setitimer(signal.ITIMER_PROF, 5 + 5 * self.seconds[item.nodeid])
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        return result


def _out_of_time(number: int, frame: FrameType | None) -> None:
    os._exit(OUT_OF_TIME)
