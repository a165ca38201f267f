"""What an engine says about itself, and what follows: the spec, the runtime, the layout, the rank and the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError, finding
from mapper.expressions import Value
from mapper.integrations.vllm.settings import Settings
from mapper.layout import Layout, Placement, rank_at
from mapper.spec import load_spec
from mapper.spec.model import Spec
from mapper.transfer.versions import require_versions

DRAFT_WORDS = {"MTP": "vllm-mtp", "DSpark": "vllm-dspark"}
"""A draft has an architecture of its own, which vLLM makes up from its target's; the word in it tells the runtime."""

OWN_LOADER = "vLLM's own loader works as ever: leave out `--load-format mapper`"

Shapes = Mapping[str, tuple[int, ...]]

SHOWN_OPTIONS: Mapping[str, tuple[str, Callable[[tuple[int, ...]], int]]] = {
    "sink_slots": (".attn_sink", lambda shape: shape[0]),
    "fp4_width": (".routed_experts.w13_weight", lambda shape: shape[1] // 2),
    "mxfp4_width": (".routed_experts.w13_weight", lambda shape: shape[1] // 2),
    "mxfp4_hidden": (".routed_experts.w2_weight", lambda shape: shape[1]),
}
"""Paddings that a kernel asks for: the parameter whose local shape shows them, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What one process of an engine says about the model it has built.

    `architectures` are vLLM's for this model (a draft's differ from those of `config`, the checkpoint's config.json).
    Expert placement and redundancy are what the model's layers have, not what was asked for. `unsupported` names kinds of
    parallelism that are in use and that no layout here describes.
    """

    version: str
    architectures: tuple[str, ...]
    config: Mapping[str, object]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    has_expert_parallelism: bool = False
    redundant_experts: int = 0
    placement: Placement = "linear"
    pp_layers: tuple[int, ...] | None = None
    mega_moe: bool = False
    fuses_shared_experts: bool = False
    unsupported: tuple[str, ...] = ()


def require_known(engine: Engine) -> None:
    """Raise MapperError for a kind of parallelism that no layout describes."""
    if engine.unsupported:
        raise MapperError([finding("M753", subject=what, hint=OWN_LOADER, what=what) for what in engine.unsupported])


def layout_of(engine: Engine) -> Layout:
    """Return the engine's layout; raises MapperError where there is none."""
    return Layout(
        tp=engine.tp,
        pp=engine.pp,
        dp=engine.dp,
        ep=engine.tp * engine.dp if engine.has_expert_parallelism else 1,
        redundant_experts=engine.redundant_experts,
        placement=engine.placement,
        pp_layers=engine.pp_layers,
    )


def rank_of(engine: Engine) -> int:
    """Return the rank of the process in the layout."""
    return rank_at(layout_of(engine), tp=engine.tp_rank, pp=engine.pp_rank, dp=engine.dp_rank)


def runtime_of(engine: Engine, spec: Spec) -> str | None:
    """Return the spec's runtime for the model that the engine has built, or None where it has none."""
    named = architectures_of(engine.config)
    if set(engine.architectures) & {*spec.architectures, *named}:
        return "vllm" if "vllm" in spec.runtimes else None
    drafts = (runtime for word, runtime in DRAFT_WORDS.items() if any(word in each for each in engine.architectures))
    return next((runtime for runtime in drafts if runtime in spec.runtimes), None)


def architectures_of(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the architectures that a config.json names."""
    named = config.get("architectures")
    return tuple(map(str, named)) if isinstance(named, list) else ()


def options_of(engine: Engine, spec: Spec, shapes: Shapes) -> dict[str, Value]:
    """Return those options of the spec that the engine's own state shows; the others stay at their defaults."""
    found: dict[str, Value] = {"mega_moe": engine.mega_moe, "fuse_shared_experts": engine.fuses_shared_experts}
    for option, (suffix, read) in SHOWN_OPTIONS.items():
        shape = next((shape for name, shape in shapes.items() if name.endswith(suffix)), None)
        if shape is not None:
            found[option] = read(shape)
    return {name: value for name, value in found.items() if name in spec.options}


def spec_of(engine: Engine, settings: Settings) -> tuple[Spec, str] | str:
    """Return the spec and the runtime for the engine's model, or why there is none; raises MapperError for a broken spec."""
    names = [settings.spec] if settings.spec is not None else list(architectures_of(engine.config))
    problems = []
    for name in names:
        try:
            spec = load_spec(name)
        except MapperError as error:
            if settings.spec is not None or any(each.code != "M140" for each in error.diagnostics):
                raise
            problems.append(error.diagnostics[0].message)
            continue
        runtime = runtime_of(engine, spec)
        if runtime is not None:
            return spec, runtime
        built = ", ".join(engine.architectures)
        problems.append(f"the spec {spec.id!r} has no runtime for {built}")
    return "; ".join(problems) or "the checkpoint's config.json names no architecture"


def _require_version(program: Program, engine: Engine) -> None:
    try:
        require_versions(program, {"vllm": engine.version})
    except MapperError as error:
        raise MapperError([replace(each, hint=OWN_LOADER) for each in error.diagnostics]) from error


def program_of(engine: Engine, settings: Settings, spec: Spec, runtime: str, shapes: Shapes) -> Program:
    """Return the program of the engine's process; raises MapperError where the spec refuses the version, config or layout."""
    options = {**options_of(engine, spec, shapes), **settings.options}
    layout = layout_of(engine)
    program = compile(spec, config=engine.config, runtime=runtime, layout=layout, rank=rank_of(engine), options=options)
    _require_version(program, engine)
    program = program.with_skips(settings.skips, origin="overlay")
    return program.with_keeps(settings.keeps, origin="overlay")
