"""What vLLM is told about mapper, and how little it costs a process that loads nothing."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import mapper.integrations.vllm as plugin

ROOT = Path(__file__).parents[2]


def test_entry_point_names_a_function_without_arguments() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["mapper"].partition(":")
    function = getattr(import_module(module), name)
    assert function is plugin.register
    assert function.__code__.co_argcount == 0
    assert not any(each.startswith("vllm") for each in project["optional-dependencies"]["vllm"]), "no version is pinned"


def test_load_format_is_in_lower_case() -> None:
    """vLLM lower-cases what the user gives, so that no other name is ever found."""
    assert plugin.LOAD_FORMAT == plugin.LOAD_FORMAT.lower() == "mapper"


def test_import_is_cheap() -> None:
    code = "import sys, mapper.integrations.vllm as v; v.register; print('torch' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]


def test_names_have_a_home() -> None:
    for name in plugin.__all__:
        assert callable(getattr(plugin, name)) or name == "LOAD_FORMAT"
