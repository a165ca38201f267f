"""The settings of `--load-format mapper`, as `--model-loader-extra-config` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.expressions import Value
from mapper.messages.suggest import did_you_mean

KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "spec": (str, "an id, an architecture or a path"),
    "options": (Mapping, "an object of options of the spec"),
    "overlay": (Mapping, 'an object such as {"skip": {PATTERN: WHY}, "keep": {PATTERN: WHY}}'),
    "fallback": (bool, "true or false"),
    "report": (str, "the path of a file"),
}
OVERLAYS = ("skip", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asks for; `skips` and `keeps` are (pattern, why)."""

    spec: str | None = None
    options: Mapping[str, Value]
    skips: tuple[tuple[str, str], ...] = ()
    keeps: tuple[tuple[str, str], ...] = ()
    fallback: bool = True
    report: str | None = None


def settings_of(given: Mapping[str, object]) -> Settings:
    """Return the settings; raises MapperError M751 with everything that is wrong with them."""
    findings = [
        _finding(f"unknown setting {name!r}", did_you_mean(name, KINDS) or f"the settings are {', '.join(KINDS)}")
        for name in given
        if name not in KINDS
    ]
    for name, (kind, expected) in KINDS.items():
        if name in given and not isinstance(given[name], kind):
            findings.append(_finding(f"{name!r} is {given[name]!r}, expected {expected}"))
    if findings:
        raise MapperError(findings)
    overlay = given.get("overlay", {})
    options = given.get("options", {})
    assert isinstance(overlay, Mapping)
    assert isinstance(options, Mapping)
    for part, rules in overlay.items():
        if part not in OVERLAYS or not isinstance(rules, Mapping) or not all(map(_is_reasoned, rules.items())):
            findings.append(_finding(f"overlay has {part!r}: {rules!r}, expected {KINDS['overlay'][1]}"))
    if findings:
        raise MapperError(findings)
    spec, report = given.get("spec"), given.get("report")
    return Settings(
        spec=None if spec is None else str(spec),
        options=options,
        skips=tuple(overlay.get("skip", {}).items()),
        keeps=tuple(overlay.get("keep", {}).items()),
        fallback=bool(given.get("fallback", True)),
        report=None if report is None else str(report),
    )


def _is_reasoned(rule: tuple[object, object]) -> bool:
    pattern, why = rule
    return all(isinstance(text, str) and text.strip() for text in (pattern, why))


def _finding(problem: str, hint: str = "") -> Diagnostic:
    return finding("M751", subject="model_loader_extra_config", hint=hint, problem=problem)
