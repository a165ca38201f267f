"""The arguments that name a spec, a checkpoint, a runtime and a layout, and the program that follows from them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mapper.checkpoint import Checkpoint, CheckpointNames, json_text, read_names
from mapper.compiler import Program, compile
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.expressions import Value
from mapper.layout import Layout
from mapper.spec import load_spec
from mapper.spec.configs import bundled_config
from mapper.spec.model import Spec
from mapper.yaml_source import resolve

FROM_HERE = "command line"


def add_spec(parser: argparse.ArgumentParser) -> None:
    """Add the positional SPEC."""
    parser.add_argument(
        "spec",
        metavar="SPEC",
        nargs="?",
        help="a bundled spec's id, an architecture, or a path (default: the config's architecture)",
    )


def add_program(parser: argparse.ArgumentParser, *, needs_checkpoint: bool = True) -> None:
    """Add what a program is compiled from, the spec aside."""
    parser.add_argument(
        "--checkpoint", metavar="C", required=needs_checkpoint, help="a folder, an index, a .safetensors file or a manifest"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the model's config.json, or the name of a bundled one (default: the one beside the checkpoint)",
    )
    parser.add_argument("--runtime", metavar="R", help="whose module layout; needed where the spec has several")
    parser.add_argument("--layout", metavar="L", default="", help="such as tp=8,pp=2,dp=2,ep=16 (default: one rank)")
    parser.add_argument("--rank", metavar="N", type=int, help="one rank of the layout")
    parser.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="an option of the spec; may be repeated"
    )
    parser.add_argument("--skip", metavar="PATTERN", action="append", default=[], help="leave sources out; may be repeated")
    parser.add_argument("--why", metavar="TEXT", action="append", default=[], help="the reason of a --skip, one for each")
    parser.add_argument("--scope", metavar="PREFIX", help="the names lack this prefix, on both sides")
    parser.add_argument("--mount", metavar="PREFIX", help="the names have this prefix in front, on both sides")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What programs are compiled from, whatever the layout."""

    spec: Spec
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    runtime: str
    options: Mapping[str, Value]
    skips: Sequence[tuple[str, str]]
    scope: str | None
    mount: str | None

    def program(self, layout: Layout, *, rank: int = 0) -> Program:
        """Return the program on one layout and rank; raises MapperError."""
        program = compile(
            self.spec, config=self.config, runtime=self.runtime, layout=layout, rank=rank, options=dict(self.options)
        )
        if self.scope:
            program = program.scoped(self.scope)
        if self.mount:
            program = program.mounted(self.mount)
        return program.with_skips(self.skips, origin=FROM_HERE) if self.skips else program


def inputs_of(arguments: argparse.Namespace, *, runtime: str | None = None) -> Inputs:
    """Return what the arguments name; raises MapperError. `runtime` is chosen where none is named and the spec has it."""
    checkpoint = Checkpoint.open(arguments.checkpoint) if arguments.checkpoint is not None else None
    return _inputs(arguments, checkpoint, config_of(arguments.config, checkpoint), runtime)


def _inputs(
    arguments: argparse.Namespace, checkpoint: Checkpoint | None, config: Mapping[str, Any], runtime: str | None
) -> Inputs:
    options = options_of(arguments.option)
    skips = skips_of(arguments.skip, arguments.why)
    spec = load_spec(arguments.spec or architecture_of(config, arguments.config or arguments.checkpoint))
    chosen = arguments.runtime or runtime_of(spec, runtime)
    return Inputs(spec, config, checkpoint, chosen, options, skips, arguments.scope, arguments.mount)


def program_of(arguments: argparse.Namespace) -> tuple[Program, Checkpoint | None]:
    """Return the program that the arguments describe, and the checkpoint if one is named; raises MapperError."""
    layout = Layout.parse(arguments.layout)
    inputs = inputs_of(arguments)
    return inputs.program(layout, rank=arguments.rank or 0), inputs.checkpoint


def program_for_names(arguments: argparse.Namespace) -> tuple[Program, CheckpointNames]:
    """Return the program that the arguments describe, and the names in the index of a checkpoint; raises MapperError."""
    layout = Layout.parse(arguments.layout)
    names = read_names(arguments.checkpoint)
    return _inputs(arguments, None, config_of(arguments.config, names), None).program(layout), names


def ranks_of(arguments: argparse.Namespace) -> list[int] | None:
    """Return the rank that the arguments ask about, or None for all."""
    return None if arguments.rank is None else [arguments.rank]


def runtime_of(spec: Spec, preferred: str | None = None) -> str:
    """Return the spec's only runtime, or the preferred one; raises MapperError M905 where there is a choice."""
    if preferred is not None and preferred in spec.runtimes:
        return preferred
    if len(spec.runtimes) != 1:
        known = ", ".join(spec.runtimes) or "none"
        raise MapperError([finding("M905", hint=f"add --runtime {next(iter(spec.runtimes), '')}", spec=spec.id, known=known)])
    return next(iter(spec.runtimes))


def options_of(texts: Sequence[str]) -> dict[str, Value]:
    """Return options from NAME=VALUE; a value is read as in YAML."""
    options: dict[str, Value] = {}
    findings: list[Diagnostic] = []
    for text in texts:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name:
            findings.append(finding("M906", text=text))
        elif name in options:
            findings.append(finding("M907", name=name))
        else:
            options[name] = resolve(value)
    if findings:
        raise MapperError(findings)
    return options


def skips_of(patterns: Sequence[str], whys: Sequence[str]) -> list[tuple[str, str]]:
    """Return skips as (pattern, why); each pattern has a reason."""
    if len(patterns) != len(whys):
        raise MapperError([finding("M908", num_skips=len(patterns), num_whys=len(whys))])
    empty = [
        finding("M909", pattern=pattern) for pattern, why in zip(patterns, whys, strict=True) if not (pattern and why.strip())
    ]
    if empty:
        raise MapperError(empty)
    return list(zip(patterns, whys, strict=True))


def config_of(path: str | None, checkpoint: Checkpoint | CheckpointNames | None) -> Mapping[str, Any]:
    """Return the config in a file, or a bundled one by name, or the checkpoint's own; raises MapperError."""
    if path is not None and not path.endswith(".json") and "/" not in path and not os.path.exists(path):
        return bundled_config(path)
    if path is not None:
        config = read_json(path, what="config")
        if not isinstance(config, dict):
            found = json_text.kind_of(config)
            raise MapperError([finding("M414", subject=path, what="config", path=path, expected="an object", found=found)])
        return config
    if checkpoint is None or checkpoint.config is None:
        source = repr(checkpoint.path) if checkpoint is not None else "no checkpoint, which"
        raise MapperError([finding("M904", hint="add --config FILE", source=source)])
    return checkpoint.config


def architecture_of(config: Mapping[str, Any], source: str) -> str:
    """Return the architecture that a config names; raises MapperError M903."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    raise MapperError([finding("M903", hint="name the spec", source=f"the config of {source!r}")])


def read_json(path: str, *, what: str) -> Any:
    """Return the value in a JSON file, packed or not; raises MapperError."""
    findings: list[Diagnostic] = []
    text = json_text.require_text(path, what=what, findings=findings)
    value = None if text is None else json_text.parse_text(text, path=path, what=what, findings=findings)
    if text is not None and not findings:
        _, repeated = json_text.parse_carefully(text)
        findings += [json_text.repeated_keys(repeated, path=path)] if repeated else []
    if findings:
        raise MapperError(findings)
    return value
