"""`mapper check`: a spec proved against a checkpoint's headers, from its names, or from a config on all layouts."""

from __future__ import annotations

import argparse

from mapper.cli.arguments import add_program, add_spec, inputs_of, program_for_names, program_of, ranks_of
from mapper.cli.output import Result
from mapper.cli.targets import read_targets
from mapper.diagnostics import MapperError, finding
from mapper.report import check, check_layouts, check_names

EXAMPLES = (
    "mapper check --checkpoint ./DeepSeek-V3 --runtime vllm --layout tp=8,pp=2,dp=2,ep=16",
    "mapper check deepseek_v2 --checkpoint DeepSeek-V3.header.json.gz --runtime vllm --targets ranks.json --format json",
    "mapper check my.yaml --checkpoint ./model --skip 'vision.**' --why 'text only'",
    "mapper check deepseek_v2 --config DeepSeek-V3 --runtime vllm --all-layouts 16",
    "mapper check --checkpoint model.safetensors.index.json --names-only --runtime vllm",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_spec(parser)
    add_program(parser, needs_checkpoint=False)
    parser.add_argument(
        "--targets",
        metavar="T.json",
        nargs="+",
        help="the model's own parameters, {name: {shape, dtype}}: one object for every rank, or one for each",
    )
    parser.add_argument(
        "--all-layouts", metavar="N", type=int, help="prove every legal layout of up to N ranks, from the config alone"
    )
    parser.add_argument(
        "--names-only", action="store_true", help="judge the names in an index alone, where its files are not at hand"
    )


def run(arguments: argparse.Namespace) -> Result:
    """Prove every rank of the layout, or the one asked about, or all layouts; or judge names alone."""
    if arguments.all_layouts is not None:
        return _all_layouts(arguments)
    if arguments.checkpoint is None:
        raise _misused("the following arguments are required: --checkpoint (or --all-layouts N)")
    if arguments.names_only:
        _refuse(arguments, "--names-only", ("rank", "targets"))
        names_report = check_names(*program_for_names(arguments))
        return Result(names_report, names_report.ok, names_report.findings)
    targets = read_targets(arguments.targets) if arguments.targets else None
    program, checkpoint = program_of(arguments)
    assert checkpoint is not None, "--checkpoint is given"
    report = check(program, checkpoint, ranks=ranks_of(arguments), targets=targets)
    return Result(report, report.ok, report.findings)


def _all_layouts(arguments: argparse.Namespace) -> Result:
    _refuse(arguments, "--all-layouts", ("layout", "rank", "targets", "names_only"))
    if arguments.all_layouts < 1:
        raise _misused(f"argument --all-layouts: {arguments.all_layouts} is fewer than 1 rank")
    report = check_layouts(inputs_of(arguments).program, max_ranks=arguments.all_layouts)
    found = report.counterexample
    return Result(report, report.ok, found.findings if found is not None else ())


def _refuse(arguments: argparse.Namespace, argument: str, others: tuple[str, ...]) -> None:
    values = {name: getattr(arguments, name) for name in others}
    given = [f"--{name.replace('_', '-')}" for name, value in values.items() if value not in (None, "") and value is not False]
    if given:
        raise _misused(f"argument {argument}: not allowed with {', '.join(given)}")


def _misused(problem: str) -> MapperError:
    return MapperError([finding("M902", hint="see mapper check --help", problem=problem)])
