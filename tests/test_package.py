"""The wheel holds what the package needs at run time."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

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
