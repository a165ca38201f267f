"""Argument parsers whose help teaches and whose errors are findings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

from mapper.cli.output import FORMATS
from mapper.diagnostics import MapperError, finding

EXIT_CODES = "exit codes: 0 fine, 1 findings, 2 wrong use, 3 an error of mapper's own (please report it)"


class Parser(argparse.ArgumentParser):
    """The parser of one command. Its errors are MapperErrors, so that they are told in the chosen format."""

    def __init__(self, command: str, summary: str, examples: Sequence[str]) -> None:
        shown = "\n".join(f"  {each}" for each in examples)
        super().__init__(
            prog=f"mapper {command}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example{'s' if len(examples) != 1 else ''}:\n{shown}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--format", choices=FORMATS, default="text", help="how to print the result (default: text)")

    def error(self, message: str) -> NoReturn:
        raise MapperError([finding("M902", hint=f"see {self.prog} --help", problem=message)])


def help_text(commands: Mapping[str, str]) -> str:
    """Return what `mapper --help` prints."""
    width = max(map(len, commands))
    return "\n".join(
        [
            "usage: mapper COMMAND [arguments]",
            "",
            "Load checkpoints onto PyTorch models from YAML specs, and prove the load before it happens.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {summary}" for name, summary in commands.items()),
            "",
            "example:",
            "  mapper check --checkpoint ./DeepSeek-V3 --runtime vllm --layout tp=8,ep=8",
            "",
            "`mapper COMMAND --help` shows the arguments of a command; `mapper --version` the version.",
            EXIT_CODES,
        ]
    )
