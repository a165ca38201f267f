"""The versions of an engine that a runtime is for, and the one that a model is of."""

import sys
import types

import pytest
import torch
from torch import nn

from mapper.compiler import Program
from mapper.diagnostics import MapperError, render_text
from mapper.load import Loader
from mapper.spec import load_spec
from mapper.transfer.versions import require_versions, versions_of
from tests.small import program_of, rules

RUNTIME = "versions: {some-engine: '>=0.32,<0.34'}"


def program(runtime: str = RUNTIME) -> Program:
    return program_of(rules("{copy: [w]}", runtime=runtime))


def module_of(package: str) -> nn.Module:
    """Return a module of one parameter on meta whose class is derived from one that is defined in `package`."""
    base = type("Base", (nn.Module,), {"__module__": f"{package}.models"})
    model = type("Own", (base,), {})()
    model.w = nn.Parameter(torch.empty(2, device="meta"))
    return model


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    found = types.ModuleType("some_engine")
    monkeypatch.setitem(sys.modules, "some_engine", found)
    return found


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.33.5", "0.33.1.dev3+g12ab", "0.33.0+cpu", "0.33.0rc1"])
def test_version_in_the_range_loads(version: str) -> None:
    require_versions(program(), {"some-engine": version})


@pytest.mark.parametrize("version", ["0.31.9", "0.34", "0.34.0+cpu", "0.35.1", "1.0", "dev", ""])
def test_version_outside_names_both_sides(version: str) -> None:
    with pytest.raises(MapperError) as caught:
        require_versions(program(), {"some-engine": version})
    (found,) = caught.value.diagnostics
    assert (found.code, found.subject) == ("M604", "some-engine")
    assert (
        render_text(found)
        .splitlines()[0]
        .endswith(
            "M604 the runtime 'own' of the spec 'tested' is for some-engine >=0.32,<0.34, "
            f"and the model is of some-engine {version}"
        )
    )
    assert found.place is not None
    assert found.place.text[found.place.column - 1 :].startswith("'>=0.32")


def test_package_that_is_not_named_may_have_any_version() -> None:
    require_versions(program(), {"torch": "0.1"})
    require_versions(program(runtime="mesh: vllm"), {"some-engine": "0.1"})


def test_loader_refuses_a_module_of_another_version_before_it_gets_storage(engine: types.ModuleType) -> None:
    engine.__version__ = "0.35.1"
    model = module_of("some_engine")
    with pytest.raises(MapperError, match="M604"):
        Loader(program(), model)
    assert model.w.is_meta
    engine.__version__ = "0.33.0"
    Loader(program(), model)
    assert not model.w.is_meta


def test_version_is_that_of_the_package_that_defines_the_class(engine: types.ModuleType) -> None:
    engine.__version__ = "0.33.0"
    assert versions_of(program(), module_of("some_engine")) == {"some-engine": "0.33.0"}
    assert versions_of(program(), module_of("other")) == {}
    assert versions_of(program(), {"w": torch.empty(2)}) == {}
    installed = program(runtime="versions: {torch: '>=2.6'}")
    assert versions_of(installed, nn.Linear(1, 1)) == {"torch": torch.__version__}


def test_version_comes_from_the_installer_where_the_package_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"some-engine": "0.31"}.__getitem__)
    monkeypatch.delitem(sys.modules, "some_engine", raising=False)
    assert versions_of(program(), module_of("some_engine")) == {"some-engine": "0.31"}


def test_given_versions_count_for_any_model() -> None:
    with pytest.raises(MapperError, match=r"the model is of some-engine 0\.40"):
        Loader(program(), {"w": torch.empty(2)}, versions={"some-engine": "0.40"})
    Loader(program(), {"w": torch.empty(2)}, versions={"some-engine": "0.33"})


@pytest.mark.parametrize("spec", ["deepseek_v2", "deepseek_v32", "deepseek_v4", "gpt_oss", "llama", "qwen3_moe"])
def test_every_bundled_runtime_of_vllm_states_its_versions(spec: str) -> None:
    for name, runtime in load_spec(spec).runtimes.items():
        stated = {package: each.specifier for package, each in runtime.versions.items()}
        assert stated == ({"vllm": ">=0.32,<0.34"} if name.startswith("vllm") else {}), name
