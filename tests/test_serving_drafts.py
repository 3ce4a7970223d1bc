"""Draft lookup and verification against plain Python over lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_inductor.serving._drafts import lookup, verify


def lookup_in_lists(tokens: list[int], ngram: int, drafts: int) -> list[int]:
    """Tokens behind the latest earlier occurrence of the last n, for the largest n that has one."""
    for n in range(ngram, 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n < len(tokens) and tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + drafts]
    return []


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 3),
)
def test_lookup_is_that_in_lists(sequences: list[list[int]], ngram: int, drafts: int, spare: int) -> None:
    width = max(map(len, sequences)) + spare
    behind = torch.randint(0, 4, (len(sequences), width)).tolist()  # what follows a sequence has no influence
    history = torch.tensor([row + rest[len(row) :] for row, rest in zip(sequences, behind, strict=True)])
    last = torch.tensor([len(row) - 1 for row in sequences])
    tokens, counts = lookup(history, last, ngram, drafts)
    assert tokens.dtype == torch.int64 and counts.dtype == torch.int32
    for row, got, count in zip(sequences, tokens.tolist(), counts.tolist(), strict=True):
        want = lookup_in_lists(row, ngram, drafts)
        assert got == want + [0] * (drafts - len(want)) and count == len(want)


def test_the_longest_run_wins_then_the_latest() -> None:
    history = torch.tensor([[1, 2, 9, 5, 2, 8, 1, 2], [1, 2, 9, 1, 2, 8, 1, 2], [7, 3, 3, 3, 3, 3, 3, 3]])
    tokens, counts = lookup(history, torch.tensor([7, 7, 4]), 3, 4)
    assert tokens.tolist() == [[9, 5, 2, 8], [8, 1, 2, 0], [3, 0, 0, 0]]
    assert counts.tolist() == [4, 3, 1]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 6), st.sampled_from([None, 0, 2]))
def test_verify_is_that_in_lists(data: st.DataObject, width: int, eos: int | None) -> None:
    row = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    tokens, sampled = data.draw(row), data.draw(row)
    count, room = data.draw(st.integers(0, width - 1)), data.draw(st.integers(-1, width + 1))
    want = 0
    while want < room:
        want += 1
        j = want - 1  # the token after row j is kept; the draft in the next row must be that token
        if sampled[j] == eos or j >= count or sampled[j] != tokens[j + 1]:
            break
    args = torch.tensor([tokens]), torch.tensor([sampled]), torch.tensor([count], dtype=torch.int32)
    kept = verify(*args, torch.tensor([room]), eos)
    assert kept.dtype == torch.int32 and kept.tolist() == [want]


@pytest.mark.parametrize("drafts", [1, 3])
def test_no_sequences(drafts: int) -> None:
    """F12: a batch of none."""
    tokens, counts = lookup(torch.empty(0, 9, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 2, drafts)
    assert tokens.shape == (0, drafts) and counts.shape == (0,)
