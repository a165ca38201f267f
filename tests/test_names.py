from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mapper.compiler.names import Names, config_values, model_dtype, quantization_facts
from mapper.diagnostics import MapperError, Place
from mapper.expressions import Expression, parse
from mapper.pattern import Bindings
from mapper.spec.model import ConfigKey, Let, Spec

PLACE = Place("spec.yaml", 7, 3)
DOMAINS = {"layer": (0, 1, 5), "expert": (0, 2, 3), "branch": ("attn", "ffn")}
CONSTANTS: dict[str, object] = {"size": 1000, "nothing": None, "periods": [2, 3]}
ALL: list[Bindings] = [dict(zip(DOMAINS, values, strict=True)) for values in product(*DOMAINS.values())]


def let(name: str, text: str, parameter: str | None = None) -> Let:
    return Let(name, parameter, parse(text), PLACE)


def lets(**texts: str) -> dict[str, Let]:
    """`f__n='n + 1'` is `f(n): n + 1`."""
    found = {}
    for key, text in texts.items():
        name, _, parameter = key.partition("__")
        found[name] = let(name, text, parameter or None)
    return found


def names_of(**texts: str) -> Names:
    return Names(CONSTANTS, lets(**texts), DOMAINS)


def problem_of(names: Names, text: str, bindings: Bindings | None = None) -> str:
    with pytest.raises(MapperError) as caught:
        names.evaluate(parse(text), bindings or {}, PLACE)
    (found,) = caught.value.diagnostics
    assert (found.code, found.place) == ("M303", PLACE)
    return found.message


def agree(first: Bindings, second: Bindings, indices: tuple[str, ...]) -> bool:
    return all(first[index] == second[index] for index in indices)


# --- what a value depends on ---------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> tuple[Names, Expression]:
    """Levels of lets and functions, each over what stands before it; every term changes the sum that it is in."""
    values, functions = ["layer", "expert", "size", "7"], list[str]()
    number = 0

    def term() -> str:
        name = draw(st.sampled_from(values))
        return f"{draw(st.sampled_from(functions))}({name})" if functions and draw(st.booleans()) else name

    def total() -> str:
        # Nothing is negative, so that no two terms cancel out.
        return " + ".join(f"{draw(st.sampled_from([1, 3, 7]))} * {term()}" for _ in range(draw(st.integers(1, 3))))

    names = None
    for _ in range(draw(st.integers(1, 3))):
        level: dict[str, Let] = {}
        for _ in range(draw(st.integers(0, 3))):
            number += 1
            if draw(st.booleans()):
                level[f"v{number}"] = let(f"v{number}", total())
                values.append(f"v{number}")
            else:
                # The parameter may be called as an index, a constant or a let is; it hides that one in its expression only.
                parameter = draw(st.sampled_from(["n", "layer", "size", *values[4:]]))
                level[f"f{number}"] = let(f"f{number}", f"{parameter} + {total()}", parameter)
                functions.append(f"f{number}")
        names = Names(CONSTANTS, level, DOMAINS) if names is None else names.below(level)
    assert names is not None
    return names, parse(total())


@settings(deadline=None)
@given(programs())
def test_dependence_is_the_indices_whose_value_changes_the_result(program: tuple[Names, Expression]) -> None:
    names, expression = program
    results = [names.evaluate(expression, bindings, PLACE) for bindings in ALL]
    changing = set()
    for first, value in zip(ALL, results, strict=True):
        for second, other in zip(ALL, results, strict=True):
            differing = [index for index in DOMAINS if first[index] != second[index]]
            if len(differing) == 1 and value != other:
                changing.add(differing[0])
    assert names.dependence(expression) == tuple(sorted(changing))


@given(programs(), st.sampled_from(ALL))
def test_value_needs_no_index_beyond_the_dependence(program: tuple[Names, Expression], bindings: Bindings) -> None:
    names, expression = program
    needed = {index: bindings[index] for index in names.dependence(expression)}
    assert names.evaluate(expression, needed, PLACE) == names.evaluate(expression, bindings, PLACE)


