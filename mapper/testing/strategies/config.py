"""Small configs for a spec: real ones whose sizes are shrunk by the role that each plays."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import assume, event
from hypothesis import strategies as st

from mapper import Layout
from mapper.spec.configs import configs_for
from mapper.spec.model import Spec
from mapper.testing.reference import layout_fault
from mapper.testing.strategies.quiet import Named
from mapper.testing.strategies.roles import Roles, constants_compared_with, roles_of

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
VOCABULARIES = (61, 67, 131, 191)  # padded to 64, 128 and 192 rows
EXPERTS = (8, 9, 6, 8, 12, 5, 4, 16, 2, 1)
BLOCKS = ([4, 6], [2, 3], [6, 4], [3, 2])
MULTIPLES = (2, 4, 4, 8, 8, 6, 12, 16, 1)
MULTIPLES_OF_BLOCKS = (2, 4, 4, 8, 3, 1)

Config = dict[str, object]


def configs(spec: Spec, runtime: str | None = None) -> st.SearchStrategy[Config]:
    """Return configs that the spec is for, small enough to load in milliseconds.

    Indices have few values, heads and groups are few, other sizes are different primes, times what a cut or a block needs.
    Keys that may be null are so half of the time. `runtime` restricts the configs to those that it accepts.
    """
    return _configs(Named(spec), runtime)


@st.composite
def _configs(draw: st.DrawFn, named: Named, runtime: str | None) -> Config:
    spec = named.spec
    bases = known_configs(spec)
    base = copy.deepcopy(draw(st.sampled_from(bases)))
    roles = roles_of(spec)
    method = draw(st.sampled_from(_methods(spec, bases)))
    fixed = _fixed_divisors(spec) if method == "mxfp4" else 1
    block = draw(st.sampled_from(BLOCKS)) if method == "fp8" else [1, 1]
    base.pop("quantization_config", None)
    if method == "fp8":
        base["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}
    elif method is not None:
        base["quantization_config"] = {"quant_method": method}
    sizes = _Sizes(
        roles=roles,
        multiple=draw(st.sampled_from(MULTIPLES if method is None else MULTIPLES_OF_BLOCKS)),
        block=math.lcm(*block, fixed),
        num_layers=draw(st.integers(1, 4)),
        primes=draw(st.permutations(PRIMES)),
    )
    for key in spec.config.values():
        examples = [each for each in (_get(config, key.path) for config in bases) if each is not None]
        default = None if key.default is None else _literal(key.default.text)
        value = _draw_value(draw, key.name, examples, default, key.default is not None, sizes)
        _set(base, key.path, value)
    if runtime is not None and method == "fp8" and layout_fault(spec, config=base, runtime=runtime, layout=Layout()):
        base["quantization_config"] = {**_section(base), "weight_block_size": block[:1] * 2}  # some rules need square blocks
    if runtime is not None:
        assume(layout_fault(spec, config=base, runtime=runtime, layout=Layout()) is None)
    event(f"quantization: {method}")
    return base


def known_configs(spec: Spec) -> list[Config]:
    """Return the bundled configs of a spec, those that its cases hold, or one that names its architecture and nothing else."""
    found: list[Config] = list(configs_for(spec).values())
    found += [dict(case.config) for case in spec.cases if isinstance(case.config, Mapping)]
    return found or [{"architectures": list(spec.architectures[:1])}]


@dataclass(frozen=True, slots=True)
class _Sizes:
    roles: Roles
    multiple: int
    block: int
    num_layers: int
    primes: Sequence[int]

    def prime(self, name: str) -> int:
        """Return a prime of the key's own, as long as there are any."""
        ordered = sorted(self.roles.sizes)
        return self.primes[ordered.index(name) % len(self.primes)]


