"""`extends`, `drop` and replacement by id."""

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapper.diagnostics import MapperError
from mapper.spec import load_spec
from mapper.spec.bundled import read_spec
from mapper.spec.inherit import merge
from mapper.spec.model import Group, Rule, Spec
from mapper.yaml_source import parse_text, plain

HEAD = "spec: 1\nid: {id}\ntitle: T\nversion: 1.0.0\narchitectures: [A{id}]\n"

PARENT = (
    HEAD.format(id="parent")
    + """\
config: {required: [a, b], optional: {c: 1}}
let: {x: a, f(i): i}
index: {i: {count: 2, axis: pp}}
formats: {f: [{leaves: {w: [out]}}]}
blocks:
  layer:
    - {target: l0, id: l0}
    - {at: g, rules: [{target: l1, id: l1}, {target: l2}], id: g}
runtimes:
  r:
    mesh: vllm
    versions: {engine: '>=1', other: '>=1'}
    requires: [{that: a, why: w, id: q}]
    skip: [{source: s0, why: w, id: s0}, {source: s1, why: w}]
    keep: [{target: k0, why: w}]
    rules: [{target: r0, id: r0}, {use: layer}]
cases: [{config: c, runtime: r, skips: [s0]}]
"""
)


def load(tmp_path: Path, child: str, parent: str = PARENT) -> Spec:
    (tmp_path / "parent.yaml").write_text(parent)
    path = tmp_path / "child.yaml"
    path.write_text("spec: 1\nid: child\nextends: parent\n" + textwrap.dedent(child))
    return read_spec(path)


def rendered(tmp_path: Path, child: str) -> str:
    with pytest.raises(MapperError) as raised:
        load(tmp_path, child)
    return str(raised.value).replace(f"{tmp_path}/", "")


def targets(items) -> list[object]:
    return [[*targets(item.items), item.use] if isinstance(item, Group) else str(item.targets[0]) for item in items]


def test_a_child_that_says_nothing_is_its_parent_without_cases(tmp_path):
    child = load(tmp_path, "")
    parent = read_spec(tmp_path / "parent.yaml")
    assert (child.id, child.extends, child.status, child.cases) == ("child", "parent", "draft", ())
    assert (child.title, child.version, child.architectures) == (parent.title, parent.version, parent.architectures)
    for section in ("config", "let", "index", "formats", "blocks", "runtimes"):
        assert getattr(child, section) == getattr(parent, section)
    assert child.digest != parent.digest


def test_status_is_earned_and_not_inherited(tmp_path):
    assert load(tmp_path, "", PARENT + "status: verified\n").status == "draft"


def test_mappings_merge_and_definitions_are_replaced_whole(tmp_path):
    spec = load(
        tmp_path,
        """
        config: {required: [c, d], optional: {b: 2, e: 3}}
        let: {"f(j)": j + 1, y: 2}
        index: {i: {count: 3}}
        formats: {g: [{leaves: {v: [out]}}]}
        """,
    )
    required = [key.name for key in spec.config.values() if key.default is None]
    assert (required, list(spec.config)) == (["a", "c", "d"], ["a", "c", "d", "b", "e"])
    assert {name: let.parameter for name, let in spec.let.items()} == {"x": None, "f": "j", "y": None}
    assert spec.index["i"].axis is None
    assert [leaf.name for name in "fg" for leaf in spec.formats[name].alternatives[0].leaves] == ["w", "v"]


def test_a_format_of_the_same_name_replaces_the_inherited_one(tmp_path):
    (alternative,) = load(tmp_path, "formats: {f: [{leaves: {v: [out]}}]}\n").formats["f"].alternatives
    assert [leaf.name for leaf in alternative.leaves] == ["v"]


def test_lists_append(tmp_path):
    spec = load(
        tmp_path,
        """
        blocks: {layer: [{target: l3}], other: [{target: o}]}
        runtimes:
          r:
            rules: [{target: r1}]
            skip: [{source: s2, why: w}]
            keep: [{target: k1, why: w}]
            requires: [{that: b, why: w}]
            versions: {engine: '>=2'}
          s: {}
        cases: [{config: d, runtime: r, skips: [s2]}]
        """,
    )
    runtime = spec.runtimes["r"]
    assert targets(spec.blocks["layer"]) == ["l0", ["l1", "l2", None], "l3"]
    assert targets(spec.blocks["other"]) == ["o"]
    assert targets(runtime.rules) == ["r0", ["layer"], "r1"]
    assert [str(each.pattern) for each in runtime.skip] == ["s0", "s1", "s2"]
    assert [str(each.pattern) for each in runtime.keep] == ["k0", "k1"]
    assert [each.that.text for each in runtime.requires] == ["a", "b"]
    assert {package: each.specifier for package, each in runtime.versions.items()} == {"engine": ">=2", "other": ">=1"}
    assert runtime.mesh.like == "vllm"
    assert list(spec.runtimes) == ["r", "s"]
    assert [case.config for case in spec.cases] == ["d"]