CONDITIONS = st.sampled_from(
    ["layer > 0", "is_moe(layer)", "is_moe(expert + 1)", "branch == 'attn'", "deep", "is_odd", "nothing is null", "false"]
)


@given(st.lists(CONDITIONS, min_size=2, max_size=4), st.sampled_from([" and ", " or "]))
@example(["false", "layer > 0"], " and ")
def test_values_of_equal_bindings_of_the_dependence_are_equal(conditions: list[str], sign: str) -> None:
    expression = parse(sign.join(conditions))
    names = conditional_names()
    relevant = names.dependence(expression)
    for bindings in reversed(ALL):
        # The values that are kept from call to call must be those that fresh names give.
        expected = conditional_names().evaluate(expression, bindings, PLACE)
        for other in ALL:
            if agree(bindings, other, relevant):
                assert names.evaluate(expression, other, PLACE) == expected


def conditional_names() -> Names:
    return names_of(is_moe__n="n >= 2", deep="is_moe(layer) and is_odd", is_odd="expert % 2 == 1")


# --- scope ---------------------------------------------------------------------------------------------------------------


def test_parameter_is_known_in_its_own_expression_only() -> None:
    names = names_of(half="layer // 2", twice__layer="layer * 2 + half", f__size="size + whole", whole="size")
    assert names.evaluate(parse("twice(100)"), {"layer": 5}, PLACE) == 202
    assert names.dependence(parse("twice(100)")) == ("layer",)
    assert names.evaluate(parse("f(1)"), {}, PLACE) == 1001


def test_parameter_hides_a_let_of_its_name() -> None:
    names = names_of(n="layer + 1", f__n="n * 2")
    assert names.dependence(parse("f(3)")) == ()
    assert names.evaluate(parse("f(3)"), {}, PLACE) == 6


def test_let_of_a_group_hides_what_lies_around_it() -> None:
    outer = names_of(width="layer", ratio__n="n + width")
    inner = outer.below(lets(width="size", layer="9"))
    assert inner.evaluate(parse("width"), {}, PLACE) == 1000
    assert inner.evaluate(parse("layer"), {"layer": 1}, PLACE) == 9
    assert inner.dependence(parse("layer")) == ()
    # A function sees the level that it is defined on.
    assert inner.dependence(parse("ratio(1)")) == ("layer",)
    assert inner.evaluate(parse("ratio(1)"), {"layer": 4}, PLACE) == 5
    inmost = inner.below(lets(width="expert"))
    assert inmost.dependence(parse("width + ratio(1)")) == ("expert", "layer")
    assert outer.below({}) is outer


def test_leaf_is_part_of_what_a_value_is_kept_for() -> None:
    names, expression = names_of(), parse("'' if leaf == 'weight' else leaf")
    assert [names.evaluate(expression, {"leaf": leaf}, PLACE) for leaf in ("weight", "bias", "scale")] == ["", "bias", "scale"]


def test_long_chain_of_lets_is_computed_once_each() -> None:
    # Without keeping the values this takes 2**40 steps.
    chain = {f"v{number + 1}": f"v{number} + v{number}" for number in range(40)}
    names = names_of(v0="layer", **chain)
    assert names.dependence(parse("v40")) == ("layer",)
    assert names.evaluate(parse("v40"), {"layer": 3}, PLACE) == 3 * 2**40


