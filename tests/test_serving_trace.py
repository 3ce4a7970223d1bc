"""Traces: the CSV format, its errors, clipping, and drawn traces."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from swa_inductor import InvalidArgumentError
from swa_inductor.serving.trace import TraceRow, read_trace, sample_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = "2023-11-16 18:15:46.6805900,374,44\n"
AZURE = Path(__file__).parents[2] / "shared" / "data" / "azure_llm_2023_conv.csv"


def write(path: Path, text: str) -> Path:
    file = path / "trace.csv"
    file.write_bytes(text.encode())
    return file


def test_rows(tmp_path: Path) -> None:
    """Seven decimals, a byte order mark, Windows line ends, blank lines, equal times."""
    text = "\ufeff" + HEADER + FIRST + "\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:50.9951690,2,1\n"
    rows = read_trace(write(tmp_path, text.replace("\n", "\r\n")))
    assert [(r.context, r.generated) for r in rows] == [(374, 44), (396, 109), (2, 1)]
    assert [r.arrival for r in rows] == pytest.approx([0, 4.314579, 4.314579])
    assert rows[0].total == 418


def test_limit_reads_no_further(tmp_path: Path) -> None:
    file = write(tmp_path, HEADER + FIRST + "nonsense\n")
    assert len(read_trace(file, 1)) == 1
    with pytest.raises(InvalidArgumentError, match="line 3: got 1 columns"):
        read_trace(file, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: got nothing; allowed: TIMESTAMP,ContextTokens,GeneratedTokens"),
        (FIRST, "line 1: got 2023"),
        (HEADER, "got no request"),
        (HEADER + FIRST + "2023-11-16 18:16:00,1\n", "line 3: got 2 columns; allowed: 3"),
        (HEADER + "2023-11-16 18:15:46,1,2,3\n", "line 2: got 4 columns"),
        (HEADER + "16/11/2023,1,2\n", "line 2, column TIMESTAMP: got '16/11/2023'; allowed: a time such as"),
        (HEADER + "2023-11-16 18:15:46+01:00,1,2\n", "line 2, column TIMESTAMP: got '2023-11-16 18:15:46.01:00'"),
        (HEADER + FIRST + "2023-11-16 18:15:46.6,1,2\n", "line 3, column TIMESTAMP: got .*allowed: no time before"),
        (HEADER + "2023-11-16 18:15:46,0,2\n", "line 2, column ContextTokens: got '0'; allowed: an integer"),
        (HEADER + "2023-11-16 18:15:46,-3,2\n", "line 2, column ContextTokens: got '-3'"),
        (HEADER + "2023-11-16 18:15:46,1_0,2\n", "line 2, column ContextTokens: got '1_0'"),
        (HEADER + "2023-11-16 18:15:46,\N{ARABIC-INDIC DIGIT ONE},2\n", "line 2, column ContextTokens"),
        (HEADER + "2023-11-16 18:15:46,9999999999,2\n", "line 2, column ContextTokens: got '9999999999'"),
        (HEADER + "2023-11-16 18:15:46,1,\n", "line 2, column GeneratedTokens: got ''"),
        (HEADER + "2023-11-16 18:15:46,1,2.5\n", "line 2, column GeneratedTokens: got '2.5'"),
        (HEADER + '"2023-11-16 18:15:46,1,2\n', "cannot be read as CSV"),
    ],
)
def test_malformed(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_trace(write(tmp_path, text))


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read as CSV: .*No such file"):
        read_trace(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(HEADER.encode() + b"\xff\xfe,1,2\n")
    with pytest.raises(InvalidArgumentError, match="cannot be read as CSV: .*utf-8"):
        read_trace(tmp_path / "binary.csv")


@pytest.mark.parametrize(
    ("max_length", "want"),
    [(200, (100, 50)), (150, (100, 50)), (149, (99, 50)), (51, (1, 50)), (50, (1, 49)), (2, (1, 1))],
)
def test_clip(max_length: int, want: tuple[int, int]) -> None:
    row = TraceRow(3.0, 100, 50).clip(max_length)
    assert (row.context, row.generated) == want and row.arrival == 3.0


def test_drawn_traces() -> None:
    """The same for a seed; lengths within the tables and near their medians; times increase."""
    rows = sample_trace(2000, seed=5)
    assert rows == sample_trace(2000, seed=5) and rows[:100] == sample_trace(100, seed=5)
    assert rows != sample_trace(2000, seed=6)
    assert all(4 <= r.context <= 8000 and 4 <= r.generated <= 1000 for r in rows)
    assert 900 < statistics.median(r.context for r in rows) < 1100
    assert 115 < statistics.median(r.generated for r in rows) < 150
    assert rows[0].arrival == 0 and all(a.arrival < b.arrival for a, b in zip(rows, rows[1:], strict=False))
    with pytest.raises(InvalidArgumentError, match="requests: got 0"):
        sample_trace(0)


@pytest.mark.skipif(not AZURE.exists(), reason="needs the trace")
def test_the_azure_trace() -> None:
    rows = read_trace(AZURE)
    assert len(rows) == 19366 and rows[0] == (0.0, 374, 44)
    assert max(r.total for r in rows) == 14089
