"""What the language has and this version does not execute yet; a spec that uses it is refused by name."""

from __future__ import annotations

from mapper.compiler.expand import FlatRule
from mapper.diagnostics import MapperError, finding


def require_supported(flat: FlatRule) -> None:
    """Raise MapperError M310 for each feature that an active rule uses and that is not executed yet."""
    rule = flat.rule
    used = {"stack of several indices": len(rule.stack) > 1}
    findings = [finding("M310", place=rule.place, feature=feature) for feature, is_used in used.items() if is_used]
    if findings:
        raise MapperError(findings)
