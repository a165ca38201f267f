"""The names an expression may use: config keys, options, axis sizes, quantisation facts, lets and index values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mapper.diagnostics import MapperError, Place, finding
from mapper.expressions import Expression, ExpressionError, Value
from mapper.pattern import Bindings
from mapper.spec.model import Let, Spec


class Names:
    """A level of names: constants and lets, on top of the level around it. Results are kept, since rules repeat.

    A let hides what lies around it; a function's parameter is known in its own expression only, as in Python.
    """

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
        self._free: dict[str, tuple[str, ...]] = {}

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
        try:
            return self._value_of(expression, bindings, ())
        except ExpressionError as error:
            raise MapperError([finding("M303", place=place, problem=error.message)]) from error

    def dependence(self, expression: Expression) -> tuple[str, ...]:
        """Return the indices that the expression's value depends on, lets and functions included, in sorted order."""
        known = self._dependence.get(expression.text)
        if known is None:
            free = self._free_names(expression)
            known = self._dependence[expression.text] = tuple(name for name in free if name in self.indices)
        return known

    def reasons(self, expression: Expression) -> list[tuple[str, Value]]:
        """Return the constants that the expression's value depends on, lets and functions included, in sorted order."""
        names = {
            name
            for level, inner, parameter in self._reached(expression)
            for name in inner.names - {parameter}
            if level._owner(name) is None and self._is_constant(name)
        }
        return [(name, self._constant(name)) for name in sorted(names)]

    def _value_of(self, expression: Expression, bindings: Bindings, active: Active) -> Value:
        key = (expression.text, *[bindings.get(name) for name in self._free_names(expression)])
        if key not in self._values:
            self._values[key] = expression.evaluate(_View(self, bindings, active))
        return self._values[key]

    def _free_names(self, expression: Expression) -> tuple[str, ...]:
        """Return the names whose values come from the bindings: indices, the leaf, and what nobody knows."""
        known = self._free.get(expression.text)
        if known is None:
            known = self._free[expression.text] = tuple(sorted(self._find_free_names(expression)))
        return known

    def _find_free_names(self, expression: Expression) -> set[str]:
        found: set[str] = set()
        for level, inner, parameter in self._reached(expression):
            names = inner.names - {parameter}
            found |= {name for name in names if level._owner(name) is None and not self._is_constant(name)}
        return found

    def _reached(self, expression: Expression) -> Iterator[tuple[Names, Expression, str | None]]:
        """Yield the expression and those of the lets that it uses, each with its level and its parameter."""
        seen: set[tuple[int, str]] = set()
        waiting: list[tuple[Names, Expression, str | None]] = [(self, expression, None)]
        while waiting:
            level, inner, parameter = waiting.pop()
            yield level, inner, parameter
            for name in (inner.names - {parameter}) | inner.calls:
                owner = level._owner(name)
                if owner is not None and (id(owner), name) not in seen:
                    seen.add((id(owner), name))
                    waiting.append((owner, owner.lets[name].expression, owner.lets[name].parameter))

    def _owner(self, name: str) -> Names | None:
        if name in self.lets:
            return self
        return self.parent._owner(name) if self.parent else None

    def _is_constant(self, name: str) -> bool:
        return name in self.constants or (self.parent is not None and self.parent._is_constant(name))

    def _constant(self, name: str) -> Value:
        if name in self.constants:
            return self.constants[name]
        assert self.parent is not None, f"{name!r} is no constant"
        return self.parent._constant(name)


Active = tuple[tuple[int, str], ...]
"""The lets that are being evaluated, each by its level and name."""


class _View:
    """Names as one evaluation sees them: with index values bound, inside a function also its argument."""

    __slots__ = ("active", "argument", "bindings", "names", "parameter")

    def __init__(
        self, names: Names, bindings: Bindings, active: Active, parameter: str | None = None, argument: Value = None
    ) -> None:
        self.names = names
        self.bindings = bindings
        self.active = active
        self.parameter = parameter
        self.argument = argument

    def value(self, name: str) -> Value:
        if name == self.parameter:
            return self.argument
        owner = self.names._owner(name)
        if owner is not None:
            let = owner.lets[name]
            if let.parameter is not None:
                raise ExpressionError(f"{name!r} takes an argument")
            return owner._value_of(let.expression, self.bindings, self._inside(owner, name))
        if self.names._is_constant(name):
            return self.names._constant(name)
        if name in self.bindings:
            return self.bindings[name]
        raise ExpressionError(f"{name!r} is not known here")

    def call(self, name: str, argument: Value) -> Value:
        owner = self.names._owner(name)
        if owner is None or owner.lets[name].parameter is None:
            raise ExpressionError(f"{name!r} is no function")
        let = owner.lets[name]
        view = _View(owner, self.bindings, self._inside(owner, name), let.parameter, argument)
        return let.expression.evaluate(view)

    def _inside(self, owner: Names, name: str) -> Active:
        if (id(owner), name) in self.active:
            raise ExpressionError(f"{name!r} is defined by itself")
        return (*self.active, (id(owner), name))


