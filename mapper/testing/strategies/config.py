"""Small configs for a spec: real ones whose sizes are shrunk by the role that each plays."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import assume, event
from hypothesis import strategies as st

from mapper import Layout
from mapper.spec.configs import configs_for
from mapper.spec.model import Spec
from mapper.testing.reference import Misfit, layout_fault
from mapper.testing.reference.world import world_of
from mapper.testing.strategies.quiet import Named
from mapper.testing.strategies.roles import Roles, constants_compared_with, roles_of

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
VOCABULARIES = (61, 67, 131, 191)  # padded to 64, 128 and 192 rows
MOST_CUTS = 4
MOST_THINGS = 8
EXPERTS = (8, 9, 6, 8, 12, 5, 4, 16, 2)
BLOCKS = ([4, 6], [2, 3], [6, 4], [3, 2])
BLOCKS_BESIDE_FIXED = ([4, 2], [2, 4], [4, 4])  # where formats have divisors such as 32 of their own
METHODS = ("fp8", "mxfp4", "compressed-tensors")
GROUP = 8  # elements that share a scale, and codes of 4 bits in a word
MULTIPLES = (2, 4, 4, 8, 8, 6, 12, 16, 1)
MULTIPLES_OF_BLOCKS = (2, 4, 4, 8, 6, 2)

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
    blocks = BLOCKS_BESIDE_FIXED if _has_fixed_divisors(spec) else BLOCKS
    block = draw(st.sampled_from(blocks)) if method == "fp8" else [1, 1]
    base.pop("quantization_config", None)
    if method == "fp8":
        base["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}
    elif method == "compressed-tensors":
        groups = {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}}
        base["quantization_config"] = {"quant_method": method, "config_groups": groups}
    elif method is not None:
        base["quantization_config"] = {"quant_method": method}
    sizes = _Sizes(
        roles=roles,
        multiple=draw(st.sampled_from(MULTIPLES if method is None else MULTIPLES_OF_BLOCKS)),
        block=math.lcm(*block),
        num_layers=draw(st.integers(1, 4)),
        primes=draw(st.permutations(PRIMES)),
    )
    for key in spec.config.values():
        examples = [each for each in (_get(config, key.path) for config in bases) if each is not None]
        default = None if key.default is None else _literal(key.default.text)
        value = _draw_value(draw, key.name, examples, default, key.default is not None, sizes)
        _set(base, key.path, value)
    divisor = GROUP if method == "compressed-tensors" else _fixed_divisor(spec, base, runtime)
    if divisor > 1:
        for name in sorted(roles.sizes - roles.units - roles.few_units - roles.experts - roles.layers - roles.padded):
            examples = [each for each in (_get(config, spec.config[name].path) for config in bases) if each is not None]
            if not _is_small(examples):
                most = MOST_CUTS if name in roles.cut_by_elements else 1
                _round_up(base, spec.config[name].path, divisor, most)
    if runtime is not None:
        fitting = (each for each in _ever_plainer(base, spec, sizes) if _fits(spec, each, runtime))
        base = next(fitting, base)
        assume(_fits(spec, base, runtime))
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
    if _is_small(examples):
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
    methods = sorted(each for each in set(named) if each in METHODS)
    return [None, *methods, *(each for each in methods if each == "fp8")]  # the one that is met most, drawn twice as often


def _ever_plainer(config: Config, spec: Spec, sizes: _Sizes) -> Iterator[Config]:
    """Yield the config, then with square blocks, then with numbers for what may be null, then without quantisation."""
    yield config
    section = config.get("quantization_config")
    if isinstance(section, dict) and isinstance(block := section.get("weight_block_size"), list):
        config = {**config, "quantization_config": {**section, "weight_block_size": block[:1] * 2}}
        yield config
    filled = copy.deepcopy(config)
    for key in spec.config.values():
        if key.default is not None and _get(filled, key.path) is None and key.name in sizes.roles.sizes:
            _set(filled, key.path, sizes.block * sizes.prime(key.name))
    yield filled
    yield {key: value for key, value in filled.items() if key != "quantization_config"}


def _fits(spec: Spec, config: Config, runtime: str) -> bool:
    return layout_fault(spec, config=config, runtime=runtime, layout=Layout()) is None


def _has_fixed_divisors(spec: Spec) -> bool:
    leaves = (leaf for form in spec.formats.values() for each in form.alternatives for leaf in each.leaves)
    axes = (axis for leaf in leaves for axis in (*leaf.dims, *(leaf.stored or ())))
    return any(axis.divisor is not None and axis.divisor.text.isdigit() for axis in axes)


def _fixed_divisor(spec: Spec, config: Config, runtime: str | None) -> int:
    """Return the least common multiple of the divisors that the formats in use write as numbers."""
    found = [1]
    for name in spec.runtimes if runtime is None else (runtime,):
        with suppress(Misfit, IndexError):
            world = world_of(spec, config=config, runtime=name, layout=Layout(), rank=0)
            for form in {**spec.formats, **spec.runtimes[name].formats}:
                for leaf in world.format(form).leaves:
                    axes = [*leaf.dims, *(leaf.stored or ()), *(axis for half in leaf.dequantize or () for axis in half.dims)]
                    divisors = [axis.divisor.text for axis in axes if axis.divisor is not None]
                    found += [int(text) for text in divisors if text.isdigit()]
    return math.lcm(*found)


def _round_up(config: Config, path: str, divisor: int, most: int) -> None:
    """Make a size a multiple of `divisor`, at most `most` times it."""
    value = _get(config, path)
    if isinstance(value, int) and not isinstance(value, bool):
        _set(config, path, divisor * min(value, most))


def _is_small(examples: Sequence[object]) -> bool:
    """Say whether a key counts a few things rather than elements."""
    return bool(examples) and all(isinstance(each, int) and each <= MOST_THINGS for each in examples)


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
