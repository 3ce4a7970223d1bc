"""The programs in docs/ run as they stand and print what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_of_a_page(page: Path, tmp_path: Path) -> None:
    """In a process of its own, as a page may register ops."""
    language, program, printed = None, [], []
    for line in page.read_text().splitlines(keepends=True):
        if line.startswith("```"):
            language = line.strip("`\n") if language is None else None
            program.append("\n")
            continue
        program.append(line if language == "python" else "\n")  # an error names the line of the page
        if language == "":
            printed.append(line)
    (tmp_path / f"{page.stem}.py").write_text("".join(program))
    # compile caches do not know of ops outside of the package
    env = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    command = [sys.executable, str(tmp_path / f"{page.stem}.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(printed)
    assert "assert" in "".join(program)


def test_links() -> None:
    """The README links to every page, and every link to a file of the repository leads to one."""
    linked = set()
    for text in [ROOT / "README.md", *PAGES]:
        targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)]*)\)", text.read_text()) if "://" not in t]
        assert all((text.parent / target).is_file() for target in targets), text.name
        linked |= {(text.parent / target).resolve() for target in targets} if text.name == "README.md" else set()
    assert len(PAGES) == 3 and linked >= set(PAGES)
