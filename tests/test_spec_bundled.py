"""Where specs are found."""

import pytest

from mapper.diagnostics import MapperError
from mapper.spec import load_spec
from mapper.spec.bundled import architectures_in, bundled_ids, find_spec
from mapper.yaml_source import parse_text, plain

EVERY = sorted(bundled_ids().values())


def test_a_bundled_spec_is_found_by_id_architecture_and_path():
    path = bundled_ids()["deepseek_v2"]
    assert find_spec("deepseek_v2") == find_spec("DeepseekV3ForCausalLM") == path
    assert find_spec(str(path)) == find_spec(path) == path
    assert load_spec("deepseek_v2") == load_spec("DeepseekV2ForCausalLM")


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_architectures_are_read_without_parsing_as_the_parser_reads_them(path):
    node = plain(parse_text(path.read_text(), file="x"))
    assert isinstance(node, dict)
    assert list(architectures_in(path)) == node["architectures"]


@pytest.mark.parametrize(
    "written",
    [
        "architectures: [AbC, D_2]",
        "architectures: [AbC,   # one\n  D_2]",
        "architectures:\n  - AbC\n  - D_2",
        "architectures:   # these\n- AbC\n# or\n- D_2   # that",
        "architectures:\n  [AbC,\n   D_2]",
        "title: 'architectures: [X]'\narchitectures: ['AbC', \"D_2\"]",
    ],
)
def test_every_way_to_write_architectures_is_read(written, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"spec: 1\n{written}\nconfig: {{required: [E]}}\n")
    node = plain(parse_text(path.read_text(), file="x"))
    assert isinstance(node, dict)
    assert list(architectures_in(path)) == node["architectures"] == ["AbC", "D_2"]


def test_a_spec_without_architectures_has_none(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("spec: 1\nextends: b\n")
    assert architectures_in(path) == ()


def test_bundled_ids_are_file_names_and_no_architecture_is_named_twice():
    specs = [load_spec(path) for path in bundled_ids().values()]
    assert [spec.id for spec in specs] == list(bundled_ids())
    architectures = [each for spec in specs for each in spec.architectures]
    assert len(set(architectures)) == len(architectures)


def test_an_unknown_name_is_reported_with_near_ones():
    with pytest.raises(MapperError) as raised:
        load_spec("DeepseekV3ForCausal")
    assert str(raised.value) == (
        "M140 there is no bundled spec or architecture named 'DeepseekV3ForCausal'\n"
        f"  hint: did you mean 'DeepseekV3ForCausalLM'? bundled: {', '.join(bundled_ids())}"
    )


def test_a_path_that_does_not_exist_is_reported():
    with pytest.raises(MapperError) as raised:
        load_spec("nowhere/a.yaml")
    assert str(raised.value) == "M110 cannot read nowhere/a.yaml: No such file or directory"


def test_an_architecture_of_two_bundled_specs_is_reported(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("architectures: [TwiceForCausalLM]\n")
    monkeypatch.setattr("mapper.spec.bundled.FOLDERS", (tmp_path,))
    with pytest.raises(MapperError) as raised:
        find_spec("TwiceForCausalLM")
    assert str(raised.value) == "M145 the architecture 'TwiceForCausalLM' is named by more than one bundled spec: a, b"
