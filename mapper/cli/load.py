"""`mapper load`: a checkpoint into a model, and the account of it. Only this command imports torch."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mapper.cli.arguments import Inputs, add_program, add_spec, inputs_of
from mapper.cli.output import Result
from mapper.diagnostics import MapperError, finding
from mapper.layout import Layout
from mapper.ops.dtypes import safetensors_name
from mapper.report.load import LoadReport

EXAMPLES = (
    "mapper load --checkpoint ./DeepSeek-V2-Lite --model DeepseekV2ForCausalLM",
    "mapper load --checkpoint ./DeepSeek-V3 --model my_package.models:build --runtime vllm --layout tp=8 --rank 3",
)
GIVEN_TO_FACTORIES = ("config", "layout", "rank", "dtype")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that went well."""

    spec: str
    runtime: str
    report: LoadReport

    def to_json(self) -> dict[str, object]:
        """Return the account as an object for JSON."""
        return {"ok": True, "spec": self.spec, "runtime": self.runtime, **self.report.to_json(), "findings": []}

    def to_text(self) -> str:
        """Return the account for a person."""
        return f"{self.spec} {self.runtime}, {self.report.to_text()}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_spec(parser)
    add_program(parser)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        required=True,
        help="a class of Transformers, built on meta, or a factory package.module:function that returns a module or a "
        "mapping of tensors; a factory is given those of config, layout, rank and dtype that it has parameters for",
    )
    parser.add_argument("--dtype", metavar="D", help="the dtype to build the model in (default: the config's)")
    parser.add_argument("--progress", action="store_true", help="show a progress bar even where stderr is no terminal")


def run(arguments: argparse.Namespace) -> Result:
    """Build the model, load the checkpoint into it and report."""
    layout = Layout.parse(arguments.layout)
    is_factory = ":" in arguments.model
    dtype = _dtype_name(arguments.dtype) if arguments.dtype else None
    inputs = inputs_of(arguments, runtime=None if is_factory else "transformers")
    program = inputs.program(layout, rank=arguments.rank or 0)
    checkpoint = inputs.checkpoint
    assert checkpoint is not None, "--checkpoint is required"
    if checkpoint.is_manifest:
        raise MapperError([finding("M651", subject=checkpoint.path, path=checkpoint.path)])
    try:
        import torch

        from mapper.load import Loader
    except ModuleNotFoundError as error:
        raise _needs(error.name or "torch", "torch") from error
    torch_dtype = getattr(torch, dtype) if dtype is not None else None
    if is_factory:
        given = {"config": inputs.config, "layout": layout, "rank": program.rank, "dtype": torch_dtype}
        model = _made(arguments.model, given)
    else:
        model = _built(arguments.model, _config_source(arguments, inputs), torch_dtype)
    with _progress_bar(is_wanted=arguments.progress) as progress:
        report = Loader(program, model).load(checkpoint, progress=progress)
    return Result(Loaded(program.spec.id, program.runtime, report), is_ok=True)


def _dtype_name(text: str) -> str:
    name = text.removeprefix("torch.")
    if safetensors_name(name) is None:
        raise MapperError([finding("M902", hint="such as bfloat16", problem=f"argument --dtype: unknown dtype {text!r}")])
    return name


def _config_source(arguments: argparse.Namespace, inputs: Inputs) -> str:
    """Return where Transformers reads the config: a file, or a folder."""
    if arguments.config is not None:
        return str(arguments.config)
    path = str(arguments.checkpoint)
    return path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))


def _built(name: str, source: str, dtype: Any) -> Any:
    try:
        from mapper.integrations.transformers import build
    except ModuleNotFoundError as error:
        raise _needs(error.name or "transformers", "transformers") from error
    with _told_as_model_error(name):
        return build(source, architecture=name, dtype=dtype)


def _made(name: str, given: Mapping[str, Any]) -> Any:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:  # as `python -m` does: a factory often lies beside what is run
        sys.path.insert(0, os.getcwd())
    with _told_as_model_error(name):
        factory = import_module(module_name)
        for part in function_name.split("."):
            factory = getattr(factory, part)
        parameters = inspect.signature(factory).parameters  # type: ignore[arg-type]
        return factory(**{key: given[key] for key in GIVEN_TO_FACTORIES if key in parameters})  # type: ignore[operator]


@contextmanager
def _told_as_model_error(name: str) -> Iterator[None]:
    """Tell what goes wrong in code that is not mapper's as a finding that says where."""
    try:
        yield
    except MapperError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error}"
        hint = f"raised at {frame.filename}:{frame.lineno}"
        raise MapperError([finding("M912", subject=name, hint=hint, name=name, problem=problem)]) from error


def _needs(package: str, extra: str) -> MapperError:
    return MapperError(
        [finding("M914", hint=f"pip install mapper-weights[{extra}]", command="load", package=package, extra=extra)]
    )


@contextmanager
def _progress_bar(*, is_wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yield what shows the bytes done on stderr: on a terminal, or where it is asked for."""
    if not is_wanted and not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        if is_wanted:
            raise _needs("tqdm", "torch") from error
        yield None
        return
    bar: tqdm[Any] | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:  # a load that fails before its first byte shows no bar
            bar = tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr)
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
