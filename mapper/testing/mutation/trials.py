"""What mutants are tried on: compiled programs of the spec itself, with headers and model parameters that fit them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.expressions import Value
from mapper.layout import Layout
from mapper.ops.dtypes import torch_name
from mapper.pattern import Template
from mapper.plan.family import Family, SkipRule
from mapper.plan.matching import source_names
from mapper.plan.plan import Plan
from mapper.plan.targets import DeclaredTarget, fit
from mapper.report.layouts import iter_layouts
from mapper.spec.model import Spec
from mapper.testing.mutation.configs import KnownConfig, known_configs

MAX_RANKS = 4
TELLING = ("tp=2,pp=2", "tp=2,dp=2", "tp=2,ep=2", "")
"""Layouts that most mutants do not survive, tried first; the only ones for odd sizes, options and further spellings."""
TELLING_LAYOUTS = frozenset(str(Layout.parse(text)) for text in TELLING)

MATRIX, VECTOR = (5, 3), (5,)
"""Shapes of sources whose rules state no dims."""
KEPT = DeclaredTarget((3,), "float32", "")
EXTRA = "extra"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a program is compiled from, the spec aside."""

    config: KnownConfig
    runtime: str
    options: Mapping[str, Value]
    layout: Layout

    def compile(self, spec: Spec) -> Program:
        return compile(spec, config=self.config.tried, runtime=self.runtime, layout=self.layout, options=dict(self.options))

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.config}, {self.runtime}, {self.layout}{options}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One checkpoint's headers, the parameters of a model on every rank, and the plans of the spec itself."""

    checkpoint: Checkpoint
    targets: tuple[dict[str, DeclaredTarget], ...]
    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting with the spec's own program, None where the spec refuses the layout."""

    setting: Setting
    program: Program | None
    variants: tuple[Variant, ...]


def iter_trials(spec: Spec, *, max_ranks: int = MAX_RANKS) -> Iterator[Trial]:
    """Yield every trial of a spec, the most telling first. Runtimes that a config does not meet are left out."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for setting in _settings(spec, max_ranks):
        try:
            program = setting.compile(spec)
        except MapperError:
            if setting.layout.num_ranks > 1:
                yield Trial(setting, None, ())
            continue
        config = str(setting.config)
        if config not in shapes:
            shapes[config] = _shapes(spec, setting.config)
        most = max((len(family.alternatives) for family in program.families), default=1)
        spellings = range(-1, most if str(setting.layout) in TELLING_LAYOUTS else 1)
        yield Trial(setting, program, tuple(_variants(program, shapes[config], spellings)))


def variant_of(program: Program, checkpoint: Checkpoint) -> Variant | None:
    """Return the variant of a checkpoint, or None where the program has findings about it."""
    matching = program.match(checkpoint)
    if matching.findings:
        return None
    ranks = [program.at_rank(rank) for rank in range(program.layout.num_ranks)]
    plans = tuple(each.assemble(matching, checkpoint.tensors) for each in ranks)
    targets = tuple(_declared(plan) for plan in plans)
    if any(plan.findings or fit(plan, own).findings for plan, own in zip(plans, targets, strict=True)):
        return None
    return Variant(checkpoint, targets, plans)


def checkpoint_of(headers: dict[str, TensorHeader]) -> Checkpoint:
    return Checkpoint("headers of a mutation test", (), headers, None, (), ())


def names_of(families: Iterable[Family]) -> set[str]:
    """Return the names of all sources of families, in every spelling."""
    return {
        name for family in families for sources in family.alternatives for source in sources for name in source_names(source)
    }


def _settings(spec: Spec, max_ranks: int) -> Iterator[Setting]:
    configs = known_configs(spec)
    flipped: list[dict[str, Value]] = [
        {name: not option.default} for name, option in spec.options.items() if isinstance(option.default, bool)
    ]
    telling = [layout for text in TELLING if (layout := Layout.parse(text)).num_ranks <= max_ranks]
    rest = [layout for layout in iter_layouts(max_ranks) if layout not in telling]
    for layouts, is_rest in ((telling, False), (rest, True)):
        for layout in layouts:
            for runtime in spec.runtimes:
                for config in configs:
                    for options in ({}, *flipped):
                        if not (is_rest and (config.is_odd or options)) and not (config.is_odd and options):
                            yield Setting(config, runtime, options, layout)


def _shapes(spec: Spec, config: KnownConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of sources as any runtime of the spec states them."""
    found: dict[str, tuple[int, ...]] = {}
    for runtime in spec.runtimes:
        try:
            program = compile(spec, config=config.tried, runtime=runtime)
        except MapperError:
            continue
        for family in program.families:
            for sources in family.alternatives:
                for source in sources:
                    if source.disk is not None:
                        found.update(dict.fromkeys(source_names(source), source.disk.shape))
    return found


def _variants(program: Program, shapes: Mapping[str, tuple[int, ...]], spellings: range) -> Iterator[Variant]:
    seen: list[dict[str, TensorHeader]] = []
    for spelling in spellings:
        headers = _headers(program, shapes, spelling)
        if headers not in seen:
            seen.append(headers)
            variant = variant_of(program, checkpoint_of(headers))
            if variant is not None:
                yield variant


def _headers(program: Program, shapes: Mapping[str, tuple[int, ...]], spelling: int) -> dict[str, TensorHeader]:
    """Return headers in which every rule's sources have the given spelling; -1 is the first, without what is optional."""
    default = "BF16" if spelling >= 0 else "F32"
    headers: dict[str, TensorHeader] = {}
    for family in program.families:
        if family.tie is not None or family.refusal or (family.optional and spelling < 0):
            continue
        chosen = max(spelling, 0) if len(family.alternatives) > max(spelling, 0) else 0
        for number, sources in enumerate(family.alternatives):
            if number != chosen and not (family.skips_others and number > chosen):
                continue
            for source in sources:
                dtype = default if not source.dtypes or default in source.dtypes else min(source.dtypes)
                fallback = MATRIX if family.leaf in ("", "weight") else VECTOR
                for name in source_names(source):
                    shape = source.disk.shape if source.disk is not None else shapes.get(name, fallback)
                    headers.setdefault(name, TensorHeader(dtype, shape, -1, 0, 0))
    claimed = names_of(program.families)
    for name, shape in shapes.items():
        if name not in claimed and any(skip.matches(name) for skip in program.skips):
            headers.setdefault(name, TensorHeader(default, shape, -1, 0, 0))
    for name in _spelled(program.skips):
        if name not in claimed:
            headers.setdefault(name, TensorHeader(default, VECTOR, -1, 0, 0))
    return headers


def _declared(plan: Plan) -> dict[str, DeclaredTarget]:
    """Return the parameters of a model that the plan fits: its targets, tied ones with storage of their own, and each keep."""
    found = {
        each.name: DeclaredTarget(each.shape, (torch_name(each.dtype) or "") if each.dtype else "", each.name)
        for each in plan.targets.values()
    }
    for name in _spelled(plan.keeps):
        found.setdefault(name, DeclaredTarget(KEPT.shape, KEPT.dtype, name))
    return found


def _spelled(rules: tuple[SkipRule, ...]) -> Iterator[str]:
    """Yield names that skips or keeps match, one for each value of an index; a wildcard is spelled `extra`."""
    for rule in rules:
        for template in rule.templates:
            yield from _names(template)


def _names(template: Template) -> Iterator[str]:
    names = [""]
    for segment in template.segments:
        texts = [EXTRA] if isinstance(segment, str) else list(segment.texts)
        names = [f"{name}.{text}" if name else text for name in names for text in texts]
    yield from names