def _draw_value(
    draw: st.DrawFn, name: str, examples: Sequence[object], default: object, is_optional: bool, sizes: _Sizes
) -> object:
    roles = sizes.roles
    kinds = [*examples, default]
    if any(isinstance(each, bool) for each in kinds):
        return draw(st.booleans())
    if name in roles.per_layer or name in roles.members or any(isinstance(each, list) for each in kinds):
        return _draw_list(draw, name, examples, sizes)
    if name in roles.layers:
        return sizes.num_layers
    if name in roles.experts:
        return draw(st.sampled_from(EXPERTS))
    if name in roles.counts:
        return draw(st.sampled_from((1, 0, 2)))
    if any(isinstance(each, str) for each in kinds):
        words = [each for each in (*kinds, *roles.compared.get(name, [])) if isinstance(each, str)]
        return draw(st.sampled_from(sorted(set(words))))
    if name in roles.moduli:
        return draw(st.integers(1, 2))
    if name in roles.thresholds and name not in roles.sizes:
        return draw(st.integers(0, sizes.num_layers))
    if is_optional and default is None and name not in roles.units and draw(st.booleans()):
        return None
    if name in roles.units:
        return sizes.multiple
    if name in roles.few_units:
        return draw(st.sampled_from([each for each in range(1, sizes.multiple + 1) if sizes.multiple % each == 0]))
    if name in roles.sizes:
        return _draw_size(draw, name, examples, sizes)
    return examples[0] if examples else default


def _draw_size(draw: st.DrawFn, name: str, examples: Sequence[object], sizes: _Sizes) -> int:
    roles = sizes.roles
    if examples and all(isinstance(each, int) and each <= 8 for each in examples):
        return draw(st.integers(1, 3))
    if name in roles.padded:
        return draw(st.sampled_from(VOCABULARIES))
    if name in roles.cut_by_elements:
        return draw(st.sampled_from((3, 1, 2))) * sizes.multiple * sizes.block
    if name in roles.cut_by_units or name in roles.joined:
        return sizes.block * (draw(st.integers(1, 2)) if sizes.block > 1 else sizes.prime(name))
    return sizes.prime(name) + (sizes.block if sizes.block > 1 else 0)


def _draw_list(draw: st.DrawFn, name: str, examples: Sequence[object], sizes: _Sizes) -> list[object]:
    known = [each for example in examples if isinstance(example, list) for each in example]
    if name in sizes.roles.members:
        return [layer for layer in range(sizes.num_layers) if draw(st.booleans())]
    if name in sizes.roles.per_layer:
        length = sizes.num_layers + draw(st.integers(0, 2))
        return [draw(st.sampled_from(list(dict.fromkeys(known)) or [1])) for _ in range(length)]
    return known[: draw(st.integers(0, 2))]


def _methods(spec: Spec, bases: Sequence[Config]) -> list[str | None]:
    named = [each for each in constants_compared_with(spec, "quant_method") if isinstance(each, str)]
    for base in bases:
        section = base.get("quantization_config")
        if isinstance(section, Mapping) and isinstance(section.get("quant_method"), str):
            named.append(str(section["quant_method"]))
    return [None, *sorted(each for each in set(named) if each in ("fp8", "mxfp4"))]


def _fixed_divisors(spec: Spec) -> int:
    """Return the least common multiple of the divisors that formats write as numbers."""
    found = [1]
    forms = [*spec.formats.values(), *(form for runtime in spec.runtimes.values() for form in runtime.formats.values())]
    for form in forms:
        for alternative in form.alternatives:
            for leaf in alternative.leaves:
                axes = [*leaf.dims, *(leaf.stored or ()), *(axis for half in leaf.dequantize or () for axis in half.dims)]
                found += [int(axis.divisor.text) for axis in axes if axis.divisor is not None and axis.divisor.text.isdigit()]
    return math.lcm(*found)


def _section(config: Config) -> dict[str, object]:
    section = config["quantization_config"]
    assert isinstance(section, dict)
    return section


def _literal(text: str) -> object:
    words: dict[str, object] = {"null": None, "true": True, "false": False}
    if text in words:
        return words[text]
    if text.lstrip("-").isdigit():
        return int(text)
    if text.startswith("["):
        return []
    return text.strip("'\"") if text[:1] in "'\"" else None


def _get(config: Mapping[str, Any], path: str) -> object:
    for root in (config, config.get("text_config") or {}):
        value: Any = root
        for step in path.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _set(config: dict[str, Any], path: str, value: object) -> None:
    inner = config.get("text_config")
    place = inner if isinstance(inner, dict) and path.split(".")[0] in inner else config
    *steps, last = path.split(".")
    for step in steps:
        place = place.setdefault(step, {})
    place[last] = value
