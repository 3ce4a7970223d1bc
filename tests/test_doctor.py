"""The command doctor: a healthy machine, and every kind of finding on a machine with that fault."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from swa_inductor import _environment, doctor
from swa_inductor.cli import app
from swa_inductor.doctor import Finding
from swa_inductor.testing import KernelUsage

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted(path.name.split(".")[0] for path in (ROOT / "swa_inductor" / "templates").glob("[!_]*.jinja"))


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "400"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """No template is compiled, all seem to; the capabilities that were asked for."""
    asked: list[tuple[int, int]] = []

    def usage(fn: Callable, *args: object, capability: tuple[int, int]) -> list[KernelUsage]:
        asked.append(capability)
        return [KernelUsage("triton_tem_fused_0", 4, 1, 32, 0, 1024)]

    monkeypatch.setattr(doctor, "resource_usage", usage)
    return asked


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    which = doctor.shutil.which
    monkeypatch.setattr("shutil.which", lambda name: None if name == "nvidia-smi" else which(name))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes torch see a card of some capability."""

    def see(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return see


def finding(tmp_path: Path, subject: str) -> tuple[int, Finding]:
    """Exit code, and the finding about `subject`, which is in the table too."""
    code, output = invoke("--json", tmp_path / "doctor.json")
    report = json.loads((tmp_path / "doctor.json").read_text())
    (found,) = [Finding(**f) for f in report["findings"] if f["subject"] == subject]
    assert found.found in output and found.advice in output and found.level in output
    assert report["healthy"] == (code == 0)
    assert bool(found.advice) == (found.level != "ok"), "what to do, where there is something to do"
    return code, found


def test_every_template_compiles(tmp_path: Path, no_gpu: None) -> None:
    code, output = invoke("--json", tmp_path / "doctor.json")
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert code == 0 and report["healthy"], output
    found = {f["subject"]: f for f in report["findings"]}
    assert sorted(s.removeprefix("template ") for s in found if s.startswith("template ")) == TEMPLATES
    assert all("sm_90: " in found[f"template {op}"]["found"] for op in TEMPLATES)
    assert report["capability"] == [9, 0] and report["versions"]["torch"] in found["torch"]["found"]


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first = {name: ".".join(map(str, versions[0])) for name, versions in doctor.VERSIONS.items()}
    last = {name: versions[1] for name, versions in doctor.VERSIONS.items()}
    wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    after = f"{last['torch'][0]}.{last['torch'][1] + 1}"
    assert project["requires-python"] == f">={first['python']}"
    assert f"torch>={first['torch']},<{after}" in wanted
    assert f"triton>={first['triton']},<4" in wanted
    assert f"transformers>={first['transformers']},<{last['transformers'][0] + 1}" in wanted


@pytest.mark.parametrize(
    ("name", "version", "level", "message"),
    [
        ("python", "3.10.4", "error", "supported: 3.11 to 3.x"),
        ("torch", "2.10.2+cu128", "error", "supported: 2.11 to 2.15.x"),
        ("torch", "2.15.7", "ok", "2.15.7"),
        ("torch", "2.16.0", "error", "supported: 2.11 to 2.15.x"),
        ("triton", "3.5.1", "error", "supported: 3.6 to 3.x"),
        ("transformers", "5.16.0", "warning", "supported: 5.17 to 5.x"),
        ("transformers", "6.0.0.dev0", "warning", "supported: 5.17 to 5.x"),
        ("transformers", None, "warning", "pip install 'transformers>=5.17'"),
        ("triton", None, "warning", "the triton that belongs to this torch"),
    ],
)
def test_versions(name, version, level, message, tmp_path, monkeypatch, quick, no_gpu) -> None:  # noqa: ANN001
    found = _environment.versions() | {name: version}
    monkeypatch.setattr(doctor, "versions", lambda: found)
    monkeypatch.setattr("importlib.metadata.requires", lambda package: [])
    code, what = finding(tmp_path, name)
    assert what.level == level and message in what.found + what.advice
    assert code == (level == "error")
    if name == "triton" and version is None:
        assert finding(tmp_path, "templates")[1].level == "warning" and not quick


@pytest.mark.parametrize("installed", ["3.7.1", None])
def test_a_triton_that_torch_does_not_pin(installed, tmp_path, monkeypatch, quick, gpu) -> None:  # noqa: ANN001
    gpu(9, 0)
    monkeypatch.setattr(doctor, "versions", lambda: _environment.versions() | {"triton": installed})
    monkeypatch.setattr("importlib.metadata.requires", lambda package: ["jinja2", 'triton==3.6.0; os == "Linux"'])
    code, what = finding(tmp_path, "triton")
    assert code == 1 and what.level == "error" and "pip install triton==3.6.0" in what.advice


@pytest.mark.parametrize(
    ("real", "level", "compiled", "message"),
    [
        ((8, 0), "ok", (8, 0), "Some card, sm_80"),
        ((8, 7), "warning", (8, 6), "templates are compiled for sm_86 instead"),
        ((12, 1), "warning", (12, 0), "sm_120"),
        ((7, 5), "error", (8, 0), "sm_80 and later"),
    ],
)
def test_cards(real, level, compiled, message, tmp_path, quick, gpu) -> None:  # noqa: ANN001
    gpu(*real)
    code, what = finding(tmp_path, "GPU")
    assert what.level == level and message in what.found + what.advice and code == (level == "error")
    assert set(quick) == {compiled}


@pytest.mark.parametrize(("built", "advice"), [(None, "a build of torch for CUDA"), ("13.0", "CUDA_VISIBLE_DEVICES")])
def test_a_card_that_torch_does_not_see(built, advice, tmp_path, monkeypatch, quick, no_gpu) -> None:  # noqa: ANN001
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", built)
    code, what = finding(tmp_path, "GPU")
    assert code == 0 and what.level == "warning" and advice in what.advice


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list, gpu: Callable) -> None:
    gpu(9, 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    code, what = finding(tmp_path, "C++ compiler")
    assert code == 1 and what.level == "error" and "apt install g++" in what.advice
    assert "CC" in finding(tmp_path, "C compiler")[1].advice


@pytest.mark.parametrize(
    ("subject", "variable"), [("Inductor cache", "TORCHINDUCTOR_CACHE_DIR"), ("Triton cache", "TRITON_CACHE_DIR")]
)
def test_caches(subject: str, variable: str, tmp_path: Path, monkeypatch, quick: list, no_gpu: None) -> None:  # noqa: ANN001
    monkeypatch.setenv(variable, str(tmp_path / "new"))
    code, what = finding(tmp_path, subject)
    assert code == 0 and what.level == "ok" and what.found == f"{tmp_path / 'new'}, writable"

    with monkeypatch.context() as patch:
        patch.setattr(doctor, "LEAST_FREE_BYTES", 1 << 80)
        code, what = finding(tmp_path, subject)
        assert code == 0 and what.level == "warning" and "make room" in what.advice and variable in what.advice

    with monkeypatch.context() as patch:
        disk = SimpleNamespace(f_bavail=1 << 40, f_frsize=512, f_flag=os.ST_NOEXEC)
        patch.setattr("os.statvfs", lambda path: disk)
        code, what = finding(tmp_path, subject)
        assert code == 1 and what.level == "error" and "noexec" in what.found and variable in what.advice

    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "below"))
    code, what = finding(tmp_path, subject)
    assert code == 1 and what.level == "error" and str(tmp_path / "file" / "below") in what.found


