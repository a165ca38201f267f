"""The command line. Each command is a module that is imported when it runs, so that help stays fast.

Exit codes: 0 fine, 1 findings, 2 wrong use, 3 an error of mapper's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from mapper import __version__
from mapper.cli.output import FINDINGS, FINE, INTERNAL, USAGE, Failure, Result, print_failure, print_result, wanted_format
from mapper.cli.parser import Parser, help_text
from mapper.diagnostics import MapperError, finding

COMMANDS: dict[str, str] = {
    "lint": "one spec or all: schema, names, patterns, overlaps, cases, and advice",
    "test": "run the cases that specs pin about themselves",
    "check": "prove a spec against a checkpoint's headers for a layout, or on all layouts; no tensor data",
    "plan": "what one rank does: sources, targets, slices and bytes",
    "explain": "one source name, target name or message code: which rule, which ranks, which slice, why, why not",
    "load": "load a checkpoint into a model and report",
    "bench": "how fast mapper is beside the loaders that are installed, in one run",
}

__all__ = ["COMMANDS", "FINDINGS", "FINE", "INTERNAL", "USAGE", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, print its result, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _keep_unprintable(sys.stdout, sys.stderr)
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has seen enough
        sys.stdout = None
        return FINE
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(help_text(COMMANDS), file=sys.stdout if words else sys.stderr)
        return FINE if words else USAGE
    if words[0] in ("-V", "--version"):
        print(f"mapper {__version__}")
        return FINE
    style = wanted_format(words)
    try:
        return print_result(_result_of(words), style)
    except SystemExit as stop:  # argparse has printed the help of a command
        return stop.code if isinstance(stop.code, int) else FINE
    except MapperError as error:
        return print_failure(Failure.of(error), style)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the last place where an error can be told from a finding
        return print_failure(Failure.internal(error), style)


def _result_of(words: list[str]) -> Result:
    command, *rest = words
    if command not in COMMANDS:
        from mapper.messages.suggest import did_you_mean

        raise MapperError([finding("M901", hint=did_you_mean(command, COMMANDS), command=command)])
    module = import_module(f"mapper.cli.{command}")
    parser = Parser(command, COMMANDS[command], module.EXAMPLES)
    module.configure(parser)
    result: Result = module.run(parser.parse_args(rest))
    return result


def _keep_unprintable(*streams: object) -> None:
    """Print a character that the terminal lacks as an escape; a name in a checkpoint may hold any."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
