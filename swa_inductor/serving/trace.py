"""Traces: when requests arrive, how long their prompts are and how many tokens they ask for.

From a CSV file in the format of the public Azure LLM inference traces, or drawn from a table of quantiles.
"""

from __future__ import annotations

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from swa_inductor.errors import InvalidArgumentError, require

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

CONTEXT_QUANTILES = (
    (0.0, 4),
    (0.05, 150),
    (0.25, 400),
    (0.5, 1000),
    (0.75, 1250),
    (0.9, 2500),
    (0.99, 4100),
    (1.0, 8000),
)
"""Share of requests, and prompt tokens that as many have at most: round numbers of a chat service."""

GENERATED_QUANTILES = ((0.0, 4), (0.05, 40), (0.25, 90), (0.5, 130), (0.75, 380), (0.9, 430), (0.99, 600), (1.0, 1000))
"""The same of the tokens they generate."""

REQUESTS_PER_SECOND = 5.0
"""Mean rate of drawn arrivals."""

MAX_DIGITS = 9
"""Digits of a count of tokens at most."""


class TraceRow(NamedTuple):
    """One request of a trace: seconds after the first, prompt tokens, tokens to generate."""

    arrival: float
    context: int
    generated: int

    @property
    def total(self) -> int:
        """Tokens of the sequence at its end."""
        return self.context + self.generated

    def clip(self, max_length: int) -> TraceRow:
        """At most `max_length` tokens, 2 or more: the prompt gives way first, down to 1 token."""
        context = max(1, min(self.context, max_length - self.generated))
        return self._replace(context=context, generated=min(self.generated, max_length - context))


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` requests of a CSV file, default all of them.

    Its header is TIMESTAMP,ContextTokens,GeneratedTokens. Times look like 2023-11-16 18:15:46.6805900, have no time
    zone and do not decrease; both counts are at least 1. Blank lines are skipped.

    Raises:
        InvalidArgumentError: the file cannot be read, holds no request, or a value is not as described; names the line
            (from 1, of the file) and the column.
    """
    rows: list[TraceRow] = []
    first = last = None
    for line, values in _lines(path):
        where = f"{path} line {line}"
        require(len(values) == len(COLUMNS), where, f"{len(values)} columns", f"{len(COLUMNS)}, {','.join(COLUMNS)}")
        time = _time(f"{where}, column {COLUMNS[0]}", values[0])
        first = first or time
        require(last is None or time >= last, f"{where}, column {COLUMNS[0]}", values[0], f"no time before {last}")
        last = time
        counts = [_count(f"{where}, column {name}", text) for name, text in zip(COLUMNS[1:], values[1:], strict=True)]
        rows.append(TraceRow((time - first).total_seconds(), *counts))
        if len(rows) == limit:
            break
    require(len(rows) > 0, str(path), "no request", "at least one line behind the header")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and values of every line behind the header that is not blank."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            require(tuple(header) == COLUMNS, f"{path} line 1", ",".join(header) or "nothing", ",".join(COLUMNS))
            for values in reader:
                if values:
                    yield reader.line_num, values
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgumentError(f"{path}: cannot be read as CSV: {error}") from None


def _time(where: str, text: str) -> datetime:
    allowed = "a time such as 2023-11-16 18:15:46.6805900, without a time zone"
    try:
        time = datetime.fromisoformat(text)  # digits behind the microseconds are dropped
    except ValueError:
        raise InvalidArgumentError(f"{where}: got {text!r}; allowed: {allowed}") from None
    require(time.tzinfo is None, where, repr(text), allowed)
    return time


def _count(where: str, text: str) -> int:
    ok = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and int(text) >= 1
    require(ok, where, repr(text), f"an integer of at least 1, {MAX_DIGITS} digits at most")
    return int(text)


def sample_trace(count: int, seed: int = 0) -> list[TraceRow]:
    """`count` requests drawn from the tables above, at random times; the same for the same seed."""
    require(count >= 1, "requests", count, "an integer of at least 1")
    source = random.Random(seed)
    rows, arrival = [], 0.0
    for _ in range(count):
        context, generated = (_quantile(t, source.random()) for t in (CONTEXT_QUANTILES, GENERATED_QUANTILES))
        rows.append(TraceRow(arrival, context, generated))
        arrival += source.expovariate(REQUESTS_PER_SECOND)
    return rows


def _quantile(table: Sequence[tuple[float, int]], share: float) -> int:
    """The value that `share` of the requests, 0 to 1, have at most; straight lines between the entries."""
    i = min(bisect_right(table, (share, math.inf)), len(table) - 1)
    (low, start), (high, end) = table[i - 1 : i + 1]
    return round(start + (end - start) * (share - low) / (high - low))