def test_functions_that_call_each_other_do_not_delay_the_dependence() -> None:
    # Followed path by path this takes 2**50 steps.
    names = names_of(f__n="f(n) + g(n) + expert", g__n="g(n) + f(n) + layer")
    assert names.dependence(parse("f(1)")) == ("expert", "layer")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer + 1", "'layer + 1' needs the index 'layer', which the patterns here do not have"),
        ("late", "'late' needs the index 'expert', which the patterns here do not have"),
        ("unheard", "'unheard' is not known here"),
        ("nothing + 1", "'nothing + 1' fails: '+' is for numbers, found None and 1"),
        ("broken", "'1 // 0' fails: integer division or modulo by zero"),
        ("f", "'f' takes an argument"),
        ("size(1)", "'size' is no function"),
        ("late(1)", "'late' is no function"),
        ("unheard(1)", "'unheard' is no function"),
        ("own", "'own' is defined by itself"),
        ("circle", "'circle' is defined by itself"),
        ("g(3)", "'g' is defined by itself"),
    ],
)
def test_failure_is_reported_with_its_cause_at_the_place(text: str, message: str) -> None:
    names = names_of(late="expert", broken="1 // 0", f__n="n", own="own + 1", circle="back", back="circle", g__n="g(n - 1)")
    bindings: Bindings = {} if "expert" in message or "layer" in message else {"expert": 1}
    assert problem_of(names, text, bindings) == message


# --- config --------------------------------------------------------------------------------------------------------------


def spec_of(**keys: str | tuple[str, str | None] | None) -> Spec:
    """`key=EXPR`, None for a required key, (path, EXPR) where its path is another."""
    config = {}
    for name, given_as in keys.items():
        path, default = given_as if isinstance(given_as, tuple) else (name, given_as)
        config[name] = ConfigKey(name, path, None if default is None else parse(default), PLACE)
    fields = dict.fromkeys(Spec.__dataclass_fields__)
    return Spec(**{**fields, "id": "tiny", "config": config})  # type: ignore[arg-type]


def test_defaults_stand_in_for_what_the_config_has_not() -> None:
    spec = spec_of(hidden=None, heads=None, head_dim="hidden // heads", rank="null", flag="false")
    given_values = {"hidden": 64, "heads": 4, "other": 1}
    assert config_values(spec, given_values) == {"hidden": 64, "heads": 4, "head_dim": 16, "rank": None, "flag": False}
    assert config_values(spec, {**given_values, "head_dim": 32, "flag": True})["head_dim"] == 32


def test_null_in_the_config_is_a_value_of_a_required_key_and_none_of_an_optional_one() -> None:
    assert config_values(spec_of(a=None, b="7"), {"a": None, "b": None}) == {"a": None, "b": 7}


def test_default_may_use_keys_that_come_later() -> None:
    assert config_values(spec_of(a="b + 1", b="c * 2", c="3"), {}) == {"a": 7, "b": 6, "c": 3}
    assert config_values(spec_of(a="b + 1", b="c * 2", c="3"), {"b": 10}) == {"a": 11, "b": 10, "c": 3}


def test_missing_keys_are_all_reported_before_any_default_fails() -> None:
    with pytest.raises(MapperError) as caught:
        config_values(spec_of(a=None, b="a // 0", c=("rope.theta", None)), {"rope": {"factor": 2}})
    assert [str(each) for each in caught.value.diagnostics] == [
        "spec.yaml:7:3: M301 the config has no key 'a', which the spec 'tiny' requires",
        "spec.yaml:7:3: M301 the config has no key 'rope.theta', which the spec 'tiny' requires",
    ]
    with pytest.raises(MapperError, match=r"M303 'a // 0' fails: integer division or modulo by zero"):
        config_values(spec_of(a=None, b="a // 0"), {"a": 1})


@pytest.mark.parametrize(
    "config",
    [{"rope": {"theta": 5}}, {"text_config": {"rope": {"theta": 5}}}, {"rope": 3, "text_config": {"rope": {"theta": 5}}}],
)
def test_dotted_path_is_found_at_the_root_or_in_the_text_config(config: dict[str, object]) -> None:
    assert config_values(spec_of(theta=("rope.theta", None)), config) == {"theta": 5}


def test_a_value_may_be_at_either_place_or_the_same_at_both() -> None:
    assert config_values(spec_of(size=None), {"size": 1, "text_config": {"size": 1}}) == {"size": 1}
    assert config_values(spec_of(size=None), {"size": None, "text_config": {"size": 2}}) == {"size": 2}
    assert config_values(spec_of(size=None), {"size": 1, "text_config": {"size": None}}) == {"size": 1}
    assert config_values(spec_of(size="7"), {"text_config": None}) == {"size": 7}


