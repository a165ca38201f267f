"""The names an expression may use: config keys, options, axis sizes, quantisation facts, lets and index values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mapper.diagnostics import MapperError, Place, finding
from mapper.expressions import Expression, ExpressionError, Value
from mapper.pattern import Bindings, IndexValue
from mapper.spec.model import Let, Spec

MAX_DEPTH = 50


class Names:
    """A level of names: constants and lets, on top of the level around it. Results are kept, since rules repeat."""

    def __init__(
        self,
        constants: Mapping[str, Value],
        lets: Mapping[str, Let],
        indices: Iterable[str] = (),
        *,
        parent: Names | None = None,
    ) -> None:
        self.constants = constants
        self.lets = lets
        self.parent = parent
        self.indices: frozenset[str] = parent.indices if parent else frozenset(indices)
        self._values: dict[tuple[object, ...], Value] = {}
        self._dependence: dict[str, tuple[str, ...]] = {}

    def below(self, lets: Mapping[str, Let]) -> Names:
        """Return a level with `lets` on top of this one."""
        return Names({}, lets, parent=self) if lets else self

    def evaluate(self, expression: Expression, bindings: Bindings, place: Place | None) -> Value:
        """Return the expression's value at these index values; raises MapperError M303 at `place`."""
        relevant = self.dependence(expression)
        unbound = next((index for index in relevant if index not in bindings), None)
        if unbound is not None:
            problem = f"{expression.text!r} needs the index {unbound!r}, which the patterns here do not have"
            raise MapperError([finding("M303", place=place, problem=problem)])
        key = (expression.text, *[bindings[index] for index in relevant])
        if key not in self._values:
            try:
                self._values[key] = expression.evaluate(_View(self, bindings, 0))
            except ExpressionError as error:
                raise MapperError([finding("M303", place=place, problem=error.message)]) from error
        return self._values[key]

    def dependence(self, expression: Expression) -> tuple[str, ...]:
        """Return the indices that the expression's value depends on, lets and functions included, in sorted order."""
        known = self._dependence.get(expression.text)
        if known is None:
            known = self._dependence[expression.text] = tuple(sorted(self._dependence_of(expression, 0)))
        return known

    def _dependence_of(self, expression: Expression, depth: int) -> frozenset[str]:
        if depth > MAX_DEPTH:
            return frozenset()
        found: set[str] = set()
        for name in expression.names:
            owner = self._owner(name)
            if owner is not None:
                found |= owner._dependence_of(owner.lets[name].expression, depth + 1)
            elif name in self.indices and not self._is_constant(name):
                found.add(name)
        for name in expression.calls:
            owner = self._owner(name)
            if owner is not None:
                let = owner.lets[name]
                found |= owner._dependence_of(let.expression, depth + 1) - {let.parameter or ""}
        return frozenset(found)

    def _owner(self, name: str) -> Names | None:
        if name in self.lets:
            return self
        return self.parent._owner(name) if self.parent else None

    def _is_constant(self, name: str) -> bool:
        return name in self.constants or (self.parent is not None and self.parent._is_constant(name))

    def _constant(self, name: str) -> Value:
        if name in self.constants:
            return self.constants[name]
        if self.parent is None:
            raise ExpressionError(f"{name!r} is not known here")
        return self.parent._constant(name)


class _View:
    """Names as one evaluation sees them: with index values bound."""

    __slots__ = ("bindings", "depth", "names")

    def __init__(self, names: Names, bindings: Mapping[str, Value], depth: int) -> None:
        self.names = names
        self.bindings = bindings
        self.depth = depth

    def value(self, name: str) -> Value:
        if name in self.bindings:
            return self.bindings[name]
        owner = self.names._owner(name)
        if owner is None:
            return self.names._constant(name)
        let = owner.lets[name]
        if let.parameter is not None:
            raise ExpressionError(f"{name!r} takes an argument")
        return let.expression.evaluate(_View(owner, self.bindings, self._deeper(name)))

    def call(self, name: str, argument: Value) -> Value:
        owner = self.names._owner(name)
        if owner is None or owner.lets[name].parameter is None:
            raise ExpressionError(f"{name!r} is no function")
        let = owner.lets[name]
        bindings = {**self.bindings, str(let.parameter): argument}
        return let.expression.evaluate(_View(owner, bindings, self._deeper(name)))

    def _deeper(self, name: str) -> int:
        if self.depth >= MAX_DEPTH:
            raise ExpressionError(f"{name!r} is defined by itself")
        return self.depth + 1


def config_values(spec: Spec, config: Mapping[str, object]) -> dict[str, Value]:
    """Return the value of every config key that the spec names; raises MapperError M301 for those that are missing."""
    values: dict[str, Value] = {}
    missing = []
    deferred = []
    for key in spec.config.values():
        found, value = _look_up(config, key.path)
        if found and (value is not None or key.default is None):
            values[key.name] = value
        elif key.default is not None:
            deferred.append(key)
        else:
            missing.append(finding("M301", place=key.place, subject=key.path, key=key.path, spec=spec.id))
    if missing:
        raise MapperError(missing)
    for key in deferred:
        assert key.default is not None
        values[key.name] = Names(values, {}).evaluate(key.default, {}, key.place)
    return values


def quantization_facts(config: Mapping[str, object]) -> dict[str, Value]:
    """Return the built-in names that describe the checkpoint's quantisation, the same for every method.

    `quant_method` is null without quantisation; `block_out`, `block_in` and `group_size` are 1 where there is none.
    """
    found, section = _look_up(config, "quantization_config")
    quantization = section if found and isinstance(section, Mapping) else {}
    block = quantization.get("weight_block_size")
    out, inner = block if isinstance(block, list | tuple) and len(block) == 2 else (1, 1)
    return {
        "quant_method": quantization.get("quant_method"),
        "block_out": out,
        "block_in": inner,
        "group_size": quantization.get("group_size") or 1,
    }


def _look_up(config: Mapping[str, object], path: str) -> tuple[bool, object]:
    """Return (found, value) of a dotted path, at the root or, for composite models, under `text_config`."""
    for root in (config, config.get("text_config")):
        value: object = root
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            return True, value
    return False, None


def as_index_values(values: Iterable[object]) -> tuple[IndexValue, ...]:
    """Return `values` as index values; only integers and words are let through by the schema."""
    return tuple(value for value in values if isinstance(value, int | str))
