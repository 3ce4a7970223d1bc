"""What the package never does: run code out of data, or fetch anything that the user did not ask for by name."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import swa_inductor
from swa_inductor import doctor
from swa_inductor.lowerings import _inductor

PACKAGE = Path(swa_inductor.__file__).parent
ROOT = Path(__file__).parent.parent

MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "code", "runpy"),
    *("urllib", "urllib3", "http", "requests", "httpx", "aiohttp", "socket", "ssl", "ftplib", "huggingface_hub"),
    *("subprocess", "ctypes"),
}
"""Modules that unpickle, run text as code, reach a network or start other programs."""

CALLS = {
    *("eval", "exec", "compile", "__import__", "importlib.import_module", "os.system", "os.popen", "torch.jit.load"),
    *("torch.load", "torch.hub.load", "torch.utils.cpp_extension.load", "numpy.load", "PyCodeCache.load"),
    *("AutoConfig.from_pretrained", "AutoModelForCausalLM.from_pretrained", "AutoTokenizer.from_pretrained"),
}

EXCEPTIONS = {
    (
        "demo.py",
        "importlib.import_module",
    ): "the packaged weights, a module of fixed name, which the extra `demo` asks for",
    ("demo.py", "AutoTokenizer.from_pretrained"): "the model that the user names, or the packaged one",
    ("demo.py", "AutoModelForCausalLM.from_pretrained"): "the same",
    ("model_report.py", "AutoConfig.from_pretrained"): "the config of the model that the user names; no weights",
    ("testing/_worker.py", "subprocess"): "starts this Python with a module of this package",
    ("testing/_worker.py", "torch.load"): "what the worker wrote into a pipe of our own, weights_only",
    ("testing/_device_guard.py", "subprocess"): "compiles noop_guard.cpp, which the package holds",
    ("testing/_device_guard.py", "ctypes"): "loads what was compiled from it",
    ("testing/_ptxas_worker.py", "subprocess"): "runs the cuobjdump of the installed Triton",
    ("testing/_ptxas_worker.py", "PyCodeCache.load"): "kernels that Inductor has just generated, as torch.compile does",
    ("testing/_interpreter_worker.py", "PyCodeCache.load"): "the same",
    ("testing/fake_gpu.py", "importlib.import_module"): "two modules of torch, by fixed names",
}


def found_in(text: str) -> set[str]:
    """Forbidden modules that `text` imports, and forbidden functions that it calls."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {(node.module or "").split(".")[0]} & MODULES
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & CALLS
        elif isinstance(node, ast.Call):
            found |= {ast.unparse(node.func)} & CALLS
    return found


def options_of(call: str, text: str) -> list[dict[str, str]]:
    """The keyword arguments of each call of that name; "**": of a dict."""
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(call)]
    return [{k.arg or "**": ast.unparse(k.value) for k in n.keywords} for n in calls]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_dangerous_but_the_exceptions(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    assert found_in(path.read_text()) == {what for file, what in EXCEPTIONS if file == name}


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from urllib.request import urlopen", "exec(source)", "import torch\ntorch.load(path)"],
)
def test_what_is_forbidden_is_found(text: str) -> None:
    assert found_in(text)


def test_files_are_read_as_data() -> None:
    """No pickled object, no code of a model's repository, no checkpoint but safetensors and GGUF."""
    (load,) = options_of("torch.load", (PACKAGE / "testing/_worker.py").read_text())
    assert load == {"weights_only": "True"}
    for path in PACKAGE.rglob("*.py"):
        for options in options_of(".from_pretrained", path.read_text()):
            assert options.get("trust_remote_code") == "False" and options.get("local_files_only") == "local", path
        assert not any("shell" in options for options in options_of("subprocess.run", path.read_text())), path
    (weights,) = options_of("AutoModelForCausalLM.from_pretrained", (PACKAGE / "demo.py").read_text())
    assert weights["use_safetensors"] == "True"


# ---------------------------------------------------------------------------------------------------- dependencies

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {
    line: Requirement(line)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for line in group
    if not line.startswith("swa-inductor[")
}


@pytest.mark.parametrize("line", sorted(REQUIREMENTS))
def test_a_dependency_has_bounds_and_what_runs_here_is_within(line: str) -> None:
    wanted = REQUIREMENTS[line]
    operators = {bound.operator for bound in wanted.specifier}
    assert operators == {">=", "<"} or operators == {"=="}
    try:
        installed = version(wanted.name)
    except PackageNotFoundError:
        pytest.skip(f"{wanted.name} is not installed")
    assert wanted.specifier.contains(installed.split("+")[0], prereleases=True)


def test_doctor_and_the_warning_know_the_same_versions() -> None:
    bounds = {wanted.name: {b.operator: b.version for b in wanted.specifier} for wanted in REQUIREMENTS.values()}
    assert doctor.VERSIONS["torch"] == _inductor.SUPPORTED_TORCH
    for name, (first, last) in doctor.VERSIONS.items():
        if name == "python":
            assert PROJECT["requires-python"] == f">={'.'.join(map(str, first))}"
            continue
        above = (*last[:-1], last[-1] + 1)
        assert bounds[name] == {">=": ".".join(map(str, first)), "<": ".".join(map(str, above))}, name
