"""What the language has and this version does not execute yet; a spec that uses it is refused by name."""

from __future__ import annotations

from mapper.compiler.expand import FlatRule
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.spec.model import Runtime


def require_supported(flat: FlatRule) -> None:
    """Raise MapperError M310 for each feature that an active rule uses and that is not executed yet."""
    rule = flat.rule
    used = {"stack of several indices": len(rule.stack) > 1}
    findings = [finding("M310", place=rule.place, feature=feature) for feature, is_used in used.items() if is_used]
    if findings:
        raise MapperError(findings)


def runtime_findings(runtime: Runtime) -> list[Diagnostic]:
    """Return M310 for each feature of the runtime that is not executed yet."""
    return [finding("M310", place=each.place, feature="finalize") for each in runtime.finalize[:1]]
