"""What one rank does, rule by rule: sources, targets, boxes and bytes, as data, text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program
from mapper.diagnostics import Diagnostic, Place, as_objects, render_findings
from mapper.folding import fold
from mapper.ops.dtypes import num_bytes
from mapper.pattern import IndexValue, Template
from mapper.plan.geometry import Piece
from mapper.plan.local import padding_of, read_boxes
from mapper.plan.plan import LocalFamily, Plan, Step, iter_steps, target_names
from mapper.regions import Box, shape_of, spell, volume


@dataclass(frozen=True, slots=True)
class PlannedSources:
    """The sources of one part: their names folded, how many there are, and the boxes that each one gives.

    A box is (of the source, of the target); a stacked target's box leaves out the slot, and both are empty where the
    whole tensor goes over.
    """

    names: tuple[str, ...]
    count: int
    boxes: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class PlannedRule:
    """What one rule and leaf does on this rank, for targets of one dtype and shape.

    `num_slots` is the size of a stacked target's leading axis; `num_bytes` are those of all targets together, and
    `num_bytes_read` those that are read for them: the boxes, or all of each source where an operation `reads_whole`.
    """

    rule: str
    place: Place
    leaf: str
    targets: tuple[str, ...]
    num_targets: int
    dtype: str
    shape: tuple[int, ...]
    num_slots: int | None
    num_bytes: int
    num_bytes_read: int
    sources: tuple[PlannedSources, ...]
    padding: tuple[Box, ...]
    do: tuple[str, ...] = ()
    reads_whole: bool = False


@dataclass(frozen=True, slots=True)
class PlannedTotals:
    """Counts and bytes of one rank."""

    sources: int
    loaded: int
    elsewhere: int
    skipped: int
    targets: int
    tied: int
    bytes: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The plan of one rank. `ties` are (target, twin); `skipped_by` counts per rule; `steps` is None unless asked for."""

    ok: bool
    spec: str
    runtime: str
    layout: str
    rank: int
    rules: tuple[PlannedRule, ...]
    ties: tuple[tuple[str, str], ...]
    skipped_by: Mapping[str, int]
    totals: PlannedTotals
    steps: tuple[Step, ...] | None
    findings: tuple[Diagnostic, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        return {
            **{name: getattr(self, name) for name in ("ok", "spec", "runtime", "layout", "rank")},
            "rules": [_rule_object(each) for each in self.rules],
            "ties": [list(each) for each in self.ties],
            "skipped_by": dict(self.skipped_by),
            "totals": asdict(self.totals),
            **({} if self.steps is None else {"steps": [_step_object(each) for each in self.steps]}),
            "findings": as_objects(self.findings),
        }

    def to_text(self) -> str:
        """Return the report for a person."""
        totals = self.totals
        lines = render_findings(self.findings)
        lines.append(f"{self.spec} {self.runtime} on {self.layout}, rank {self.rank}")
        for rule in self.rules:
            lines += [f"  {line}" for line in _rule_lines(rule)]
        lines += [f"  {name} = {twin} (tied)" for name, twin in self.ties]
        if self.steps is not None:
            lines += [f"  {step.source}{_box(step.source_box)} -> {step.target}{_box(step.target_box)}" for step in self.steps]
        lines += [
            f"  sources  {totals.sources:,}: {totals.loaded:,} loaded, {totals.elsewhere:,} elsewhere, "
            f"{totals.skipped:,} skipped",
            *(f"           {count:,} skipped by {rule}" for rule, count in self.skipped_by.items() if count),
            f"  targets  {totals.targets:,}" + (f", {totals.tied:,} tied" if totals.tied else ""),
            f"  bytes    {totals.bytes:,} held, {totals.bytes_read:,} read",
        ]
        return "\n".join(lines)


def describe_plan(program: Program, checkpoint: Checkpoint, *, has_steps: bool = False) -> PlanReport:
    """Return what the program's rank does with the checkpoint; findings are in the report and not raised."""
    matching = program.match(checkpoint)
    plan = program.assemble(matching, checkpoint.tensors)
    rules = tuple(rule for local in plan.families for rule in _planned_rules(local, plan))
    ties = tuple((each.name, each.tied_to) for each in plan.targets.values() if each.tied_to is not None)
    loaded = plan.num_loaded
    totals = PlannedTotals(
        sources=matching.num_sources,
        loaded=loaded,
        elsewhere=matching.num_claimed - loaded,
        skipped=len(matching.skipped),
        targets=len(plan.targets),
        tied=len(ties),
        bytes=plan.num_bytes,
        bytes_read=sum(rule.num_bytes_read for rule in rules),
    )
    return PlanReport(
        not plan.findings,
        program.spec.id,
        program.runtime,
        str(program.layout),
        plan.rank,
        rules,
        ties,
        matching.skipped_by,
        totals,
        tuple(plan.steps()) if has_steps else None,
        plan.findings,
    )


def _planned_rules(local: LocalFamily, plan: Plan) -> Iterator[PlannedRule]:
    """Yield the family once per dtype and shape; a family with stated dims and one dtype is one."""
    family = local.matched.family
    kinds: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in target_names(local):
        target = plan.targets[name]
        kinds.setdefault((target.dtype, target.shape), []).append(name)
    steps: dict[str, list[Step]] | None = None
    if len(kinds) > 1 or local.matched.absent or local.matched.incomplete:
        steps = {}
        for step in iter_steps(local):
            steps.setdefault(step.target, []).append(step)
    for (dtype, shape), names in kinds.items():
        sources = _planned_sources(local) if steps is None else _listed_sources(local, steps, names)
        volume_of_whole = num_bytes(dtype, shape) if dtype else 0
        yield PlannedRule(
            rule=family.rule.text,
            place=family.rule.place,
            leaf=family.leaf,
            targets=tuple(map(str, fold(names))),
            num_targets=len(names),
            dtype=dtype,
            shape=shape,
            num_slots=_num_slots(local),
            num_bytes=num_bytes(dtype, shape) * len(names) if dtype else 0,
            num_bytes_read=sum(_bytes_read(local, each, dtype, volume_of_whole) for each in sources) if dtype else 0,
            sources=sources,
            padding=_padding(local),
            do=family.do,
            reads_whole=any(each.reads_whole for each in family.values),
        )


def _num_slots(local: LocalFamily) -> int | None:
    """Return the size of the leading axis that a stacked index makes, or None where there is none."""
    is_leading = local.shape is not None and local.shape.slots is not None and local.matched.family.stack_axis is None
    return len(local.shape.slots or ()) if local.shape is not None and is_leading else None


def _padding(local: LocalFamily) -> tuple[Box, ...]:
    return () if local.shape is None else tuple(box for box, _ in padding_of(local.matched.family, local.shape))


def _bytes_read(local: LocalFamily, sources: PlannedSources, dtype: str, whole: int) -> int:
    family = local.matched.family
    if any(each.reads_whole for each in family.values):
        disk = local.matched.sources[0].disk
        assert disk is not None, "an operation over a dim has dims"
        return sources.count * len(sources.boxes) * num_bytes(dtype, disk.shape)
    boxes = (box for piece in sources.boxes for box in (read_boxes(piece) if piece.source else [None]))
    return sources.count * sum(whole if box is None else num_bytes(dtype, shape_of(box)) for box in boxes)


def _planned_sources(local: LocalFamily) -> tuple[PlannedSources, ...]:
    stack = local.matched.family.stack
    values: dict[str, Sequence[IndexValue]] = dict(local.values)
    if stack is not None and local.shape is not None and local.shape.slots is not None:
        values[stack] = local.shape.slots
    planned = []
    for source, boxes in zip(local.matched.sources, local.pieces, strict=True):
        if boxes or local.shape is None:
            count = 1
            for index in source.template.indices:
                count *= len(values[index])
            whole = (Piece((), ()),)
            planned.append(PlannedSources((_spell(source.template, values),), count, boxes or whole))
    return tuple(planned)


def _listed_sources(
    local: LocalFamily, steps: Mapping[str, Sequence[Step]], names: Sequence[str]
) -> tuple[PlannedSources, ...]:
    """Return the sources of some of the family's targets, from their steps."""
    is_stacked = _num_slots(local) is not None
    groups: dict[tuple[Piece, ...], dict[str, None]] = {}
    for name in names:
        by_source: dict[str, list[Piece]] = {}
        for step in steps.get(name, ()):
            box = step.target_box[1:] if is_stacked else step.target_box
            by_source.setdefault(step.source, []).append(Piece(step.source_box, box, step.weaves))
        for source, boxes in by_source.items():
            groups.setdefault(tuple(boxes), {})[source] = None
    return tuple(PlannedSources(tuple(map(str, fold(found))), len(found), boxes) for boxes, found in groups.items())


def _spell(template: Template, values: Mapping[str, Sequence[IndexValue]]) -> str:
    """Return the names of the template at `values` as one text."""
    parts = []
    for segment in template.segments:
        assert not isinstance(segment, str), "a source has no wildcards"
        allowed = [set(values[index]) for index in segment.indices]
        texts = [
            text
            for text, own in segment.texts.items()
            if all(value in choices for value, choices in zip(own, allowed, strict=True))
        ]
        folds = list(map(str, fold(texts)))
        parts.append(folds[0] if len(folds) == 1 else f"{{{', '.join(folds)}}}")
    return ".".join(parts)


def _step_object(step: Step) -> dict[str, object]:
    return {name: getattr(step, name) for name in ("source", "source_box", "target", "target_box")}


def _rule_lines(rule: PlannedRule) -> list[str]:
    count = f"{rule.num_targets:,} targets, " if rule.num_targets != 1 else ""
    lines = [f"{', '.join(rule.targets)}  {rule.dtype} {list(rule.shape)}  {count}{rule.num_bytes:,} bytes  ({rule.place})"]
    slots = "" if rule.num_slots is None else "0" if rule.num_slots == 1 else f"{{0...{rule.num_slots - 1}}}"
    for source in rule.sources:
        for piece in source.boxes:
            box = ", ".join(filter(None, [slots, spell(piece.target)[1:-1]]))
            to = f"[{box}]" if box else "all of it"
            runs = f" (in {len(read_boxes(piece)):,} runs)" if len(read_boxes(piece)) > 1 else ""
            lines.append(f"  {', '.join(source.names)}{_box(piece.source)} -> {to}{runs}")
    lines += [f"  padding {_box(box)}" for box in rule.padding if volume(box)]
    lines += [f"  do {each}" for each in rule.do]
    if rule.reads_whole:
        lines.append(f"  reads every source whole: {rule.num_bytes_read:,} bytes")
    return lines


def _box(box: Box) -> str:
    return spell(box) if box else ""


def _rule_object(rule: PlannedRule) -> dict[str, object]:
    return {
        "rule": rule.rule,
        "place": str(rule.place),
        "leaf": rule.leaf,
        "targets": list(rule.targets),
        "num_targets": rule.num_targets,
        "dtype": rule.dtype,
        "shape": list(rule.shape),
        "num_slots": rule.num_slots,
        "bytes": rule.num_bytes,
        "bytes_read": rule.num_bytes_read,
        "sources": [
            {
                "names": list(each.names),
                "count": each.count,
                "boxes": [{"source": piece.source, "target": piece.target} for piece in each.boxes],
            }
            for each in rule.sources
        ],
        "padding": list(rule.padding),
        **({"do": list(rule.do), "reads_whole": rule.reads_whole} if rule.do else {}),
    }
