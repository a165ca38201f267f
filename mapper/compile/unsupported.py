"""What the language has and this version does not execute yet; a spec that uses it is refused by name."""

from __future__ import annotations

from mapper.compile.expand import FlatRule
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.layout import Layout
from mapper.spec.model import FormatAlternative, Runtime


def require_supported(flat: FlatRule) -> None:
    """Raise MapperError M310 for each feature that an active rule uses and that is not executed yet."""
    rule = flat.rule
    shards = rule.shard.values()
    used = {
        "targets": len(rule.targets) > 1,
        "append": rule.append is not None,
        "stored": bool(rule.stored),
        "stack: {index: dim}": len(rule.stack) > 1 or any(dim is not None for _, dim in rule.stack),
        "do": bool(rule.do),
        "cast": rule.cast is not None,
        "bitcast": rule.bitcast is not None,
        "reuse": rule.reuse,
        "uneven": any(shard.uneven is not None for shard in shards),
        "pad_rank": any(shard.pad_rank is not None for shard in shards),
        "fill": any(shard.fill is not None for shard in shards),
        "bias": any(shard.bias is not None for shard in shards),
    }
    findings = [finding("M310", place=rule.place, feature=feature) for feature, is_used in used.items() if is_used]
    if findings:
        raise MapperError(findings)


def leaf_findings(alternative: FormatAlternative) -> list[Diagnostic]:
    """Return M310 for each feature of the alternative's leaves that is not executed yet."""
    return [
        finding("M310", place=leaf.place, feature=feature)
        for leaf in alternative.leaves
        for feature, is_used in {
            "dequantize": leaf.dequantize is not None,
            "cast": leaf.cast is not None,
            "bitcast": leaf.bitcast is not None,
        }.items()
        if is_used
    ]


def runtime_findings(runtime: Runtime, layout: Layout) -> list[Diagnostic]:
    """Return M310 for each feature of the runtime or the layout that is not executed yet."""
    mesh = runtime.mesh
    used = {
        "finalize": (bool(runtime.finalize), runtime.place),
        "mesh: redundant_experts": (mesh.redundant_experts is not None, mesh.place),
        "mesh: round_robin": (mesh.round_robin is not None, mesh.place),
        "redundant_experts": (layout.redundant_experts > 0, None),
        f"placement={layout.placement}": (layout.placement != "linear", None),
    }
    return [finding("M310", place=place, feature=feature) for feature, (is_used, place) in used.items() if is_used]
