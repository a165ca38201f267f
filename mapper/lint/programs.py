"""A spec compiled with every config it is for, every runtime and a few layouts: what lint looks at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mapper.compiler import Program, compile
from mapper.diagnostics import Diagnostic, MapperError
from mapper.expressions import Value
from mapper.layout import Layout
from mapper.spec.configs import configs_for
from mapper.spec.model import Spec

LAYOUTS = (
    "", "tp=2", "tp=4", "tp=8", "pp=2", "tp=2,pp=2", "dp=2,ep=2", "tp=2,dp=2", "tp=2,dp=2,ep=4",
    "tp=4,pp=2,ep=4", "tp=8,ep=8", "tp=2,pp=2,dp=2,ep=4",
)  # fmt: skip
"""Every axis alone and together, up to eight ranks of one kind; a layout that a config cannot take is left out."""

UNMET = "M302"
UNSUPPORTED = "M310"
LAYOUT_FAULTS = frozenset({"M328", "M329", "M330", UNMET})
"""What says that a config cannot take a layout, not that the spec is wrong."""

Options = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One compile. `config` is the config's name, or its text where a case spells it; `program` is None where it failed."""

    config: str
    runtime: str
    layout: Layout
    options: Options
    program: Program | None
    findings: tuple[Diagnostic, ...]

    @property
    def is_plain(self) -> bool:
        """Whether all options have their defaults and there is one rank."""
        return not self.options and self.layout.num_ranks == 1

    @property
    def config_text(self) -> str:
        """The config as a message names it."""
        return "of a case" if self.config.startswith("{") else repr(self.config)

    def __str__(self) -> str:
        options = "".join(f", {name}={json.dumps(value)}" for name, value in self.options.items())
        return f"the config {self.config_text}, {self.runtime}, {self.layout}{options}"


@dataclass(frozen=True, slots=True)
class Attempts:
    """All compiles of a spec. `configs` are by name, or by their text where a case spells them."""

    all: tuple[Attempt, ...]
    configs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def programs(self) -> Iterator[tuple[Attempt, Program]]:
        """The compiles that succeeded."""
        return ((each, each.program) for each in self.all if each.program is not None)

    def of(self, runtime: str) -> list[Attempt]:
        return [each for each in self.all if each.runtime == runtime]


def attempt_all(spec: Spec) -> Attempts:
    """Compile a spec with its configs and those of its cases, with each boolean option turned over once.

    Several options together are taken from the cases that pin them.
    """
    configs: dict[str, Mapping[str, object]] = dict(configs_for(spec))
    configs |= {json.dumps(case.config): case.config for case in spec.cases if not isinstance(case.config, str)}
    flipped: list[Options] = [
        {name: not option.default} for name, option in spec.options.items() if isinstance(option.default, bool)
    ]
    together = [dict(case.options) for case in spec.cases if len(case.options) > 1]
    flipped += [options for at, options in enumerate(together) if options not in together[:at]]
    attempts = [
        _attempt(spec, name, config, runtime, Layout.parse(text), options)
        for name, config in configs.items()
        for runtime in spec.runtimes
        for options in ({}, *flipped)
        for text in (LAYOUTS if not options else LAYOUTS[:2])
    ]
    return Attempts(tuple(attempts), configs)


def compile_findings(attempts: Attempts) -> list[Diagnostic]:
    """Return what compiling has found, each finding once, with the first config and layout that show it."""
    seen: dict[Diagnostic, list[Attempt]] = {}
    for attempt in attempts.all:
        for each in attempt.findings:
            if not _is_expected(each, attempt):
                seen.setdefault(each, []).append(attempt)
    return [_with_first(each, found) for each, found in seen.items()]


def _attempt(spec: Spec, name: str, config: Mapping[str, object], runtime: str, layout: Layout, options: Options) -> Attempt:
    try:
        program = compile(spec, config=config, runtime=runtime, layout=layout, options=options)
    except MapperError as error:
        return Attempt(name, runtime, layout, options, None, error.diagnostics)
    return Attempt(name, runtime, layout, options, program, ())


def _is_expected(diagnostic: Diagnostic, attempt: Attempt) -> bool:
    """Whether the finding says only that a config does not fit a layout, or that an option is not executed yet."""
    if diagnostic.code == UNSUPPORTED:
        return bool(attempt.options)
    if diagnostic.code not in LAYOUT_FAULTS:
        return False
    return diagnostic.code == UNMET or attempt.layout.num_ranks > 1


def _with_first(diagnostic: Diagnostic, found: Sequence[Attempt]) -> Diagnostic:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    where = f"found with {found[0]}{more}"
    return replace(diagnostic, hint=f"{diagnostic.hint}; {where}" if diagnostic.hint else where)
