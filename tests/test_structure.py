"""The layout of the package: no empty cell in the grid, one door to private names, files that stay small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import swa_inductor
from swa_inductor import lowerings
from swa_inductor.meta._library import OPS as OVERLOADS

OPS = sorted({name.split(".")[0] for name in OVERLOADS})
ROOT = Path(swa_inductor.__file__).parent
TESTS = Path(__file__).parent
ROOMS = {"meta": "{}.py", "lowerings": "{}.py", "templates": "{}.py.jinja"}
INLINED = {"decode_index", "prefill_index", "prefill_plan", "ring_read_raw"}
"""Ops without a template: Inductor lowers their reference function."""
SOURCES = sorted(p for p in ROOT.rglob("*") if p.suffix in (".py", ".jinja", ".cpp"))


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_its_cell_in_every_room(op: str) -> None:
    for room, name in ROOMS.items():
        wanted = room != "templates" or op not in INLINED
        assert (ROOT / room / name.format(op)).is_file() == wanted, f"{op} in {room}/"
    assert hasattr(getattr(lowerings, op), "TEMPLATE") == (op not in INLINED)
    assert (TESTS / f"test_{op}.py").is_file()
    assert hasattr(swa_inductor, op)


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_without_an_op(room: str) -> None:
    stems = {p.name.split(".")[0] for p in (ROOT / room).iterdir() if p.is_file() and not p.name.startswith("_")}
    assert stems == set(OPS) - (INLINED if room == "templates" else set())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= (450 if path.suffix == ".py" else 250)
    if path.suffix == ".py":
        assert text.strip() == "" or ast.get_docstring(ast.parse(text)), "a module says what it is"
    door = path.name == "_inductor.py" or "testing" in path.parts
    assert door or "torch._inductor" not in text, "private Inductor names live in lowerings/_inductor.py"
    assert "import tests" not in text and "from tests" not in text


@pytest.mark.parametrize("path", sorted((ROOT / "templates").glob("*.jinja")), ids=lambda p: p.name)
def test_every_masked_load_says_what_is_elsewhere(path: Path) -> None:
    """E12: `other` is never left to the compiler."""
    text = path.read_text()
    loads = [text[m.start() : text.index("\n", m.start())] for m in re.finditer(r"[tg]l\.load\(", text)]
    assert all("other=" in load for load in loads if "mask=" in load)
    assert all("mask=" in load or "tl.load(part" in load for load in loads)  # a program's own scratch is whole


@pytest.mark.parametrize("path", sorted((ROOT / "templates").glob("*.jinja")), ids=lambda p: p.name)
def test_offsets_are_64_bit_before_they_are_multiplied(path: Path) -> None:
    """A17: no 32-bit slot or row meets a cache stride."""
    for line in path.read_text().splitlines():
        for factor in re.findall(r"(\([^()]*\)|\S+) \* \{\{stride\(\"CACHE\"", line):
            wide = factor.endswith((".to(tl.int64)", ".to(gl.int64)"))
            assert wide or factor == "(position % R)", line  # positions are int64