def test_two_values_of_one_key_are_an_error_with_both() -> None:
    config = {"size": 1, "rope": {"theta": 5}, "text_config": {"size": 2, "rope": {"theta": 6}}}
    with pytest.raises(MapperError) as caught:
        config_values(spec_of(size="7", theta=("rope.theta", None), missing=None), config)
    assert [each.message for each in caught.value.diagnostics] == [
        "the config says size: 1 at the root, and 2 in text_config",
        "the config says rope.theta: 5 at the root, and 6 in text_config",
        "the config has no key 'missing', which the spec 'tiny' requires",
    ]
    assert config_values(spec_of(size=("text_config.size", None)), config) == {"size": 2}


def test_reasons_are_the_constants_behind_lets_and_functions() -> None:
    names = Names({"a": 1, "b": 2, "c": 3}, lets(x="a + 1", f__i="i + b + a", unused="c"), ["layer"])
    assert names.reasons(parse("x > 0 and f(layer) > 1")) == [("a", 1), ("b", 2)]
    assert names.reasons(parse("layer > 1")) == []


INT4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
FP8 = {"weights": {"num_bits": 8, "group_size": None}}
NO_QUANTIZATION = {"quant_method": None, "block_out": 1, "block_in": 1, "group_size": 1, "weight_bits": None,
                   "scales_per": None}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({}, {}),
        ({"quantization_config": None}, {}),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}},
            {"quant_method": "fp8", "block_out": 128, "block_in": 64, "scales_per": "block"},
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
            {"quant_method": "fp8", "scales_per": "tensor"},
        ),
        ({"text_config": {"quantization_config": {"group_size": 32}}}, {"group_size": 32}),
        (
            {"quantization_config": {"quant_method": "gptq", "group_size": None}},
            {"quant_method": "gptq", "scales_per": "group"},
        ),
        ({"quantization_config": {"bits": 4, "group_size": 128}}, {"weight_bits": 4, "group_size": 128}),
        ({"quantization_config": {"config_groups": {"a": INT4}}}, {"weight_bits": 4, "group_size": 32}),
        ({"quantization_config": {"config_groups": {"a": INT4, "b": INT4}}}, {"weight_bits": 4, "group_size": 32}),
        ({"quantization_config": {"config_groups": {"a": INT4, "b": FP8}}}, {"weight_bits": None, "group_size": None}),
        ({"quantization_config": {"config_groups": {"a": FP8}}}, {"weight_bits": 8}),
        ({"quantization_config": {"config_groups": {"a": {"weights": None}}}}, {}),
    ],
)  # fmt: skip
def test_quantization_facts(config: dict[str, object], facts: dict[str, object]) -> None:
    assert quantization_facts(config) == {**NO_QUANTIZATION, **facts}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "awq", "group_size": 128}, "group"),
        ({"quant_method": "awq", "group_size": -1}, "channel"),
        ({"quant_method": "gptq", "group_size": 128, "desc_act": False}, "group"),
        ({"quant_method": "gptq", "group_size": -1}, "channel"),
        ({"quant_method": "gptq", "group_size": 128, "desc_act": True}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "tensor"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "group"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, None),
        ({"quant_method": "modelopt"}, None),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"strategy": "channel"}}}}, "channel"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"strategy": "channel"}}, "b": {"weights": {"strategy": "tensor"}}},
            },
            None,
        ),
        ({"quant_method": "compressed-tensors", "weight_block_size": [128, 128]}, "block"),
        ({"quant_method": "bitsandbytes"}, None),
    ],
)
def test_what_one_scale_is_for(quantization: dict[str, object], expected: object) -> None:
    assert quantization_facts({"quantization_config": quantization})["scales_per"] == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, None),
    ],
)
def test_dtype_of_what_is_not_quantised(config: dict[str, object], expected: object) -> None:
    assert model_dtype(config) == expected
