"""Everything that is fixed before a tensor is looked at: the names of a config, the values of every index, a rank's place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from mapper import Layout
from mapper.spec.model import FormatAlternative, Index, Runtime, Spec
from mapper.testing.reference.evaluate import Scope, evaluate, holds, integer
from mapper.testing.reference.ranks import (
    IllegalLayout,
    Position,
    coordinate,
    experts_of_each_rank,
    positions,
    stage_of_each_layer,
)

IndexValue = int | str
Config = Mapping[str, object]
_ABSENT = object()
LAYOUT_AXES = ("tp", "pp", "dp", "ep")


@dataclass(frozen=True, slots=True)
class World:
    """A spec at one config, runtime, options, layout and rank."""

    spec: Spec
    runtime: Runtime
    layout: Layout
    rank: int
    scope: Scope
    axes: Mapping[str, int]

    @property
    def position(self) -> Position:
        return positions(self.layout)[self.rank]

    def at_rank(self, rank: int) -> World:
        return replace(self, rank=rank)

    def coordinate(self, axis: str) -> int:
        return coordinate(axis, self.axes[axis], self.layout, self.position)

    def indices(self) -> dict[str, Index]:
        return {**self.spec.index, **self.runtime.index}

    def values(self, index: str) -> list[IndexValue]:
        """Return all values of an index, whoever holds them."""
        entry = self.indices()[index]
        if entry.values is not None:
            return list(entry.values)
        return [value for value in self._range(entry) if self._is_wanted(entry, value)]

    def held(self, index: str) -> list[IndexValue]:
        """Return the values of an index that this rank holds, in the order of its slots; a value may come twice."""
        entry = self.indices()[index]
        if entry.axis is None or entry.values is not None:
            return self.values(index)
        every = self._range(entry)
        if entry.axis == "pp":
            stages = stage_of_each_layer(len(every), self.layout)
            here = [value for value, stage in zip(every, stages, strict=True) if stage == self.position.pp]
        elif entry.axis == "ep":
            here = [every[slot] for slot in self.expert_slots(len(every))]
        else:
            raise NotImplementedError(f"an index on the axis {entry.axis}")
        return [value for value in here if self._is_wanted(entry, value)]

    def expert_slots(self, num_experts: int) -> list[int]:
        """Return the logical experts in this rank's slots."""
        redundant, is_round_robin = self._experts()
        table = experts_of_each_rank(num_experts, self.layout, redundant=redundant, is_round_robin=is_round_robin)
        return table[self.coordinate("ep")]

    def format(self, name: str) -> FormatAlternative:
        """Return the first alternative of a format whose condition holds."""
        formats = {**self.spec.formats, **self.runtime.formats}
        for alternative in formats[name].alternatives:
            if alternative.when is None or holds(alternative.when.text, self.scope):
                return alternative
        raise IllegalLayout(f"no alternative of the format {name!r} holds")

    def is_on_stage(self, word: object) -> bool:
        is_first, is_last = self.position.pp == 0, self.position.pp == self.layout.pp - 1
        match word:
            case None | "all":
                return True
            case "first":
                return is_first
            case "last":
                return is_last
            case "both":
                return is_first or is_last
        raise AssertionError(f"{word!r} is no stage")

    def _range(self, entry: Index) -> list[IndexValue]:
        assert entry.count is not None
        first = 0 if entry.first is None else integer(entry.first.text, self.scope)
        return [first + number for number in range(integer(entry.count.text, self.scope))]

    def _is_wanted(self, entry: Index, value: IndexValue) -> bool:
        return entry.where is None or holds(entry.where.text, self.scope.with_values({entry.name: value}))

    def _experts(self) -> tuple[int, bool]:
        """Return the number of redundant experts and whether experts go round robin."""
        mesh, asked = self.runtime.mesh, self.layout
        if mesh.redundant_experts is not None and integer(mesh.redundant_experts.text, self.scope) != asked.redundant_experts:
            raise IllegalLayout("the runtime fixes the number of redundant experts")
        wants_round_robin = asked.placement == "round_robin"
        if wants_round_robin and (mesh.round_robin is None or not holds(mesh.round_robin.text, self.scope)):
            raise IllegalLayout("the runtime places experts linearly")
        return asked.redundant_experts, wants_round_robin


