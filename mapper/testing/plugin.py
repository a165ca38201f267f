"""The pytest plug-in: `pytest --mapper-spec specs/*.yaml` makes a test of every spec, runtime and guarantee.

It is found through the entry point `pytest11`; nothing of it runs without the option. `--mapper-profile dev|ci|deep` says
how long (default: MAPPER_PROFILE, or dev).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

OPTION = "--mapper-spec"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("mapper", "specs of mapper")
    group.addoption(OPTION, nargs="+", default=[], metavar="SPEC.yaml", help="check the guarantees of these specs")
    group.addoption("--mapper-profile", choices=("dev", "ci", "deep"), help="how many examples: seconds, minutes, or long")


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest collect the specs: beside the paths on the command line, or in place of the default ones."""
    specs = config.getoption(OPTION)
    if not specs:
        return
    if profile := config.getoption("--mapper-profile"):
        os.environ["MAPPER_PROFILE"] = profile
    given = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args = [*given, *(spec for spec in specs if spec not in given)]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> SpecFile | None:
    """Collect a file that `--mapper-spec` names."""
    named = {(parent.config.invocation_params.dir / each).resolve() for each in parent.config.getoption(OPTION)}
    if file_path.resolve() not in named:
        return None
    collector: SpecFile = SpecFile.from_parent(parent, path=file_path)
    return collector


class SpecFile(pytest.File):
    """One spec: lint, its cases, and each guarantee of each runtime."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the tests; a spec that cannot be read is one failing test, `lint`."""
        from mapper import MapperError, load_spec
        from mapper.testing.run import GUARANTEES

        yield SpecItem.from_parent(self, name="lint", check=self._lint)
        try:
            spec = load_spec(str(self.path))
        except MapperError:
            return
        yield SpecItem.from_parent(self, name="cases", check=self._cases)
        for runtime in spec.runtimes:
            for guarantee in GUARANTEES:
                yield SpecItem.from_parent(self, name=f"{runtime}::{guarantee}", check=self._guarantee(runtime, guarantee))

    def _lint(self) -> None:
        from mapper import MapperError, load_spec
        from mapper.lint import lint

        findings = [each for each in lint(load_spec(str(self.path))) if each.severity == "error"]
        if findings:
            raise MapperError(findings)

    def _cases(self) -> None:
        from mapper import MapperError, load_spec
        from mapper.cases import run_cases

        report = run_cases(load_spec(str(self.path)))
        if report.failures:
            raise MapperError(report.failures)

    def _guarantee(self, runtime: str, guarantee: str) -> Callable[[], None]:
        def check() -> None:
            from mapper import load_spec
            from mapper.testing.run import run_guarantee

            outcome = run_guarantee(load_spec(str(self.path)), runtime, guarantee)
            if not outcome.checked:
                pytest.skip(f"nothing to check: {'; '.join(outcome.refused)}")

        return check


class SpecItem(pytest.Item):
    """One check of a spec."""

    def __init__(self, *, check: Callable[[], None], **keywords: Any) -> None:
        super().__init__(**keywords)
        self._check = check

    def runtest(self) -> None:
        """Run the check."""
        self._check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """Return the finding, or what broke and on which example, without the engine's own frames."""
        notes = "\n".join(getattr(excinfo.value, "__notes__", ()))
        return f"{type(excinfo.value).__name__}: {excinfo.value}\n{notes}".rstrip()

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the place that pytest shows."""
        return self.path, 0, f"{self.path.name}::{self.name}"
