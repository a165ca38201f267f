"""Real failures of other loaders as cases: the data, the tensors that it describes, and loads that a test compares."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import Diagnostic, MapperError
from mapper.expressions import Value
from mapper.layout import Layout
from mapper.load import Loader, LoadReport, UpdateSession
from mapper.ops.dtypes import torch_name
from tests.loads import Tensors, all_raw, fill, spec_of, told, write

FOLDER = Path(__file__).with_name("cases")


@dataclass(frozen=True, slots=True)
class Case:
    """One line of `cases/<kind>.jsonl`: a public issue in miniature.

    A test reads the scenario through `case[section]`, `sources` and `targets`; `used` collects what it has read.
    """

    id: str
    source: str
    title: str
    kind: str
    scenario: Mapping[str, Any]
    what_went_wrong: str
    right_behaviour: str
    used: set[str] = field(default_factory=set, compare=False)

    def __getitem__(self, section: str) -> Any:
        self.used.add(section)
        return self.scenario[section]

    @property
    def unused(self) -> set[str]:
        """The sections of the scenario that say something and were not read."""
        return {section for section, content in self.scenario.items() if content} - self.used

    def sources(self, form: str | None = None) -> Tensors:
        """Return the checkpoint's tensors, or those of one form of it."""
        return tensors(self["checkpoint"] if form is None else self["checkpoint"][form])

    def targets(self, form: str | None = None) -> Tensors:
        """Return the model's tensors, or those of one form of it, every byte the sentinel."""
        found = tensors(self["model"] if form is None else self["model"][form])
        fill(found)
        return found

    def program(
        self,
        folder: Path,
        text: str,
        *,
        layout: Layout | None = None,
        rank: int = 0,
        config: Mapping[str, object] | None = None,
        options: Mapping[str, Value] | None = None,
    ) -> Program:
        """Compile a spec of the runtime `own`, for the scenario's layout and config if none are given.

        `text` is as `spec_of` takes it.
        """
        spec = spec_of(Path(mkdtemp(dir=folder)), text)
        config = self["config"] if config is None else config
        layout = Layout(**self["layout"]) if layout is None else layout
        return compile(spec, config=config, runtime="own", layout=layout, rank=rank, options=options)


def case(id: str) -> pytest.MarkDecorator:
    """Mark the one test of the case `id`; the test takes it as `bug`, and has to read all that its scenario says."""
    return pytest.mark.parametrize("bug", [id], ids=[id], indirect=True)


@cache
def lines() -> tuple[tuple[str, str], ...]:
    """Return (file, text) of every case of the data."""
    found = ((path.stem, path.read_text().splitlines()) for path in sorted(FOLDER.glob("*.jsonl")))
    return tuple((file, line) for file, texts in found for line in texts)


def read_case(id: str) -> Case:
    """Return the case of this id, with nothing of it read."""
    return next(Case(**each) for each in (json.loads(line) for _, line in lines()) if each["id"] == id)


_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,]*)\](?: all (?P<value>[\d.]+)| (?P<rows>row i = i))?")


def tensors(texts: Mapping[str, str]) -> Tensors:
    """Return the tensors of such texts as 'F32[2,3] all 1', 'F32[4,2] row i = i' and, every element different, 'BF16[3,5]'."""
    found: Tensors = {}
    start = 1
    for name, text in texts.items():
        read = _TENSOR.fullmatch(text)
        assert read, f"{text!r} is no tensor"
        shape = tuple(int(size) for size in read["shape"].split(",") if size)
        dtype = getattr(torch, str(torch_name(read["dtype"])))
        if read["value"]:
            found[name] = torch.full(shape, float(read["value"])).to(dtype)
        elif read["rows"]:
            found[name] = (
                torch.arange(float(shape[0])).reshape(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous().to(dtype)
            )
        else:
            found[name] = counted(start, shape, dtype)
        start += prod(shape)
    return found


def counted(start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return start, start + 1, ...: as values where the dtype holds them all, else as bit patterns of the elements."""
    numbers = torch.arange(start, start + prod(shape)).reshape(shape)
    if dtype.itemsize == 1:  # 127, where the count starts again, is the sentinel; it is prime, so that rows differ
        return (numbers % 127).to(torch.uint8).view(dtype)
    return numbers.to(torch.int16).view(dtype) if dtype.itemsize == 2 else numbers.to(dtype)


def save(folder: Path, sources: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Write the tensors to a folder of their own, and open them."""
    return write(Path(mkdtemp(dir=folder)), sources, {})


def load(program: Program, folder: Path, sources: Mapping[str, torch.Tensor], targets: Tensors) -> LoadReport:
    """Fill `targets` from files, after making sure that a stream in the reverse order fills them alike."""
    streamed = {name: each.clone() for name, each in targets.items()}
    with Loader(program, streamed).update() as session:
        session.feed_all(reversed(sources.items()))
    report = Loader(program, targets).load(save(folder, sources))
    assert all_raw(streamed) == all_raw(targets)
    return report


def refusal(
    program: Program, folder: Path, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> tuple[Diagnostic, ...]:
    """Return why a load from files is refused, after making sure that it wrote nothing.

    A stream is refused for one of the same reasons, at the tensor itself or at the end.
    """
    before = all_raw(targets)
    with pytest.raises(MapperError) as caught:
        Loader(program, targets).load(save(folder, sources))
    assert all_raw(targets) == before
    session = Loader(program, {name: each.clone() for name, each in targets.items()}).update()
    with pytest.raises(MapperError) as streamed:
        _feed_and_finish(session, sources)
    assert set(told(streamed.value.diagnostics)) <= set(told(caught.value.diagnostics))
    return caught.value.diagnostics


def _feed_and_finish(session: UpdateSession, sources: Mapping[str, torch.Tensor]) -> None:
    session.feed_all(sources.items())
    session.finish()
