"""Small specs in the grammar, valid by construction, each with a config that it is for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from mapper import load_spec
from mapper.spec.model import Spec

RUNTIME = "engine"
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DrawnSpec:
    """A spec with its text and a config that it is for."""

    text: str
    spec: Spec
    config: dict[str, object]

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(f"{self.text}\nconfig: {self.config}")


@st.composite
def specs(draw: st.DrawFn) -> DrawnSpec:
    """Draw a spec with some of the kinds of rules that the language has, at the top level and in each layer."""
    layer_rules = [_RULES[kind](draw, f"{kind}_{number}") for number, kind in enumerate(_kinds(draw))]
    top_rules = [_RULES[kind](draw, f"top_{kind}_{number}") for number, kind in enumerate(_kinds(draw))]
    for rule in top_rules:
        stage = draw(st.sampled_from((None, "first", "last", "both")))
        if stage is not None:
            rule["stage"] = stage
    first = draw(st.integers(0, 2))
    shift = draw(st.sampled_from(("{layer}", "{layer + 1}", "{layer - first_layer}")))
    prefixes: object = "model.layers.{layer}"
    if shift != "{layer}":
        prefixes = {"source": f"layers.{shift}", "target": "model.layers.{layer}"}
    grouped = draw(st.booleans())
    body: Entry = {"at": prefixes, "rules": [] if grouped else layer_rules}
    if grouped:
        body = {"at": prefixes, "use": "layer"}
    parity = draw(st.sampled_from((None, 0, 1)))
    if parity is not None:
        body["when"] = f"is_chosen(layer) == ({parity} == 1)"
    document: Entry = {
        "spec": 1,
        "id": "drawn",
        "title": "Drawn",
        "version": "0.1.0",
        "architectures": ["Drawn"],
        "config": {"required": ["width", "wide", "heads", "few", "num_layers", "num_experts", "first_layer", "rows"]},
        "let": {"is_chosen(layer)": "layer % 2 == 1", "head_rows": "heads * 3", "few_rows": "few * 3"},
        "index": {
            "layer": {"first": "first_layer", "count": "num_layers", "axis": "pp"},
            "expert": {"count": "num_experts", "axis": "ep"},
            "branch": {"values": ["red", "blue"]},
        },
        "formats": {
            "scaled": [{"leaves": {"weight": ["out", "in"], "weight_scale": {"dims": ["parts"]}}}],
            "neutral": [{"leaves": {"weight": ["v", "h"], "scale": {"dims": ["v"], "neutral": 1}}}],
        },
        "blocks": {"layer": layer_rules},
        "runtimes": {
            RUNTIME: {
                "mesh": "vllm",
                "skip": [
                    {"source": "**.inv_freq", "why": "computed"},
                    {"source": "old.{branch}.*", "why": "of an earlier version"},
                ],
                "keep": [{"target": "kept.{branch}", "why": "measured"}],
                "rules": [*top_rules, body],
            }
        },
    }
    if not grouped:
        del document["blocks"]
    multiple = draw(st.sampled_from((4, 2, 8, 6)))
    config: dict[str, object] = {
        "architectures": ["Drawn"],
        "width": 7,
        "wide": 5 * multiple,
        "heads": multiple,
        "few": draw(st.sampled_from([each for each in (2, 1, 4) if multiple % each == 0])),
        "num_layers": draw(st.integers(1, 5)),
        "num_experts": draw(st.integers(1, 7)),
        "first_layer": first,
        "rows": draw(st.sampled_from((61, 67))),
    }
    text = yaml.safe_dump(document, sort_keys=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.yaml"
        path.write_text(text)
        return DrawnSpec(text, load_spec(path), config)


def _kinds(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.sampled_from(sorted(_RULES)), min_size=1, max_size=4))


def _bare(draw: st.DrawFn, name: str) -> Entry:
    rule: Entry = {"target": f"{name}.value", "dims": {"a": "wide", "b": "width"}}
    if draw(st.booleans()):
        rule["source"] = f"{name}.old_value"
    if draw(st.booleans()):
        rule["shard"] = {"a": "tp"}
    return rule


def _undimmed(draw: st.DrawFn, name: str) -> Entry:
    return {"copy": [f"{name}.one", f"{name}.two"]}


def _scalar(draw: st.DrawFn, name: str) -> Entry:
    return {"target": f"{name}.{{branch}}_scale", "source": f"{name}.scale", "dims": {}, "optional": True}


def _padded(draw: st.DrawFn, name: str) -> Entry:
    shard: Entry = {"axis": "tp", "pad": 64}
    rule: Entry = {"target": f"{name}.weight", "dims": {"v": "rows", "h": "width"}, "shard": {"v": shard}}
    if draw(st.booleans()):
        rule |= {"target": f"{name}.{{leaf}}", "format": "neutral"}
    if draw(st.booleans()):
        shard["fill"] = 2
    return rule


def _linear(draw: st.DrawFn, name: str) -> Entry:
    return {
        **_format(draw, "linear"),
        "target": f"{name}.{{leaf}}",
        "dims": {"out": "head_rows", "in": "width"},
        "shard": {"out": {"axis": "tp", "units": "heads"}},
    }


def _row_parallel(draw: st.DrawFn, name: str) -> Entry:
    rule: Entry = {"target": f"{name}.{{leaf}}", "dims": {"out": "width", "in": "wide"}, "shard": {"in": "tp"}}
    return {**rule, **_format(draw, "linear")}


def _format(draw: st.DrawFn, plain: str) -> Entry:
    """Draw a format: one leaf of a matrix, or one scale for each part beside it."""
    return {"format": draw(st.sampled_from((plain, "scaled")))}


def _heads(draw: st.DrawFn, name: str) -> Entry:
    """Query heads beside fewer key and value heads, in one source or in three."""
    rule: Entry = {"target": f"{name}.qkv.{{leaf}}"}
    if draw(st.booleans()):
        rule["sources"] = [f"{name}.{part}.{{leaf}}" for part in "qkv"]
    units = ["heads", "few", "few"]
    return {
        **rule,
        **_format(draw, "linear"),
        "dims": {"out": ["head_rows", "few_rows", "few_rows"], "in": "width"},
        "shard": {"out": {"axis": "tp", "units": units}},
    }


def _fused(draw: st.DrawFn, name: str) -> Entry:
    rule: Entry = {
        "target": f"{name}.both.{{leaf}}",
        "sources": [f"{name}.up.{{leaf}}", f"{name}.gate.{{leaf}}"],
        "dims": {"out": ["wide", "wide"], "in": "width"},
        **_format(draw, "linear"),
    }
    if draw(st.booleans()):
        rule["shard"] = {"out": "tp"}
    return rule


def _experts(draw: st.DrawFn, name: str) -> Entry:
    return {
        "target": f"{name}.w13_{{leaf}}",
        "sources": [f"{name}.{{expert}}.up.{{leaf}}", f"{name}.{{expert}}.gate.{{leaf}}"],
        "stack": "expert",
        "dims": {"out": ["wide", "wide"], "in": "width"},
        "shard": {"out": "moe_tp"},
        **_format(draw, "plain"),
    }


def _spellings(draw: st.DrawFn, name: str) -> Entry:
    rule: Entry = {
        "target": f"{name}.weight",
        "any_of": [{"source": f"{name}.new"}, {"source": f"{name}.old"}],
        "dims": {"a": "width", "b": "rows"},
    }
    if draw(st.booleans()):
        rule["others"] = "skip"
    return rule


def _interleaved(draw: st.DrawFn, name: str) -> Entry:
    """Parts that lie head by head on one side and end to end on the other, from one source or from one for each part."""
    is_ragged = draw(st.booleans())
    sizes, slots = ["few_rows", "few_rows", "few_rows"], ["1", "1", "1"]
    if is_ragged:
        sizes, slots = ["2 * few_rows", "few_rows", "few_rows"], ["2", "1", "1"]
    apart, together = "(part few slot width)", "(few part slot width)"
    is_split = draw(st.booleans())
    view = {"view": f"{together} in -> {apart} in", "few": "few", "width": 3, "slot": slots}
    shard: Entry = {"axis": "tp", "units": ["few", "few", "few"], "replicate": True}
    rule: Entry = {"target": f"{name}.qkv.{{leaf}}"}
    if is_split:
        view["view"] = f"{apart} in -> {together} in"
        shard = {"axis": "tp", "units": "few", "joined": True, "replicate": True}
        if draw(st.booleans()):
            rule["sources"] = [f"{name}.{part}.{{leaf}}" for part in "qkv"]
    return {**rule, "dims": {"out": sizes, "in": "width"}, "shard": {"out": shard}, "do": [view]}


def _rotary(draw: st.DrawFn, name: str) -> Entry:
    """Rows of query and key heads in another order, each part for itself; the values stay as they are."""
    rule = _heads(draw, name)
    rule["dims"]["out"] = ["heads * 6", "few * 6", "few * 6"]
    order = draw(st.sampled_from((("half two", "two half"), ("two half", "half two"))))
    view = {"view": f"(head {order[0]}) in -> (head {order[1]}) in", "half": 3, "two": 2, "parts": [1, 2]}
    return {**rule, "do": [view]}


def _shuffled(draw: st.DrawFn, name: str) -> Entry:
    """A dim in a drawn order of its factors, cut anywhere, with values computed on the way."""
    factors = ["a", "b", "c"]
    order = draw(st.permutations(factors))
    operation = draw(st.sampled_from(("view", "repeat")))
    right = [*order, "more"] if operation == "repeat" else list(order)
    if operation == "repeat" and draw(st.booleans()):
        right = ["more", *order]
    sizes: Entry = {"a": "heads", "b": 3} | ({"more": 2} if operation == "repeat" else {})
    formula = f"(a b c) width -> ({' '.join(right)}) width"
    do: list[object] = [{operation: formula, **sizes}]
    do += draw(st.sampled_from(([], ["neg_exp"], [{"multiply": 2}], [{"add": "few"}, {"multiply": "1.5"}])))
    rule: Entry = {"target": f"{name}.value", "dims": {"rows": "heads * 12", "width": "width"}, "do": do}
    if draw(st.booleans()):
        rule["shard"] = {"rows": "tp"}
    return rule


def _computed(draw: st.DrawFn, name: str) -> Entry:
    """Values that are computed from stored ones, some of them over the whole tensor."""
    do = draw(st.sampled_from((["neg_exp"], [{"add": 1}], [{"multiply": "0.5"}], [{"subtract_mean": "a"}])))
    rule: Entry = {"target": f"{name}.value", "dims": {"a": "wide", "b": "width"}, "do": do}
    if draw(st.booleans()):
        rule["cast"] = "float32"
    if draw(st.booleans()):
        rule["shard"] = {"a": "tp"}
    return rule


def _filled(draw: st.DrawFn, name: str) -> Entry:
    return {"target": f"{name}.scale", "dims": {"a": "wide"}, "shard": {"a": "tp"}, "cast": "float32", "do": [{"fill": "1.5"}]}


_RULES: dict[str, Callable[[st.DrawFn, str], Entry]] = {
    "bare": _bare,
    "computed": _computed,
    "experts": _experts,
    "filled": _filled,
    "fused": _fused,
    "heads": _heads,
    "interleaved": _interleaved,
    "linear": _linear,
    "padded": _padded,
    "rotary": _rotary,
    "row": _row_parallel,
    "scalar": _scalar,
    "shuffled": _shuffled,
    "spellings": _spellings,
    "undimmed": _undimmed,
}