def test_an_item_with_an_inherited_id_replaces_it_where_it_stands(tmp_path):
    spec = load(tmp_path, "blocks: {layer: [{target: new, id: l1}, {copy: [p, q], id: l0}]}\n")
    assert targets(spec.blocks["layer"]) == ["p", "q", ["new", "l2", None]]


def test_drop_removes_inherited_items_at_any_depth(tmp_path):
    spec = load(
        tmp_path,
        """
        blocks: {layer: [{drop: [l1, l0]}, {target: l3}]}
        runtimes: {r: {rules: [drop: [r0]], skip: [drop: [s0]], requires: [drop: [q]]}}
        """,
    )
    assert targets(spec.blocks["layer"]) == [["l2", None], "l3"]
    assert targets(spec.runtimes["r"].rules) == [["layer"]]
    assert [str(each.pattern) for each in spec.runtimes["r"].skip] == ["s1"]
    assert spec.runtimes["r"].requires == ()


def test_a_dropped_group_takes_its_rules_along(tmp_path):
    assert targets(load(tmp_path, "blocks: {layer: [drop: [g]]}\n").blocks["layer"]) == ["l0"]


def test_places_stay_in_the_file_where_a_value_was_written(tmp_path):
    rules = load(tmp_path, "blocks: {layer: [{target: l3}]}\n").blocks["layer"]
    first, last = rules[0], rules[-1]
    assert isinstance(first, Rule)
    assert isinstance(last, Rule)
    assert (Path(first.place.file).name, first.place.line) == ("parent.yaml", 12)
    assert (Path(last.place.file).name, last.place.line) == ("child.yaml", 4)


def test_a_spec_extends_a_spec_that_extends(tmp_path):
    (tmp_path / "root.yaml").write_text(PARENT.replace("id: parent", "id: root"))
    parent = "spec: 1\nid: parent\nextends: root\nblocks: {layer: [{target: l3, id: l3}]}\n"
    spec = load(tmp_path, "blocks: {layer: [{drop: [l0, l3]}]}\n", parent)
    assert targets(spec.blocks["layer"]) == [["l1", "l2", None]]


def flat(items) -> list[str]:
    """Return the targets of rules at any depth."""
    return [text for item in items for text in (flat(item.items) if isinstance(item, Group) else [str(item.targets[0])])]


def test_deepseek_v32_is_v2_with_an_indexer_and_always_a_low_rank_q():
    parent, child = load_spec("deepseek_v2"), load_spec("deepseek_v32")
    inherited, indexer = child.blocks["vllm_layer"][:-1], child.blocks["vllm_layer"][-1:]
    assert flat(indexer) == ["wq_b.{leaf}", "wk_weights_proj.{leaf}", "k_norm.{leaf}"]
    dropped = ["q_proj.{leaf}", "kv_a_proj_with_mqa.{leaf}"]
    assert flat(inherited) == [each for each in flat(parent.blocks["vllm_layer"]) if each not in dropped]
    assert child.architectures == ("DeepseekV32ForCausalLM",)
    assert {name for name, runtime in child.runtimes.items() if runtime != parent.runtimes[name]} == {"transformers"}
    assert set(child.config) - set(parent.config) == {"index_n_heads", "index_head_dim", "torch_dtype"}


IDS = st.lists(st.sampled_from("abcdef"), unique=True, max_size=5)


@given(IDS, IDS, st.data())
def test_merging_equals_dropping_replacing_and_appending(inherited, own, data):
    dropped = data.draw(st.lists(st.sampled_from(inherited), unique=True)) if inherited else []
    parent = parse_text(f"blocks: {{b: [{', '.join(f'{{target: old, id: {id}}}' for id in inherited)}]}}\n", file="p")
    drops = [f"{{drop: [{', '.join(dropped)}]}}"] if dropped else []
    items = [*drops, *(f"{{target: new, id: {id}}}" for id in own)]
    child = parse_text(f"blocks: {{b: [{', '.join(items)}]}}\n", file="c")
    kept = [id for id in inherited if id not in dropped]
    expected = [{"target": "new" if id in own else "old", "id": id} for id in kept]
    expected += [{"target": "new", "id": id} for id in own if id not in kept]
    assert plain(merge(parent, child)) == {"blocks": {"b": expected}}


