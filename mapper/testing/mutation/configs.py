"""The configs that mutants are tried with: the known ones with few layers and experts, and copies with odd padded sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mapper.compiler import compile
from mapper.diagnostics import MapperError, Place
from mapper.expressions import Expression
from mapper.plan.family import Axis
from mapper.spec.configs import configs_for
from mapper.spec.model import Rule, Spec
from mapper.testing.mutation.sites import item_sites

Config = Mapping[str, object]

NUM_LAYERS = (2, 3, 4, 5, 6, 8, 12, 16, 24)
NUM_EXPERTS = (8, 16)


@dataclass(frozen=True, slots=True)
class KnownConfig:
    """A config by its name, or by its text where a case spells it. `tried` is the same with few layers and experts."""

    name: str
    whole: Config
    tried: Config
    is_odd: bool = False

    def __str__(self) -> str:
        return f"{self.name} with odd sizes" if self.is_odd else self.name


def known_configs(spec: Spec) -> tuple[KnownConfig, ...]:
    """Return the configs beside the spec, the bundled ones and those of its cases; an odd copy of one that has padding.

    Where there is none it is one that names an architecture of the spec and nothing else.

    Layers that no rule tells apart, and most experts, are left out: every rule has the families that it has with all of
    them, and a trial takes a tenth of the time.
    """
    wholes: dict[str, Config] = dict(configs_for(spec))
    wholes |= {json.dumps(case.config): case.config for case in spec.cases if not isinstance(case.config, str)}
    if not wholes:
        plain: Config = {"architectures": list(spec.architectures[:1])}
        wholes[json.dumps(plain)] = plain
    found = [KnownConfig(name, whole, _smaller(spec, whole)) for name, whole in wholes.items()]
    for each in list(found):
        odd = each.tried
        for path in _padded_keys(spec):
            value = _get(odd, path)
            if isinstance(value, int) and not isinstance(value, bool):
                odd = _with(odd, path, value + 1)
        if odd is not each.tried and _families(spec, odd):
            found.append(KnownConfig(each.name, each.whole, odd, is_odd=True))
    return tuple(found)


def _smaller(spec: Spec, config: Config) -> Config:
    """Return the config with the fewest layers that leave every rule the families it has, and then with few experts."""
    config = next(
        (each for each in _with_fewer(spec, config, "pp", NUM_LAYERS) if _families(spec, each) == _families(spec, config)),
        config,
    )
    kinds = {_without_sizes(each) for each in _families(spec, config)}
    for each in _with_fewer(spec, config, "ep", NUM_EXPERTS):
        if {_without_sizes(family) for family in _families(spec, each)} == kinds:
            return each
    return config


def _with_fewer(spec: Spec, config: Config, axis: str, numbers: tuple[int, ...]) -> Iterator[Config]:
    """Yield the config with fewer values of what a mesh axis owns, where it has more."""
    indices = [*spec.index.values(), *(each for runtime in spec.runtimes.values() for each in runtime.index.values())]
    paths = sorted({path for index in indices if index.axis == axis for path in _path(index.count, spec)})
    for number in numbers:
        fewer = config
        for path in paths:
            value = _get(config, path)
            if isinstance(value, int) and value > number:
                fewer = _with(fewer, path, number)
        if fewer is not config:
            yield fewer


def _families(spec: Spec, config: Config) -> set[tuple[str, Place, str, str, tuple[Axis, ...]]]:
    """Return what the rules are under a config, whatever the number of layers."""
    found: set[tuple[str, Place, str, str, tuple[Axis, ...]]] = set()
    for runtime in spec.runtimes:
        try:
            program = compile(spec, config=config, runtime=runtime)
        except MapperError:
            continue
        found.update((runtime, each.rule.place, each.leaf, each.stage, each.axes or ()) for each in program.families)
    return found


def _without_sizes(family: tuple[str, Place, str, str, tuple[Axis, ...]]) -> object:
    *rule, axes = family
    return (*rule, tuple((axis.dim, len(axis.parts), axis.divisor) for axis in axes))


def _padded_keys(spec: Spec) -> list[str]:
    rules = [site.item for site in item_sites(spec) if isinstance(site.item, Rule)]
    sizes = [size for rule in rules for shard in rule.shard.values() if shard.pad for size in _sizes(rule, shard.dim)]
    return list(dict.fromkeys(path for size in sizes for path in _path(size, spec)))


def _sizes(rule: Rule, dim: str) -> tuple[Expression, ...]:
    return rule.dims[dim].sizes if rule.dims and dim in rule.dims else ()


def _path(expression: Expression | None, spec: Spec) -> Iterator[str]:
    """Yield where the key lies in config.json, if the expression is nothing but a key."""
    if expression is not None and expression.text.strip() in spec.config:
        yield spec.config[expression.text.strip()].path


def _get(config: Config, path: str) -> object:
    value: object = config
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _with(config: Config, path: str, value: object) -> Config:
    step, _, rest = path.partition(".")
    inner = config.get(step)
    return {**config, step: _with(inner, rest, value) if rest and isinstance(inner, Mapping) else value}
