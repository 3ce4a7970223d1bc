"""The wheel holds what the package needs at run time; another torch than those supported is told at import."""

from __future__ import annotations

import runpy
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from swa_inductor.lowerings import _inductor

ROOT = Path(__file__).parent.parent


def test_the_wheel_ships_templates_and_types(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", tmp_path, ROOT], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = [p for p in (ROOT / "swa_inductor").rglob("*") if p.suffix in (".py", ".jinja", ".cpp", ".typed")]
    assert len([p for p in wanted if p.suffix == ".jinja"]) >= 3
    assert {str(p.relative_to(ROOT)) for p in wanted} <= names
    assert not [n for n in names if n.startswith("tests/")]
    assert any(n.endswith("LICENSE") for n in names)


@pytest.mark.parametrize(
    ("version", "warned"), [("2.10.2", 1), ("2.11.0+cpu", 0), ("2.15.1+cu130", 0), ("2.16.0a0+git1", 1), ("3.0", 1)]
)
def test_another_torch_is_told_once(version: str, warned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the only module that takes private names, before it takes them, so that it may also fail then."""
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(_inductor.__file__)
    messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    assert messages == [f"swa_inductor supports torch 2.11 to 2.15; this is torch {version}"] * warned
    text = Path(_inductor.__file__).read_text()
    assert text.index("warnings.warn(") < text.index("from torch._inductor")
