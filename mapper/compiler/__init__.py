"""Spec -> Program: conditions become index sets, sizes become numbers, rules become families."""

from mapper.compiler.program import Program, compile

__all__ = ["Program", "compile"]
