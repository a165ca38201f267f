"""A program's families against a checkpoint's headers, once for all ranks.

Names are instantiated by index and looked up; what is left over is skipped by a named rule or unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product

from mapper.checkpoint import TensorHeader
from mapper.diagnostics import Diagnostic, finding
from mapper.ops.dtypes import BITS, COMPUTED_DTYPES, torch_name
from mapper.pattern import IndexValue, instantiate
from mapper.plan.family import Axis, DiskLayout, Family, SkipRule, SourceFamily

Combination = tuple[IndexValue, ...]

NAME_ONLY = TensorHeader("", (), -1, 0, 0)
"""The header of a tensor of which only the name is known: neither its shape nor its dtype is judged."""

MAX_SUGGESTIONS = 50
"""Near names are searched for at most this many findings; the search is slow and a broken checkpoint has thousands."""


@dataclass(frozen=True, slots=True)
class MatchedFamily:
    """A family with the spelling that the checkpoint has.

    `absent` holds the targets (as values of the target's indices) whose optional sources are not there, `incomplete`
    those that lack a required source. `headers` is one header per distinct (dtype, shape) of the targets' sources, by
    target; a single entry under `()` serves all targets. `found` has, per source, the header of each of its names in the
    order of `source_names`.
    """

    family: Family
    sources: tuple[SourceFamily, ...]
    absent: frozenset[Combination]
    incomplete: frozenset[Combination]
    headers: Mapping[Combination, TensorHeader]
    found: tuple[list[TensorHeader | None], ...] = field(default=(), repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether every source of every target is there."""
        return not self.absent and not self.incomplete

    def header(self, combination: Combination) -> TensorHeader | None:
        """Return a header that has the target's dtype and, where no dims are stated, its shape."""
        return self.headers.get(()) or self.headers.get(combination)


@dataclass(frozen=True, slots=True)
class Matching:
    """The whole checkpoint accounted for: families, skipped names by rule, unknown names, and all findings."""

    families: tuple[MatchedFamily, ...]
    skipped: Mapping[str, SkipRule]
    skipped_by: Mapping[str, int]
    unknown: tuple[str, ...]
    num_sources: int
    num_claimed: int
    findings: tuple[Diagnostic, ...]


def match(
    families: Sequence[Family],
    skips: Sequence[SkipRule],
    tensors: Mapping[str, TensorHeader],
    *,
    chosen: Mapping[int, int] | None = None,
    owned: Set[str] = frozenset(),
) -> Matching:
    """Return how `tensors` are accounted for by `families` and `skips`.

    `chosen` is the alternative taken per rule where `tensors` do not show it: those of one rank, or of one update. `owned`
    are names whose owning rule is not in `families`: it lives on another rank.
    """
    chosen = {**_choose_alternatives(families, tensors), **(chosen or {})}
    matched: list[MatchedFamily] = []
    claimed: set[str] = set()
    reread: set[str] = set()
    superseded: dict[str, SkipRule] = {}
    missing: list[Diagnostic] = []
    wrong: list[Diagnostic] = []
    for family in families:
        if family.tie is not None:
            matched.append(MatchedFamily(family, (), frozenset(), frozenset(), {}))
            continue
        alternative = family.alternatives[chosen[family.rule.number]]
        matched.append(_match_family(family, alternative, tensors, claimed, reread, missing, wrong))
        if family.skips_others:
            superseded.update(_other_spellings(family, alternative, tensors))
    claimed |= reread & owned
    owned_by_none = sorted(reread - claimed)
    wrong += [finding("M509", subject=name, name=name) for name in owned_by_none]
    left = [name for name in tensors if name not in claimed] if len(claimed) < len(tensors) else []
    skipped, unknown = _classify(left, skips, superseded)
    wrong += _unlike_copies(skipped, tensors, {each.subject for each in wrong})
    return Matching(
        tuple(matched),
        skipped,
        _counts(skips, skipped),
        tuple(unknown),
        len(tensors),
        len(claimed),
        (*_with_suggestions(missing, unknown), *_unknown_findings(unknown, missing), *wrong),
    )


def source_names(source: SourceFamily) -> list[str]:
    """Return all names of the source family, its last index running fastest."""
    return instantiate(source.template, [list(source.domains[index]) for index in source.template.indices])


def _choose_alternatives(families: Sequence[Family], tensors: Mapping[str, TensorHeader]) -> dict[int, int]:
    """Return per rule the position of the first alternative of which the checkpoint has any tensor (0 where none)."""
    chosen: dict[int, int] = {}
    for family in families:
        present = next(
            (position for position, alternative in enumerate(family.alternatives) if _is_present(alternative, tensors)),
            len(family.alternatives),
        ) if len(family.alternatives) > 1 else 0  # fmt: skip
        known = chosen.get(family.rule.number)
        chosen[family.rule.number] = present if known is None else min(known, present)
    num_alternatives = {family.rule.number: len(family.alternatives) for family in families}
    return {rule: position if position < num_alternatives[rule] else 0 for rule, position in chosen.items()}


def _is_present(alternative: Sequence[SourceFamily], tensors: Mapping[str, TensorHeader]) -> bool:
    return any(name in tensors for source in alternative for name in source_names(source))


def _other_spellings(family: Family, taken: Sequence[SourceFamily], tensors: Mapping[str, TensorHeader]) -> dict[str, SkipRule]:
    why = "another spelling of the same tensors was taken"
    rule = SkipRule(-1 - family.rule.number, f"others of {family.rule.text}", why, (), family.rule.place)
    others = (source for alternative in family.alternatives if alternative is not taken for source in alternative)
    return {name: rule for source in others for name in source_names(source) if name in tensors}


def _match_family(
    family: Family,
    alternative: tuple[SourceFamily, ...],
    tensors: Mapping[str, TensorHeader],
    claimed: set[str],
    reread: set[str],
    missing: list[Diagnostic],
    wrong: list[Diagnostic],
) -> MatchedFamily:
    found: list[list[TensorHeader | None]] = []
    names: list[list[str]] = []
    get = tensors.get
    for source in alternative:
        spelled = source_names(source)
        names.append(spelled)
        found.append([get(name) for name in spelled])
    absent: frozenset[Combination] = frozenset()
    incomplete: frozenset[Combination] = frozenset()
    if any(None in headers for headers in found):
        absent, incomplete = _missing_targets(family, alternative, names, found, missing)
    kinds: set[str] = set()
    refused: set[str] = set()
    computes = bool(family.values) and family.conversion is None
    for source, spelled, headers in zip(alternative, names, found, strict=True):
        present = (
            [name for name, header in zip(spelled, headers, strict=True) if header is not None]
            if absent or incomplete
            else spelled
        )
        (reread if family.reuses else claimed).update(present)
        if family.refusal:
            wrong += [
                finding("M506", place=family.rule.place, subject=name, name=name, problem=family.refusal) for name in present
            ]
        disk = source.disk
        allowed = source.dtypes
        for name, header in zip(spelled, headers, strict=True):
            if header is None or header is NAME_ONLY:
                continue
            if source.scale_of is None:
                kinds.add(header[0])
            if disk is not None and header[1] != disk.shape and not disk.accepts(header[1]):
                wrong.append(_wrong_shape(family, disk, name, header))
            if allowed and header[0] not in allowed:
                refused.add(name)
                wrong.append(_wrong_dtype(family, name, allowed, header))
            elif not fits_bitcast(family, source, header[0]):
                refused.add(name)
                wrong.append(_wrong_width(family, source, name, header))
            if computes and header[0] not in COMPUTED_DTYPES:
                refused.add(name)
                do = ", ".join(family.do)
                wrong.append(finding("M505", place=family.rule.place, subject=name, name=name, found=header.dtype, op=do))
    headers_by_target = _headers(family, alternative, found, kinds, names, refused, wrong)
    return MatchedFamily(family, alternative, absent, incomplete, headers_by_target, tuple(found))


def _missing_targets(
    family: Family,
    alternative: tuple[SourceFamily, ...],
    names: list[list[str]],
    found: list[list[TensorHeader | None]],
    missing: list[Diagnostic],
) -> tuple[frozenset[Combination], frozenset[Combination]]:
    """Return (absent, incomplete) targets, and report each required source that is not there."""
    lacking: dict[Combination, list[str]] = {}
    having: set[Combination] = set()
    for source, spelled, headers in zip(alternative, names, found, strict=True):
        for name, header, combination in zip(spelled, headers, targets_fed(family, source), strict=True):
            for each in combination:
                if header is None:
                    lacking.setdefault(each, []).append(name)
                else:
                    having.add(each)
    absent = frozenset(lacking.keys() - having) if family.optional else frozenset()
    incomplete = frozenset(lacking.keys() - absent)
    required = [name for combination, lost in lacking.items() if combination in incomplete for name in lost]
    hint = f"the rule is in force because {family.rule.because}" if family.rule.because else ""
    missing += [
        finding("M501", place=family.rule.place, subject=name, hint=hint, name=name, rule=family.rule.text)
        for name in dict.fromkeys(required)
    ]
    return absent, incomplete


def targets_fed(family: Family, source: SourceFamily) -> Iterable[list[Combination]]:
    """Yield, for each name of the source in order, the targets (values of the target's indices) that it feeds."""
    indices = source.template.indices
    choices = {index: family.domains[index] for index in family.target.indices}
    for values in product(*(source.domains[index] for index in indices)):
        fixed = dict(zip(indices, values, strict=True))
        yield list(product(*([fixed[index]] if index in fixed else choices[index] for index in family.target.indices)))


def _headers(
    family: Family,
    alternative: tuple[SourceFamily, ...],
    found: list[list[TensorHeader | None]],
    kinds: set[str],
    names: list[list[str]],
    refused: set[str],
    wrong: list[Diagnostic],
) -> dict[Combination, TensorHeader]:
    """Return a header for each target, and report the sources of a target that differ from its others in dtype.

    `refused` are the sources whose dtype the format does not allow: they are reported already and say nothing here.
    """
    first = next((header for headers in found for header in headers if header is not None), None)
    if first is None:
        return {}
    is_cast = family.conversion is not None and family.conversion.by == "cast"
    if family.axes is not None and (len(kinds) == 1 or is_cast):
        return {(): first}
    by_target: dict[Combination, list[tuple[str, TensorHeader]]] = {}
    for source, headers, spelled in zip(alternative, found, names, strict=True):
        for header, name, combinations in zip(headers, spelled, targets_fed(family, source), strict=True):
            if header is not None:
                for combination in combinations:
                    by_target.setdefault(combination, []).append((name, header))
    in_family = Counter(header.dtype for headers in found for header in headers if header is not None)
    odd: dict[str, Diagnostic] = {}
    chosen: dict[Combination, TensorHeader] = {}
    for combination, sources in by_target.items():
        judged = [each for each in sources if each[0] not in refused] or sources[:1]
        in_target = Counter(header.dtype for _, header in judged)
        usual = max(in_target, key=lambda dtype: (in_target[dtype], in_family[dtype]))
        usual_name, chosen[combination] = next(each for each in judged if each[1].dtype == usual)
        for name, header in judged:
            if header.dtype != usual and not is_cast:
                odd[name] = finding(
                    "M507", place=family.rule.place, subject=name, hint=f"the other is {usual_name!r}", name=name,
                    found=header.dtype, other=usual,
                )  # fmt: skip
    wrong += odd.values()
    return chosen


def _wrong_shape(family: Family, disk: DiskLayout, name: str, header: TensorHeader) -> Diagnostic:
    assert family.axes is not None
    dims = "as the format stores it"
    if disk.is_plain and len(disk.shape) == len(family.axes):
        dims = ", ".join(_spell_axis(axis, size) for axis, size in zip(family.axes, disk.shape, strict=True))
    if disk.single is not None:
        dims = "one element, as a scalar or a vector"
    expected, found = list(disk.shape), list(header.shape)
    return finding("M503", place=family.rule.place, subject=name, name=name, expected=expected, dims=dims, found=found)


def _spell_axis(axis: Axis, size: int) -> str:
    if not axis.dim:
        return str(size)
    return f"{axis.dim} / {axis.divisor} = {size}" if axis.divisor > 1 else f"{axis.dim} = {size}"


def _wrong_dtype(family: Family, name: str, allowed: frozenset[str], header: TensorHeader) -> Diagnostic:
    expected = " or ".join(f"{each} ({torch_name(each)})" for each in sorted(allowed))
    return finding("M504", place=family.rule.place, subject=name, name=name, expected=expected, found=header.dtype)


def fits_bitcast(family: Family, source: SourceFamily, dtype: str) -> bool:
    """Return whether an element of the target has as many bits as the stored ones that it is made of by a bitcast, if it is."""
    conversion = family.conversion
    if conversion is None or conversion.by == "cast" or source.disk is None or source.scale_of is not None:
        return True
    return BITS[dtype] * source.disk.packed == BITS[conversion.dtype] and (source.disk.packed == 1 or not BITS[dtype] % 8)


def _wrong_width(family: Family, source: SourceFamily, name: str, header: TensorHeader) -> Diagnostic:
    assert family.conversion is not None
    assert source.disk is not None
    to, packed = family.conversion.dtype, source.disk.packed
    return finding(
        "M512", place=family.rule.place, subject=name, name=name, found=header.dtype, packed=packed,
        bits=BITS[header.dtype] * packed, dtype=torch_name(to), expected=BITS[to],
    )  # fmt: skip


def _unlike_copies(
    skipped: Mapping[str, SkipRule], tensors: Mapping[str, TensorHeader], wrong: Set[str]
) -> Iterator[Diagnostic]:
    """Yield what is skipped as a copy of a source with another shape or dtype; one without elements says nothing.

    `wrong` are sources that are not what their rule expects: nothing is held against them.
    """
    for name, rule in skipped.items():
        original = rule.original(name)
        if original is None or original not in tensors or original in wrong:
            continue
        found, expected = tensors[name], tensors[original]
        if found is not NAME_ONLY and found.stop > found.start and found[:2] != expected[:2]:
            problem = f"is {found.dtype} {list(found.shape)}, the other {expected.dtype} {list(expected.shape)}"
            yield finding("M511", place=rule.place, subject=name, name=name, original=original, problem=problem)


def _classify(
    left: list[str], skips: Sequence[SkipRule], superseded: Mapping[str, SkipRule]
) -> tuple[dict[str, SkipRule], list[str]]:
    skipped: dict[str, SkipRule] = {}
    unknown: list[str] = []
    # One that says nothing of a copy comes first: a user's own, given so that nothing is compared.
    skips = sorted(skips, key=lambda skip: skip.copy_of is not None)
    for name in left:
        rule = superseded.get(name) or next((skip for skip in skips if skip.matches(name)), None)
        if rule is None:
            unknown.append(name)
        else:
            skipped[name] = rule
    return skipped, unknown


def _counts(skips: Sequence[SkipRule], skipped: Mapping[str, SkipRule]) -> dict[str, int]:
    counts = {skip.text: 0 for skip in skips}
    for rule in skipped.values():
        counts[rule.text] = counts.get(rule.text, 0) + 1
    return counts


def _with_suggestions(missing: list[Diagnostic], unknown: list[str]) -> list[Diagnostic]:
    if not unknown or len(missing) > MAX_SUGGESTIONS:
        return missing
    return [_suggest(each, unknown, "the checkpoint has {near!r}, which no rule names") for each in missing]


def _unknown_findings(unknown: list[str], missing: list[Diagnostic]) -> list[Diagnostic]:
    findings = [finding("M502", subject=name, name=name) for name in unknown]
    if not missing or len(unknown) > MAX_SUGGESTIONS:
        return findings
    wanted = [each.subject for each in missing]
    return [_suggest(each, wanted, "a rule expects {near!r}") for each in findings]


def _suggest(diagnostic: Diagnostic, names: list[str], text: str) -> Diagnostic:
    near = get_close_matches(diagnostic.subject, names[: MAX_SUGGESTIONS * 20], n=1, cutoff=0.8)
    if not near:
        return diagnostic
    return Diagnostic(
        diagnostic.code, diagnostic.message, diagnostic.place, diagnostic.subject, text.format(near=near[0]), diagnostic.related
    )
