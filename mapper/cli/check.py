"""`mapper check`: a spec proved against a checkpoint's headers."""

from __future__ import annotations

import argparse

from mapper.cli.arguments import add_program, add_spec, program_of, ranks_of
from mapper.cli.output import Result
from mapper.cli.targets import read_targets
from mapper.report import check

EXAMPLES = (
    "mapper check --checkpoint ./DeepSeek-V3 --runtime vllm --layout tp=8,pp=2,dp=2,ep=16",
    "mapper check deepseek_v2 --checkpoint DeepSeek-V3.header.json.gz --runtime vllm --targets ranks.json --format json",
    "mapper check my.yaml --checkpoint ./model --skip 'vision.**' --why 'text only'",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_spec(parser)
    add_program(parser)
    parser.add_argument(
        "--targets",
        metavar="T.json",
        nargs="+",
        help="the model's own parameters, {name: {shape, dtype}}: one object for every rank, or one for each",
    )


def run(arguments: argparse.Namespace) -> Result:
    """Prove every rank of the layout, or the one asked about."""
    targets = read_targets(arguments.targets) if arguments.targets else None
    program, checkpoint = program_of(arguments)
    assert checkpoint is not None, "--checkpoint is required"
    report = check(program, checkpoint, ranks=ranks_of(arguments), targets=targets)
    return Result(report, report.ok, report.findings)