# --- errors ---------------------------------------------------------------------------------------------------------


def test_an_unknown_parent_is_reported_with_near_ids(tmp_path):
    path = tmp_path / "child.yaml"
    path.write_text("spec: 1\nid: child\nextends: deepseek_v22\n")
    with pytest.raises(MapperError) as raised:
        load_spec(path)
    (found,) = raised.value.diagnostics
    assert str(found).startswith(
        f"{path}:3:10: M142 the parent 'deepseek_v22' is neither in {tmp_path} nor bundled\n"
        "  3 | extends: deepseek_v22\n"
        "    |          ^\n"
        "  hint: did you mean 'deepseek_v2'? bundled: "
    )


def test_a_circle_of_specs_is_reported(tmp_path):
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"spec: 1\nid: {name}\nextends: {parent}\n")
    with pytest.raises(MapperError) as raised:
        load_spec(tmp_path / "a.yaml")
    assert str(raised.value) == (
        f"{tmp_path}/c.yaml:3:10: M143 specs extend each other in a circle: a -> b -> c -> a\n"
        "  3 | extends: a\n"
        "    |          ^"
    )


def test_a_file_may_extend_the_bundled_spec_of_its_own_name(tmp_path):
    path = tmp_path / "deepseek_v2.yaml"
    path.write_text("spec: 1\nid: deepseek_v2\nextends: deepseek_v2\nruntimes: {vllm: {skip: [{source: x, why: y}]}}\n")
    assert [str(each.pattern) for each in load_spec(path).runtimes["vllm"].skip][-1] == "x"


def test_a_drop_of_an_unknown_id_is_reported(tmp_path):
    assert rendered(tmp_path, "blocks: {layer: [{drop: [l1, l11]}]}\n") == (
        "child.yaml:4:30: M144 nothing inherited here has the id 'l11'\n"
        "  4 | blocks: {layer: [{drop: [l1, l11]}]}\n"
        "    |                              ^\n"
        "  hint: known: g, l0"
    )


def test_a_runtime_that_is_null_is_taken_away(tmp_path):
    assert list(load(tmp_path, "runtimes: {r: null, other: {rules: [{target: t}]}}\n").runtimes) == ["other"]


@pytest.mark.parametrize("parent", ["extends: parent", "title: T\nversion: 1.0.0\narchitectures: [A]"])
def test_a_runtime_that_is_null_and_not_inherited_is_reported(parent, tmp_path):
    (tmp_path / "parent.yaml").write_text(PARENT)
    path = tmp_path / "child.yaml"
    path.write_text(f"spec: 1\nid: child\n{parent}\nruntimes: {{q: null}}\n")
    with pytest.raises(MapperError) as raised:
        read_spec(path)
    (found,) = raised.value.diagnostics
    assert (found.code, found.message) == ("M144", "nothing inherited here has the id 'q'")


def test_a_drop_inside_a_group_of_the_child_is_reported(tmp_path):
    assert rendered(tmp_path, "blocks: {layer: [{at: g, rules: [{drop: [l1]}]}]}\n") == (
        "child.yaml:4:42: M144 nothing inherited here has the id 'l1'\n"
        "  4 | blocks: {layer: [{at: g, rules: [{drop: [l1]}]}]}\n"
        "    |                                          ^"
    )


def test_an_id_given_twice_is_reported(tmp_path):
    assert rendered(tmp_path, "blocks: {layer: [{target: a, id: x}, {at: b, rules: [{target: c, id: x}]}]}\n") == (
        "child.yaml:4:70: M220 the id 'x' is given twice in one list\n"
        "  4 | blocks: {layer: [{target: a, id: x}, {at: b, rules: [{target: c, id: x}]}]}\n"
        "    |                                                                      ^\n"
        "  first given here: child.yaml:4:34\n"
        "  4 | blocks: {layer: [{target: a, id: x}, {at: b, rules: [{target: c, id: x}]}]}\n"
        "    |                                  ^"
    )
