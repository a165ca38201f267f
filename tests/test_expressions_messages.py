import re

import pytest

from mapper.expressions import MAX_LENGTH, MAX_NUMBER, ExpressionError, parse
from tests.test_expressions import Unknown, value_of


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 0, "expected an expression, found nothing"),
        ("  ", 0, "expected an expression, found nothing"),
        ("a +", 3, "'a +' is not an expression"),
        ("a b", 2, "'a b' is not an expression"),
        ("a = 1", 2, "'a = 1' is not an expression"),
        ("[1,\n2] b c", 7, "'[1,\\n2] b c' is not an expression"),
        ("1 + True", 4, "True is written 'true' here"),
        ("False", 0, "False is written 'false' here"),
        ("a is None", 5, "None is written 'null' here"),
        ("a / 2", 0, "'/' stands in dims only; use '//' or ceil_div"),
        ("  1 + quant.method", 4, "attributes such as '.method' are not part of the language"),
        ("'é' + a.b", 6, "attributes such as '.b' are not part of the language"),
        ("[1,\n 'é', a.b]", 10, "attributes such as '.b' are not part of the language"),
        ("a.b(1)", 0, "'a.b(1)' is not part of the language"),
        ("2 ** 3", 0, "'2 ** 3' is not part of the language"),
        ("1 << 3", 0, "'1 << 3' is not part of the language"),
        ("a | b", 0, "'a | b' is not part of the language"),
        ("a @ b", 0, "'a @ b' is not part of the language"),
        ("~a", 0, "'~a' is not part of the language"),
        ("+a", 0, "'+a' is not part of the language"),
        ("1 + a[1:2]", 4, "'a[1:2]' is not part of the language"),
        ("{1: 2}", 0, "'{1: 2}' is not part of the language"),
        ("{1}", 0, "'{1}' is not part of the language"),
        ("[x for x in a]", 0, "'[x for x in a]' is not part of the language"),
        ("lambda: 1", 0, "'lambda: 1' is not part of the language"),
        ("(a := 1)", 1, "'(a := 1)' is not part of the language"),
        ("[*a]", 1, "'*a' is not part of the language"),
        ("f'{a}'", 0, "\"f'{a}'\" is not part of the language"),
        ("b'a'", 0, "\"b'a'\" is not part of the language"),
        ("1j", 0, "'1j' is not part of the language"),
        ("...", 0, "'...' is not part of the language"),
        ("min(a, key=len)", 0, "'min(a, key=len)' is not part of the language"),
        ("min(*a)", 4, "'*a' is not part of the language"),
        ("(f)(1)(2)", 0, "'f(1)(2)' is not part of the language"),
        ("1 + len", 4, "the function 'len' needs arguments"),
        ("1 + f(1, 2)", 4, "'f' takes 1 argument, found 2"),
        ("f()", 0, "'f' takes 1 argument, found 0"),
        ("ceil_div(1)", 0, "'ceil_div' takes 2 arguments, found 1"),
        ("1 - len()", 4, "'len' takes 1 argument, found 0"),
        ("len(a, b)", 0, "'len' takes 1 argument, found 2"),
        ("min()", 0, "'min' takes at least 1 argument, found 0"),
        ("gcd(4)", 0, "'gcd' takes at least 2 arguments, found 1"),
    ],
)  # fmt: skip
def test_refusal_says_what_and_where(text: str, column: int, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert (caught.value.message, caught.value.column) == (message, column)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("null < 1", "'null < 1' fails: '<' not supported between instances of 'NoneType' and 'int'"),
        ("1 // 0", "'1 // 0' fails: integer division or modulo by zero"),
        ("[1][3]", "'[1][3]' fails: list index out of range"),
        ("max([])", "'max([])' fails: max() arg is an empty sequence"),
        ("257 is 257", "'257 is 257' fails: 'is' compares with null, true or false; use '=='"),
        ("'a' is not 'a'", "\"'a' is not 'a'\" fails: 'is' compares with null, true or false; use '=='"),
        ("len(3)", "'len(3)' fails: object of type 'int' has no len()"),
        ("'a' * 3", "\"'a' * 3\" fails: '*' is for numbers, found 'a' and 3"),
        ("'%s' % 3", "\"'%s' % 3\" fails: '%' is for numbers, found '%s' and 3"),
        ("[0] * 3", "'[0] * 3' fails: '*' is for numbers, found [0] and 3"),
        ("'a' - 'b'", "\"'a' - 'b'\" fails: '-' is for numbers, found 'a' and 'b'"),
        ("'a' + 1", "\"'a' + 1\" fails: '+' is for numbers, found 'a' and 1"),
        ("null + 1", "'null + 1' fails: '+' is for numbers, found None and 1"),
        (f"1.5 * {10**400}", f"'1.5 * {10**400}' fails: int too large to convert to float"),
        (f"{2**40} * {2**40}", f"'{2**40} * {2**40}' fails: the result of '*' is beyond 2**63"),
        ("unheard_of", "'unheard_of' is not known"),
    ],
)
def test_failure_says_which_expression_fails_and_why(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        value_of(text)
    assert caught.value.message == message


def test_texts_and_lists_do_not_grow_without_end() -> None:
    class Long(Unknown):
        def value(self, name: str) -> object:
            return "a" * MAX_LENGTH if name == "text" else [0] * MAX_LENGTH

    for name in ("text", "numbers"):
        with pytest.raises(ExpressionError, match=r"fails: the result of '\+' is longer than 65536$"):
            parse(f"{name} + {name}").evaluate(Long())


def test_the_largest_results_are_results() -> None:
    assert value_of(f"{MAX_NUMBER - 1} + 1") == MAX_NUMBER == 2**63
    with pytest.raises(ExpressionError, match="beyond 2"):
        value_of(f"{MAX_NUMBER} + 1")
    half = "x" * (MAX_LENGTH // 2)
    assert len(str(value_of(f"'{half}' + '{half}'"))) == MAX_LENGTH
    with pytest.raises(ExpressionError, match=f"longer than {MAX_LENGTH}"):
        value_of(f"'{half}x' + '{half}'")


@pytest.mark.parametrize("sign", ["+", "-", "*", "//", "%"])
def test_an_operator_that_meets_no_numbers_is_named(sign: str) -> None:
    with pytest.raises(ExpressionError, match=re.escape(f"{sign!r} is for numbers, found 1 and None")):
        value_of(f"1 {sign} null")


def test_a_comparison_that_is_not_of_the_language_is_refused() -> None:
    with pytest.raises(ExpressionError, match="is not an expression"):
        parse("1 <> 2")


def test_a_column_on_a_later_line_counts_from_the_start_of_the_text() -> None:
    with pytest.raises(ExpressionError) as raised:
        parse("[a,\n  b,\n  c d]")
    assert raised.value.column == len("[a,\n  b,\n  c ")