def config_values(spec: Spec, config: Mapping[str, object]) -> dict[str, Value]:
    """Return the value of every config key that the spec names.

    A default may use any other key, whether or not that one has its default too. Raises MapperError: M301 for those that are
    missing, M308 for those that have one value at the root and another in `text_config`.
    """
    values: dict[str, Value] = {}
    wrong = []
    deferred = []
    for key in spec.config.values():
        found = _look_up(config, key.path)
        stated = [each for each in found if each is not None]
        value = stated[0] if stated else None
        if any(each != value for each in stated):
            root, inner = stated
            wrong.append(finding("M308", place=key.place, subject=key.path, key=key.path, root=root, inner=inner))
        elif found and (value is not None or key.default is None):
            values[key.name] = value
        elif key.default is not None:
            deferred.append((key, key.default))
        else:
            wrong.append(finding("M301", place=key.place, subject=key.path, key=key.path, spec=spec.id))
    if wrong:
        raise MapperError(wrong)
    defaults = Names(values, {key.name: Let(key.name, None, default, key.place) for key, default in deferred})
    return {**values, **{key.name: defaults.evaluate(default, {}, key.place) for key, default in deferred}}


def quantization_facts(config: Mapping[str, object]) -> dict[str, Value]:
    """Return the built-in names that describe the checkpoint's quantisation, the same for every method.

    `quant_method`, `weight_bits` and `scales_per` are null without quantisation; `block_out`, `block_in` and `group_size`
    are 1 where there is none. What the groups of `config_groups` (compressed-tensors) do not agree on is null.
    """
    quantization = quantization_section(config)
    block = quantization.get("weight_block_size")
    out, inner = block if isinstance(block, list | tuple) and len(block) == 2 else (1, 1)
    return {
        "quant_method": quantization.get("quant_method"),
        "block_out": out,
        "block_in": inner,
        "group_size": _of_weights(quantization, ("group_size",), 1),
        "weight_bits": _of_weights(quantization, ("bits", "num_bits"), None),
        "scales_per": "block" if out > 1 else _scales_per(quantization),
    }


def model_dtype(config: Mapping[str, object]) -> Value:
    """Return the dtype of what is not quantised, by the key that Transformers writes now or wrote before; null if neither."""
    return next((each for key in ("dtype", "torch_dtype") for each in _look_up(config, key) if each is not None), None)


def quantization_section(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config's `quantization_config`; empty where there is none."""
    section = next(iter(_look_up(config, "quantization_config")), None)
    return section if isinstance(section, Mapping) else {}


def _scales_per(quantization: Mapping[str, object]) -> Value:
    """Return what one scale of a matrix is for: 'tensor', 'channel' or 'group'; null where that is not said, or another.

    GPTQ's groups of columns in the order of their activations (`desc_act`) are no groups of neighbours.
    """
    match quantization.get("quant_method"):
        case "fp8":
            return "tensor"
        case "awq" | "gptq":
            is_channel, is_reordered = quantization.get("group_size") == -1, quantization.get("desc_act")
            return None if is_reordered else "channel" if is_channel else "group"
        case "compressed-tensors":
            return _of_weights(quantization, ("strategy",), None)
        case "modelopt":
            algorithm = quantization.get("quant_algo")
            return {"FP8": "tensor", "NVFP4": "group"}.get(algorithm) if isinstance(algorithm, str) else None
    return None


def _of_weights(quantization: Mapping[str, object], keys: tuple[str, ...], default: Value) -> Value:
    """Return what the quantisation says of weights under the first of `keys`, at the root or in every one of its groups."""
    groups = quantization.get("config_groups")
    given = [each.get("weights") for each in groups.values()] if isinstance(groups, Mapping) else [quantization]
    values = {_first(each, keys) or default if isinstance(each, Mapping) else default for each in given}
    return values.pop() if len(values) == 1 else None


def _first(given: Mapping[str, object], keys: tuple[str, ...]) -> Value:
    return next((given[key] for key in keys if key in given), None)


def _look_up(config: Mapping[str, object], path: str) -> list[object]:
    """Return the values of a dotted path: at the root and, for composite models, under `text_config`."""
    found: list[object] = []
    for root in (config, config.get("text_config")):
        value: object = root
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            found.append(value)
    return found
