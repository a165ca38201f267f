"""The functions that `call` and `restore` name: registered ones, and those of a package by path."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mapper.diagnostics import MapperError, Place, finding
from mapper.messages.suggest import did_you_mean

Function = Callable[..., Any]

_REGISTERED: dict[str, Function] = {}


def register(name: str) -> Callable[[Function], Function]:
    """Register the decorated function under `name`, for `call` and `restore` of a spec.

    A called function is given the tensors that are left, in order, and the operation's further keys by name; it returns one
    tensor. It may write to its arguments only where its step says `consumes`.
    """

    def keep(function: Function) -> Function:
        _REGISTERED[name] = function
        return function

    return keep


def require_function(name: str, step: str, place: Place) -> Function:
    """Return the function `name`, importing `package.module:function`; raises MapperError M630 at `place`."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    module, colon, attribute = name.partition(":")
    problem = "no function is registered under that name"
    if colon:
        try:
            found = getattr(import_module(module), attribute, None)
        except ImportError as error:
            found, problem = None, f"{error}"
        else:
            problem = f"{module!r} has no function {attribute!r}"
        if callable(found):
            return found  # type: ignore[no-any-return]
    hint = did_you_mean(name, _REGISTERED)
    raise MapperError([finding("M630", place=place, subject=name, hint=hint, step=step, name=name, problem=problem)])
