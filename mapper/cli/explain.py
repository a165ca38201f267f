"""`mapper explain`: one name, or one message code."""

from __future__ import annotations

import argparse

from mapper.cli.arguments import add_program, add_spec, program_of, ranks_of
from mapper.cli.output import Result
from mapper.diagnostics import finding
from mapper.explain import explain_code, explain_name

EXAMPLES = (
    "mapper explain M502",
    "mapper explain model.layers.3.mlp.gate.weight --checkpoint ./DeepSeek-V3 --runtime vllm --layout tp=8,ep=8",
    "mapper explain lm_head.weight deepseek_v2 --config config.json --runtime vllm --layout tp=2 --rank 1",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="a source name, a target name, or a code such as M502")
    add_spec(parser)
    add_program(parser, needs_checkpoint=False)


def run(arguments: argparse.Namespace) -> Result:
    """Explain the name with the checkpoint, or with a config alone."""
    name: str = arguments.name
    if is_code(name):
        return Result(explain_code(name.upper()), is_ok=True)
    program, checkpoint = program_of(arguments)
    explanation = explain_name(program, name, ranks=ranks_of(arguments), checkpoint=checkpoint)
    source = explanation.source
    findings = source.findings if source is not None else ()
    if not explanation.is_known and not findings:
        findings = (finding("M916", subject=name, name=name, spec=program.spec.id, runtime=program.runtime),)
    return Result(explanation, explanation.is_known, findings)


def is_code(name: str) -> bool:
    """Return whether a word is a message code and not a tensor's name."""
    return len(name) == 4 and name[0] in "Mm" and name[1:].isdecimal()