def world_of(
    spec: Spec, *, config: Config, runtime: str, layout: Layout, rank: int, options: Mapping[str, object] | None = None
) -> World:
    """Return the world of one rank; raises IllegalLayout where the runtime does not allow the layout or the config."""
    section = spec.runtimes[runtime]
    values: dict[str, object] = {**_quantization(config)}
    scope = Scope(values)
    for name, option in spec.options.items():
        values[name] = (options or {}).get(name, option.default)
    for name, key in spec.config.items():
        found, value = _look_up(config, key.path)
        if found and (value is not None or key.default is None):
            values[name] = value
    for name, key in spec.config.items():
        if name not in values:
            if key.default is None:
                raise KeyError(f"the config has no {name}")
            values[name] = evaluate(key.default.text, scope)
    for axis in LAYOUT_AXES:
        values[axis] = getattr(layout, axis)
    values["redundant_experts"] = layout.redundant_experts
    axes = {axis: int(getattr(layout, axis)) for axis in LAYOUT_AXES}
    scope = Scope(values, {**spec.let, **section.let})
    for axis, size in section.mesh.axes.items():
        axes[axis] = integer(size.text, scope)
    scope = scope.with_values(axes)
    if section.mesh.like == "single" and layout != Layout():
        raise IllegalLayout("the runtime has no parallel axes")
    world = World(spec, section, layout, rank, scope, axes)
    for requirement in section.requires:
        if not holds(requirement.that.text, scope):
            raise IllegalLayout(requirement.why)
    return world


def combinations(indices: Sequence[str], values: Mapping[str, Sequence[IndexValue]]) -> Iterator[dict[str, IndexValue]]:
    """Yield every choice of one value per index."""
    for choice in product(*(values[index] for index in indices)):
        yield dict(zip(indices, choice, strict=True))


def _look_up(config: Config, path: str) -> tuple[bool, object]:
    """Return whether a config has a dotted path, and its value; a composite model has it under `text_config`."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        found: object = place
        for step in path.split("."):
            found = found.get(step, _ABSENT) if isinstance(found, Mapping) else _ABSENT
        if found is not _ABSENT:
            return True, found
    return False, None


def _quantization(config: Config) -> dict[str, object]:
    """Return the facts of `quantization_config` that every spec may use; 1 or null where it says nothing."""
    _, section = _look_up(config, "quantization_config")
    given: Mapping[str, object] = section if isinstance(section, Mapping) else {}
    block = given.get("weight_block_size") or [1, 1]
    assert isinstance(block, list | tuple)
    return {
        "quant_method": given.get("quant_method"),
        "block_out": block[0],
        "block_in": block[1],
        "group_size": _of_groups(given, "group_size", "group_size") or 1,
        "weight_bits": _of_groups(given, "bits", "num_bits"),
        "scales_per": "block" if block[0] > 1 else _scales_per(given),
        "model_dtype": _look_up(config, "dtype")[1] or _look_up(config, "torch_dtype")[1],
    }


def _scales_per(given: Mapping[str, object]) -> object:
    method = given.get("quant_method")
    if method in ("awq", "gptq") and not given.get("desc_act"):
        return "channel" if given.get("group_size") == -1 else "group"
    if method == "compressed-tensors":
        return _of_groups(given, "strategy", "strategy")
    if method == "modelopt":
        return {"FP8": "tensor", "NVFP4": "group"}.get(str(given.get("quant_algo")))
    return "tensor" if method == "fp8" else None


def _of_groups(given: Mapping[str, object], key: str, group_key: str) -> object:
    """Return what is said of the weights: at the root, or by the groups of compressed-tensors where they say the same."""
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping):
        return given.get(key)
    found = [each["weights"].get(group_key) for each in groups.values()]
    return found[0] if all(each == found[0] for each in found) else None
