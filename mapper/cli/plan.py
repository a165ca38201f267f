"""`mapper plan`: what one rank does."""

from __future__ import annotations

import argparse

from mapper.cli.arguments import add_program, add_spec, program_of
from mapper.cli.output import Result
from mapper.report.plan import describe_plan

EXAMPLES = (
    "mapper plan --checkpoint ./DeepSeek-V3 --runtime vllm --layout tp=8,ep=8 --rank 3",
    "mapper plan deepseek_v2 --checkpoint DeepSeek-V3.header.json.gz --runtime vllm --steps --format json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_spec(parser)
    add_program(parser)
    parser.add_argument("--steps", action="store_true", help="list every copy, one a line")


def run(arguments: argparse.Namespace) -> Result:
    """Plan the rank asked about, or rank 0."""
    program, checkpoint = program_of(arguments)
    assert checkpoint is not None, "--checkpoint is required"
    report = describe_plan(program, checkpoint, has_steps=arguments.steps)
    return Result(report, report.ok, report.findings)
