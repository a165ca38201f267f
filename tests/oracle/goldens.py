"""Reads the goldens: what every parameter of one rank held after vLLM's own `load_weights`.

Each parameter was filled with `SENTINEL_BYTE` before the load, so an element that vLLM did not write is known.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tests.oracle.reduce import DEFAULTS, read_lines
from tests.oracle.tensors import SENTINEL_BYTE

FOLDER = Path(__file__).with_name("goldens")

Box = tuple[tuple[int, int], ...]
Untouched = Literal["sentinel", "init", "any"]


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a parameter that vLLM left alone, and what its constructor had put there.

    `box` bounds the part in (start, stop) per dim, `fraction` is its share of the elements, `init` holds up to four
    different bit patterns as big-endian hex, `sha256_with_init` is the digest with the constructor's values in the part.
    Where the constructor left memory uninitialised, `init` holds what PyTorch's deterministic mode fills it with.
    """

    box: Box
    fraction: float
    init: tuple[str, ...]
    sha256_with_init: str


@dataclass(frozen=True, slots=True)
class GoldenParam:
    """One parameter after the load. `sha256` is over its raw bytes, the sentinel standing where vLLM wrote nothing."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str
    untouched: Region | None


@dataclass(frozen=True, slots=True)
class GoldenRank:
    """One rank after the load. `rank` counts tp fastest, then pp; dp is 1; with `ep` the experts are dealt over tp * dp ranks.

    `mtp` and `dspark` are draft models; `mega` is DeepGEMM's mega MoE; `capability` is the compute capability of the platform.
    `aliases` are further names of a parameter, (alias, name). `pp_layers` is the half-open range of decoder layers that
    this stage holds, None for a draft model. `extra` are tensors that the load creates beside the parameters.
    """

    family: str
    vllm: str
    tp: int
    pp: int
    ep: bool
    redundant: int
    placement: str
    mtp: bool
    dspark: bool
    mega: bool
    capability: str
    rank: int
    pp_layers: tuple[int, int] | None
    params: tuple[GoldenParam, ...]
    aliases: tuple[tuple[str, str], ...]
    extra: tuple[GoldenParam, ...]

    @property
    def runtime(self) -> str:
        """The runtime of a spec that loads this model."""
        return "vllm-mtp" if self.mtp else "vllm-dspark" if self.dspark else "vllm"

    @property
    def options(self) -> dict[str, bool]:
        """The options of a spec under which it loads this model."""
        return {"mega_moe": True} if self.mega else {}

    @property
    def setting(self) -> str:
        """Family, runtime, layout and what is not at its default: all that the ranks of one engine have in common."""
        mega = " mega_moe" if self.mega else ""
        capability = "" if self.capability == DEFAULTS["cap"] else f" sm{self.capability}"
        return f"{self.family} {self.runtime} {layout_text(self)}{mega}{capability}"

    def __str__(self) -> str:
        return f"{self.setting} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A rank on which vLLM itself failed; it has no golden."""

    layout: Mapping[str, Any]
    error: str

    @property
    def text(self) -> str:
        """The layout as a user of mapper writes it."""
        fields = self.layout
        return _layout_text(fields["tp"], fields["pp"], fields["ep"], fields["redundant"], fields["placement"] or "linear")


def family_names(folder: Path = FOLDER) -> list[str]:
    """Return the families that have goldens."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in folder.glob("*.jsonl.gz"))


def iter_ranks(family: str, folder: Path = FOLDER) -> Iterator[GoldenRank]:
    """Yield every rank of every layout that vLLM loaded without an error."""
    header, *lines = read_lines(folder / f"{family}.jsonl.gz")
    assert header["num_ranks"] == len(lines), f"{family}: expected {header['num_ranks']} ranks, found {len(lines)}"
    for line in lines:
        first, end = line["pp_layers"]
        yield GoldenRank(
            family=header["family"],
            vllm=header["vllm"],
            tp=line["tp"],
            pp=line["pp"],
            ep=line["ep"],
            redundant=line["redundant"],
            placement=line["placement"],
            mtp=line["mtp"],
            dspark=line.get("dspark", DEFAULTS["dspark"]),
            mega=line.get("mega", DEFAULTS["mega"]),
            capability=line.get("cap", DEFAULTS["cap"]),
            rank=line["rank"],
            pp_layers=None if first is None else (first, end),
            params=tuple(map(_param, line["params"])),
            aliases=tuple((alias, name) for alias, name in line["aliases"]),
            extra=tuple(map(_param, line["extra"])),
        )


def failed_ranks(family: str) -> list[FailedRank]:
    """Return the ranks that are missing from the goldens because vLLM could not build or load them."""
    header = read_lines(FOLDER / f"{family}.jsonl.gz")[0]
    return [
        FailedRank({key: value for key, value in each.items() if key != "error"}, each["error"]) for each in header["failed"]
    ]


def layout_text(rank: GoldenRank) -> str:
    """Return the layout as a user of mapper writes it; fields at their default are left out, sizes never are."""
    return _layout_text(rank.tp, rank.pp, rank.ep, rank.redundant, rank.placement)


def _layout_text(tp: int, pp: int, ep: bool, redundant: int, placement: str) -> str:
    parts = [f"tp={tp}", f"pp={pp}", "dp=1", f"ep={tp if ep else 1}"]
    if redundant:
        parts.append(f"redundant_experts={redundant}")
    if placement != "linear":
        parts.append(f"placement={placement}")
    return ",".join(parts)


def sentinel_tensors(rank: GoldenRank) -> dict[str, torch.Tensor]:
    """Return a tensor for every parameter of the rank, filled as vLLM's were before its load."""
    return {param.name: sentinel_tensor(param.shape, param.dtype) for param in rank.params}


