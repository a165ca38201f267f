import ast
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mapper.expressions import (
    ARGUMENTS,
    CONSTANTS,
    FUNCTIONS,
    WORDS,
    ExpressionError,
    literal,
    names_with_values,
    parse,
)

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
THOROUGH = settings(QUICK, max_examples=10 * settings().max_examples)

VALUES: dict[str, object] = {
    "a": 0,
    "b": 1,
    "c": 5,
    "nothing": None,
    "yes": True,
    "word": "ab",
    "sizes": [3, 0, 5],
    "grid": [[1, 2], []],
}
DOUBLED: dict[str, Callable[[int], int]] = {"doubled": lambda value: value * 2}
ERRORS = (TypeError, ArithmeticError, LookupError, ValueError)


class Recorded(Mapping[str, object]):
    """Names for Python's evaluation and for ours, with the order in which they were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, name: str) -> object:
        self.read.append(name)
        return VALUES[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VALUES)

    def __len__(self) -> int:
        return len(VALUES)

    def value(self, name: str) -> object:
        return self[name]

    def call(self, name: str, argument: object) -> object:
        return DOUBLED[name](argument)  # type: ignore[arg-type]


class Unknown:
    """A scope without a name."""

    def value(self, name: str) -> object:
        raise ExpressionError(f"{name!r} is not known")

    def call(self, name: str, argument: object) -> object:
        raise ExpressionError(f"{name!r} is not known")


def value_of(text: str) -> object:
    return parse(text).evaluate(Unknown())


class PythonNames(Recorded):
    """What only Python has to look up is not recorded."""

    def __getitem__(self, name: str) -> object:
        if name in VALUES:
            return super().__getitem__(name)
        return {**CONSTANTS, **FUNCTIONS, **DOUBLED, **{word: word for word in WORDS}}[name]


# Without brackets around operators, so that precedence decides; what joins texts or lists stands in brackets.
ATOMS = st.sampled_from(["0", "1", "2", "3", "1.5", "a", "b", "c", "nothing", "yes", "null", "true", "false", "len(sizes)"])
LISTS = st.recursive(
    st.sampled_from(["sizes", "grid[0]", "[]", "[1, a, c]", "nothing", "c"]),
    lambda inner: st.builds("({} + {})".format, inner, inner),
    max_leaves=3,
)
TEXTS = st.sampled_from(["'a'", "'abc'", "word", "bfloat16", "first", "(word + 'c')"])


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arithmetic = st.sampled_from(["+", "-", "*", "//", "%"])
    comparison = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    return st.one_of(
        st.builds("{} {} {}".format, inner, arithmetic, inner),
        st.builds("{} {} {}".format, inner, comparison, inner),
        st.builds("{} {} {} {} {}".format, inner, comparison, inner, comparison, inner),
        st.builds("{} {} {}".format, inner, st.sampled_from(["and", "or"]), inner),
        st.builds("{} {} {} {} {}".format, inner, st.sampled_from(["and", "or"]), inner, st.sampled_from(["and", "or"]), inner),
        st.builds("{} if {} else {}".format, inner, inner, inner),
        st.builds("{}({})".format, st.sampled_from(["not ", "-", "", "doubled"]), inner),
        st.builds("not {}".format, inner),
        st.builds("-{}".format, inner),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max", "gcd", "ceil_div"]), inner, inner),
        st.builds("{}[{}]".format, LISTS, inner),
        st.builds("count({}, {})".format, LISTS, inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(["in", "not in"]), LISTS),
        st.builds("({} {} {})".format, TEXTS, st.sampled_from(["in", "==", "!=", "<"]), TEXTS),
        st.builds("({} {} {})".format, inner, st.sampled_from(["is", "is not"]), st.sampled_from(["null", "true"])),
    )


def is_python(text: str) -> bool:
    """`-not a` is none."""
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


EXPRESSIONS = st.recursive(ATOMS, larger, max_leaves=12).filter(is_python)


# --- against Python -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@THOROUGH
@given(EXPRESSIONS)
@example("1 > 2 > 1 // 0")
@example("a < b < c < c // a")
@example("nothing or c")
@example("yes and c and sizes[0]")
@example("not a == b")
@example("-b % c")
@example("2 - 1 - 1")
@example("1.5 // 0")
@example("null < 1")
def test_value_is_what_python_gives_and_the_same_names_are_read(text: str) -> None:
    python, ours = PythonNames(), Recorded()
    try:
        expected = eval(text, {"__builtins__": {}}, python)
    except ERRORS:
        with pytest.raises(ExpressionError):
            parse(text).evaluate(ours)
    else:
        found = parse(text).evaluate(ours)
        assert (type(found), repr(found)) == (type(expected), repr(expected))
    assert ours.read == python.read


@THOROUGH
@given(EXPRESSIONS)
def test_every_name_that_is_read_is_among_the_names(text: str) -> None:
    scope, parsed = Recorded(), parse(text)
    with suppress(ExpressionError):
        parsed.evaluate(scope)
    assert set(scope.read) <= parsed.names <= VALUES.keys()
    assert parsed.calls == ({"doubled"} if "doubled" in text else frozenset())


@QUICK
@given(EXPRESSIONS)
def test_pickled_expression_has_the_same_value(text: str) -> None:
    parsed, scope = parse(f"  {text} "), Recorded()
    copy = pickle.loads(pickle.dumps(parsed))
    assert copy == parsed == parse(text)
    assert (copy.text, copy.names, copy.calls) == (text, parsed.names, parsed.calls)
    try:
        expected = parsed.evaluate(scope)
    except ExpressionError:
        return
    assert repr(copy.evaluate(scope)) == repr(expected)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
@example(None)
@example(True)
@example([False, None, math.inf, -math.inf])
def test_literal_is_its_value_also_after_pickling(value: object) -> None:
    for expression in (literal(value), pickle.loads(pickle.dumps(literal(value)))):
        assert repr(expression.evaluate(Unknown())) == repr(value)
        assert not expression.names


@QUICK
@given(st.text(st.sampled_from("abc01.()[]{}<>=!+-*/%,: '\"\\\n\t#@&|~^lambdforiné"), max_size=25))
def test_any_text_is_an_expression_or_refused_at_a_column_within_it(text: str) -> None:
    column = 0
    try:
        assert parse(parse(text).text) == parse(text)
    except ExpressionError as error:
        column = error.column
    assert 0 <= column <= len(text.strip())


# --- meaning --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ceil_div(7, 2)", 4),
        ("ceil_div(6, 3)", 2),
        ("ceil_div(-7, 2)", -3),
        ("gcd(128, 96)", 32),
        ("count([1, 2, 1], 1)", 2),
        ("max(1, 5, 3) - min([4, 2])", 3),
        ("[1, 2] + [3]", [1, 2, 3]),
        ("'a' + 'b'", "ab"),
        ("first", "first"),
        ("float8_e4m3fn == 'float8_e4m3fn'", True),
        ("null is null", True),
        ("0 or null", None),
        ("0 or 7", 7),
        ("3 and 7", 7),
        ("1, 2", [1, 2]),
        ("-inf < 0", True),
    ],
)
def test_values(text: str, value: object) -> None:
    found = value_of(text)
    assert (type(found), found) == (type(value), value)


def test_names_and_calls() -> None:
    parsed = parse("is_moe(layer + 1) and ratio(layer) == head_dim or first")
    assert parsed.names == {"layer", "head_dim"}
    assert parsed.calls == {"is_moe", "ratio"}
    assert names_with_values({"layer", "first", "null", "int8"}) == {"layer"}


def test_every_function_has_its_number_of_arguments() -> None:
    assert ARGUMENTS.keys() == FUNCTIONS.keys()


# --- nesting and safety ---------------------------------------------------------------------------------------------


SHAPES = (
    "({})", "[{}]", "not {}", "-{}", "1 + {}", "{} + 1", "{}[0]", "x[{}]", "f({})", "1 if x else {}", "{}.a", "1 ** {}",
    "lambda: {}",
)  # fmt: skip


@pytest.mark.parametrize("depth", [50, 90, 300, 450, 500, 700, 1000, 3000, 20_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_deep_nesting_is_computed_or_refused_but_never_crashes(shape: str, depth: int) -> None:
    before, after = shape.split("{}")
    outcome: object = None
    try:
        outcome = parse(before * depth + "1" + after * depth).evaluate(Recorded())
    except ExpressionError as error:
        outcome = error.message
    assert outcome is not None


@pytest.mark.parametrize("shape", ["not {}", "-{}", "1 + {}", "{} + 1", "{}[0]", "1 if b else {}"])
def test_too_deep_nesting_is_said_to_be_that(shape: str) -> None:
    before, after = shape.split("{}")
    with pytest.raises(ExpressionError) as caught:
        parse(before * 20_000 + "1" + after * 20_000)
    assert caught.value.message == "the expression is nested too deeply"


def test_expression_that_this_stack_is_too_short_for_is_refused() -> None:
    parsed = parse("not " * 300 + "b")

    def deeper(depth: int) -> object:
        return parsed.evaluate(Recorded()) if depth == 0 else deeper(depth - 1)

    with pytest.raises(ExpressionError) as caught:
        deeper(sys.getrecursionlimit() - 300)
    assert caught.value.message == "the expression is nested too deeply"


def test_shallow_nesting_is_allowed() -> None:
    assert value_of("(" * 50 + "1" + ")" * 50) == 1
    assert value_of("1" + " + 1" * 200) == 201
    assert value_of("not " * 100 + "true") is True


def test_evaluation_touches_no_attribute_and_calls_nothing_of_the_values() -> None:
    class Trap:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"{name} was read")

        def __call__(self, *arguments: object) -> object:
            raise AssertionError("the value was called")

    class Traps(Unknown):
        def value(self, name: str) -> object:
            return Trap()

    for text in ("trap.__class__", "trap.a.b", "(trap)()", "trap()", "[trap][0](1)"):
        with pytest.raises(ExpressionError):
            parse(text).evaluate(Traps())
    for text in ("__import__('os')", "eval('1')", "trap(1)"):
        with pytest.raises(ExpressionError, match=r"^'\w+' is not known$"):
            parse(text).evaluate(Traps())


def test_words_stand_for_themselves() -> None:
    """The dtypes that torch and safetensors share, and the stages of a pipeline."""
    floats = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    integers = ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]
    words = [*floats, *integers, "first", "last", "both", "all"]
    assert sorted(WORDS) == sorted(words)
    assert [value_of(word) for word in words] == words


def test_an_expression_is_its_text() -> None:
    parsed = parse("doubled(a)")
    assert repr(parsed) == "Expression(text='doubled(a)', names=frozenset({'a'}), calls=frozenset({'doubled'}))"
    assert parsed == replace(parsed, names=frozenset(), calls=frozenset())
    assert parsed != parse("doubled(b)")


def test_a_comparison_keeps_what_its_test_gives() -> None:
    class Answer:
        def __lt__(self, other: object) -> list[int]:
            return [1]

    class Answers(Unknown):
        def value(self, name: str) -> object:
            return Answer()

    assert parse("x < 1").evaluate(Answers()) == [1]
    with pytest.raises(ExpressionError, match="'count' takes 2 arguments, found 3"):
        parse("count(sizes, 1, 2)")
