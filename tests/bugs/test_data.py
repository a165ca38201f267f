"""The data of the cases and their tests: each case has one test, of the file of its kind."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tests.bugs.harness import Case, lines

TESTS = Path(__file__).parent


def marked() -> list[tuple[str, str]]:
    """Return (kind, id) of every `@case(id)` on a test of the folder."""
    return [
        (path.stem.removeprefix("test_").replace("_", "-"), ast.literal_eval(mark.args[0]))
        for path in sorted(TESTS.glob("test_*.py"))
        for test in ast.walk(ast.parse(path.read_text()))
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_")
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "case"
    ]


def test_every_case_has_one_test_in_the_file_of_its_kind() -> None:
    of_data = [(case["kind"], case["id"]) for case in (json.loads(line) for _, line in lines())]
    assert sorted(marked()) == sorted(of_data)
    assert len({id for _, id in of_data}) == len(of_data)


def test_cases_lie_in_the_file_of_their_kind_and_name_a_public_issue() -> None:
    for file, line in lines():
        found = Case(**json.loads(line))
        assert found.kind == file, found.id
        assert "#" in found.source, found.id
        assert found.scenario.keys() == {"checkpoint", "model", "layout", "config"}, found.id
        assert found.title, found.id
        assert found.what_went_wrong, found.id
        assert found.right_behaviour, found.id