def test_a_template_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    def usage(fn: Callable, *args: object, capability: tuple[int, int]) -> list[KernelUsage]:
        raise RuntimeError("Traceback ...\nptxas: [error] too many registers")

    monkeypatch.setattr(doctor, "resource_usage", usage)
    code, what = finding(tmp_path, "template gather")
    assert code == 1 and what.level == "error"
    assert what.found == "does not compile for sm_90: ptxas: [error] too many registers"


@pytest.mark.parametrize(
    ("asked", "importable", "capability", "level"),
    [
        (False, True, (9, 0), "ok"),
        (False, False, (9, 0), "ok"),
        (True, True, (9, 0), "ok"),
        (True, True, (8, 0), "warning"),
        (True, False, (9, 0), "error"),
    ],
)
def test_gluon(asked, importable, capability, level, tmp_path, monkeypatch, quick, gpu) -> None:  # noqa: ANN001
    gpu(*capability)
    monkeypatch.setenv("SWA_INDUCTOR_GLUON", str(int(asked)))
    monkeypatch.setattr(doctor._template, "GLUON", asked)
    monkeypatch.setattr(doctor._attention_sm90, "template", lambda: object() if importable else None)
    code, what = finding(tmp_path, "Gluon")
    assert what.level == level and code == (level == "error")
    assert what.found.startswith("off") != asked
    assert ("not importable" in what.found) == (not asked and not importable)


def test_gluon_is_off_without_a_word_where_its_kernel_does_not_serve(tmp_path, monkeypatch, quick, gpu) -> None:  # noqa: ANN001
    gpu(8, 0)
    monkeypatch.delenv("SWA_INDUCTOR_GLUON", raising=False)
    monkeypatch.setattr(doctor._template, "GLUON", True)
    monkeypatch.setattr(doctor._attention_sm90, "template", object)
    code, what = finding(tmp_path, "Gluon")
    assert (code, what.level) == (0, "ok") and what.found.startswith("off")