def sentinel_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in which every byte is the sentinel."""
    return torch.full((math.prod(shape) * dtype.itemsize,), SENTINEL_BYTE, dtype=torch.uint8).view(dtype).reshape(shape)


def compare(
    rank: GoldenRank, tensors: Mapping[str, torch.Tensor], *, untouched: Untouched | Mapping[str, Untouched] = "sentinel"
) -> list[str]:
    """Return one sentence per difference between `tensors` and what vLLM's load left on the rank.

    `tensors` has every parameter by name, and what the load creates beside them; aliases may be there too and are compared as
    the parameter they name. Where vLLM left a part of a parameter alone, `untouched` says what is expected in that part, for
    all parameters or by name:

    - "sentinel": nothing was written; `tensors` were filled with the sentinel before the load (see `sentinel_tensors`);
    - "init": the values of vLLM's constructor;
    - "any": whatever; only the elements that vLLM wrote are compared.
    """
    expected = {param.name: param for param in (*rank.params, *rank.extra)}
    expected |= {alias: expected[name] for alias, name in rank.aliases}
    aliases = {alias for alias, _ in rank.aliases}
    differences = [f"{name}: missing" for name in expected if name not in tensors and name not in aliases]
    for name, tensor in tensors.items():
        if name in expected:
            param = expected[name]
            mode = untouched if isinstance(untouched, str) else untouched.get(param.name, "sentinel")
            differences += [f"{name}: {each}" for each in _differences(param, tensor, mode)]
        else:
            differences.append(f"{name}: not a parameter of this rank")
    return differences


def _differences(param: GoldenParam, tensor: torch.Tensor, untouched: Untouched) -> list[str]:
    found = []
    if tuple(tensor.shape) != param.shape:
        found.append(f"shape is {tuple(tensor.shape)}, expected {param.shape}")
    if tensor.dtype != param.dtype:
        found.append(f"dtype is {tensor.dtype}, expected {param.dtype}")
    if found:
        return found
    expected = param.sha256
    if param.untouched is not None and untouched == "init":
        expected = param.untouched.sha256_with_init
    elif param.untouched is not None and untouched == "any":
        tensor = _with_sentinel(tensor, param.untouched)
    digest = sha256(tensor)
    if digest == expected:
        return []
    num_unwritten = int(unwritten_mask(tensor).sum())
    return [
        f"bytes differ (sha256 {digest[:12]}, expected {expected[:12]}; {num_unwritten} of {tensor.numel()} elements unwritten)"
    ]


def sha256(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the tensor's elements as contiguous raw bytes."""
    return hashlib.sha256(_raw(tensor).numpy().tobytes()).hexdigest()


def unwritten_mask(tensor: torch.Tensor) -> torch.Tensor:
    """Return which elements still hold the sentinel in all their bytes, in the tensor's shape."""
    return (_raw(tensor).reshape(-1, tensor.dtype.itemsize) == SENTINEL_BYTE).all(dim=1).reshape(tensor.shape)


def _with_sentinel(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    num_elements = math.prod(stop - start for start, stop in region.box)
    assert num_elements == round(region.fraction * tensor.numel()), f"the untouched part does not fill its box {region.box}"
    masked = tensor.detach().clone(memory_format=torch.contiguous_format)
    part = masked[tuple(slice(start, stop) for start, stop in region.box)]
    part.copy_(sentinel_tensor(tuple(part.shape), part.dtype))
    return masked


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def _param(record: Mapping[str, Any]) -> GoldenParam:
    region = None
    if "untouched_box" in record:
        region = Region(
            box=tuple((start, stop) for start, stop in record["untouched_box"]),
            fraction=record["untouched_fraction"],
            init=tuple(record["untouched_init"]),
            sha256_with_init=record["sha256_with_init"],
        )
    dtype = getattr(torch, record["dtype"])
    return GoldenParam(record["name"], tuple(record["shape"]), dtype, record["sha256"], region)
