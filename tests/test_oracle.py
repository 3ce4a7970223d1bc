"""The position-tag oracle: any schedule of a serving engine against plain Python lists.

Every token that is written gets a tag of its own, and its vectors are the unit vector of that tag, exact in every
format. All queries have the same score with every such key, so `out * n` counts, tag by tag, the tokens that a query
saw: a wrong, missing, doubled or foreign row cannot hide. What it should have seen is a slice of a Python list.

Hypothesis chooses geometry, actions and sizes, and prints the smallest schedule that fails. `pytest
--hypothesis-profile=nightly` goes many times as far, elsewhere every time (conftest.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import cache, partial

import pytest
import torch
from cases import (
    BF16,
    FP32,
    GATHER_ARGS,
    PREFILL_ARGS,
    STORE_ARGS,
    X_EPS,
    Case,
    attention_op,
    cast_back_op,
    flat,
    gather_op,
    index_op,
    norm_store_op,
    prefill_inputs,
    prefill_op,
    prepare_op,
    store_op,
    unflat,
    workspace_op,
)
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from numerics import assert_same
from runs import Runs
from torch import Tensor

import swa_inductor as swa

TAGS = 128
SLOTS = 4
PREPARED = SLOTS + 2
"""Sequences of a step whose metadata `prepare_decode` makes: its buffers have one size."""

Ops = dict[str, Callable[..., tuple]]


def raw_spec(case: Case) -> swa.RawRingSpec:
    """The ring of a layer that compresses three tokens into one; an entry holds the tag of its token."""
    return swa.RawRingSpec(3, case.spec.tokens_per_step, 4)


def functions(case: Case) -> Ops:
    """The ops of a layer; every argument a tensor or None."""
    geometry = {"spec": case.spec, "num_slots": SLOTS}

    def plan(slots: Tensor, q_lens: Tensor, k_lens: Tensor, lower: Tensor, tokens: Tensor) -> tuple:
        segments, pivots, *rest = swa.prefill_plan(
            slots, q_lens, k_lens, valid_start=lower, num_tokens=len(tokens), **geometry
        )
        return segments, pivots, *rest, swa.prefill_index(pivots, spec=case.spec), tokens + 1

    def raw(values: Tensor, cache: Tensor, ids: Tensor, at: Tensor, start: Tensor) -> Tensor:
        swa.ring_write_raw(values, cache, ids, at, spec=raw_spec(case))
        return swa.ring_read_raw(cache, ids, at, spec=raw_spec(case), valid_start=start)

    return {
        "store": store_op(case),
        "cast_back": cast_back_op(case),
        "norm_store": lambda x, weight, *args: norm_store_op(case, 1 / TAGS)(x, None, *args, weight[0]),
        "attention_prefill": prefill_op(case),
        "gather": gather_op(case),
        "plan": plan,
        "workspace": workspace_op(case),
        "prepare": prepare_op(case.spec, SLOTS, case.spec.window),
        "attention": attention_op(case),
        "decode_index": lambda ids, at, start: swa.decode_index(ids, at, valid_start=start, **geometry),
        "attention_index": index_op(case),
        "raw": raw,
    }


@dataclass
class Sequence:
    """A sequence on the host: the tag of the token at each position, and what its rings hold."""

    tags: list[int] = field(default_factory=list)
    slot: swa.Slot | None = None
    valid: int = 0  # first position that its ring may be read at
    raw_valid: int = 0  # the same of its raw ring
    written: int = 0  # positions written into the rings, drafts included
    accepted: int = 0  # tokens of its last step, where that is the last that happened to it
    replay: int = 0  # tokens to recompute before it goes on
    saved: Tensor | None = None


Batch = list[tuple[Sequence | None, int]]
"""Sequences, None for a padded one, and how many new tokens each has."""


class Engine:
    """Runs actions, chosen by `rng`, through `ops`; every output is checked at once.

    `refuses`: what raises at bad metadata, as eager code does, where the rest makes a padded row. `say` hears of all.
    """

    def __init__(
        self,
        case: Case,
        ops: Ops,
        rng: random.Random,
        longest: int | None = None,
        refuses: Container[str] = ("store", "attention"),
        say: Callable[[str], object] = str,
    ) -> None:
        self.case, self.ops, self.rng, self.refuses, self.say = case, ops, rng, refuses, say
        self.longest = longest or 2 * case.spec.rows + 2  # new tokens of a sequence in a step
        self.poison = rng.choice([0x7F, 0xFF])
        self.stored = rng.random() < 0.5
        self.state, self.layout = poisoned_state(case, self.poison, self.stored)
        self.cache = layer_view(self.layout, self.state, self.stored)
        self.raw = self.layout.compression_view(self.state, 0)
        self.allocator = swa.SlotAllocator(SLOTS)
        self.in_flight: dict[int, set[int]] = {}  # slots that each step not yet settled uses
        self.prepared = swa.PreparedDecode.allocate(case.spec, PREPARED, width=case.spec.window)
        self.errors = 0
        self.sequences: list[Sequence] = []
        self.next_tag = rng.randrange(TAGS)
        self.compared = 0

    def run(self, steps: int) -> None:
        actions = (self.prefill, self.decode, self.preempt, self.resume, self.trim, self.finish, self.bad_rows)
        for _ in range(steps):
            while len(self.sequences) < SLOTS + 1 and self.rng.random() < 0.5:
                self.arrive()
            self.rng.choices(actions, (4, 8, 2, 3, 1, 1, 1))[0]()
            if not self.live:
                self.resume()
        self.end()

    def end(self) -> None:
        outside = self.state.clone()
        for view in (layer_view(self.layout, outside, self.stored), self.layout.compression_view(outside, 0)):
            view.fill_(self.poison)
        assert ((outside == self.poison) | (outside == swa.state.POISON)).all(), "bytes of another ring have changed"
        assert self.prepared.errors.item() == self.errors

    # ------------------------------------------------------------------------------------------------ owners of slots

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.slot]

    def owners(self) -> list[Sequence]:
        """Some of the sequences that hold a slot, in any order."""
        live = self.live
        return self.rng.sample(live, self.rng.randint(min(1, len(live)), len(live)))

    def launch(self, batch: Batch) -> None:
        """The host runs up to two steps ahead."""
        step = self.allocator.begin_step()
        self.in_flight[step] = {s.slot.id for s, _ in batch if s}
        self.settle(max(step - self.rng.randint(0, 2), 0))

    def settle(self, step: int) -> None:
        self.allocator.settle(step)
        self.in_flight = {n: slots for n, slots in self.in_flight.items() if n > step}

    def arrive(self) -> None:
        self.sequences.append(Sequence())

    def resume(self) -> None:
        """Give a slot to sequences that have none: new ones, and preempted ones, by import or by bounded replay."""
        for s in [s for s in self.sequences if s.slot is None]:
            try:
                s.slot = self.allocator.allocate()
            except swa.OutOfSlotsError:
                assert len(self.live) == SLOTS or self.in_flight, "a slot waits for nothing"
                self.settle(self.allocator.begin_step())
                return
            busy = {n for slots in self.in_flight.values() for n in slots} | {
                o.slot.id for o in self.live if o is not s
            }
            assert s.slot.id not in busy, f"slot {s.slot.id} has two owners"
            if s.saved is not None:
                self.layout.import_slot(self.state, s.slot.id, s.saved)
                s.raw_valid = len(s.tags)  # compression state is not part of what was saved
            if s.saved is None or not self.stored:
                start = max(len(s.tags) - self.case.spec.window, 0)
                s.replay, s.valid, s.raw_valid, s.written = len(s.tags) - start, start, start, start
                del s.tags[start:]
            s.saved, s.accepted = None, 0
            self.say(f"slot {s.slot.id} goes to {len(s.tags)} tokens, {s.replay} to replay")

    def preempt(self) -> None:
        for s in self.owners()[:1]:
            self.say(f"slot {s.slot.id} is taken away")
            if self.rng.random() < 0.6:
                s.saved = self.layout.export_slot(self.state, s.slot.id)
            self.allocator.free(s.slot)
            s.slot = None

    def finish(self) -> None:
        for s in self.owners()[:1]:
            self.say(f"slot {s.slot.id} finishes")
            self.allocator.free(s.slot)
            self.sequences.remove(s)

    def trim(self) -> None:
        """A8: take tokens back, as far as the ring still holds every row that is then visible."""
        for s in self.owners()[:1]:
            oldest = max(s.written - self.case.spec.max_rollback, s.valid)
            del s.tags[self.rng.randint(min(oldest, len(s.tags)), len(s.tags)) :]
            self.say(f"slot {s.slot.id} goes back to {len(s.tags)} tokens")
            s.accepted = 0
            s.raw_valid = max(s.raw_valid, s.written - raw_spec(self.case).ring.rows)
            s.raw_valid = min(s.raw_valid, len(s.tags))

    # ------------------------------------------------------------------------------------------------ steps

    def prefill(self) -> None:
        """A chunk of some sequences, with empty and padded ones among them: attend, then store."""
        rng, spec = self.rng, self.case.spec
        batch: Batch = []
        for s in self.owners():
            n = s.replay if s.replay and rng.random() < 0.7 else rng.choice([0, 1, 2, rng.randint(0, self.longest)])
            batch.append((s, min(n, self.longest)))
        batch.insert(rng.randint(0, len(batch)), (None, rng.randint(0, 2)))
        lens = [n for _, n in batch]
        if not sum(lens):
            return
        self.launch(batch)
        self.say(f"prefill {describe(batch)}")
        slots = [-1 if s is None else s.slot.id for s, _ in batch]
        starts = [0 if s is None else len(s.tags) for s, _ in batch]
        lower = [0 if s is None else s.valid for s, _ in batch]
        new = [self.tags(n) for n in lens]
        pad = rng.randint(0, 2)
        ids = [slot for slot, n in zip(slots, lens, strict=True) for _ in range(n)] + [-1] * pad
        at = [p + i for p, n in zip(starts, lens, strict=True) for i in range(n)] + [-1] * pad
        each = [i for i, n in enumerate(lens) for _ in range(n)]
        first = torch.tensor([starts[i] for i in each] + [0] * pad)
        start = ints([lower[i] for i in each] + [0] * pad)
        tags = [tag for chunk in new for tag in chunk] + [0] * pad
        k, v, q = self.vectors(tags, ids)
        meta = (ints(ids), torch.tensor(at))
        seen: list[list[int]] = []
        for (s, n), chunk in zip(batch, new, strict=True):
            past = [] if s is None else s.tags
            ends = range(len(past) + 1, len(past) + n + 1)
            seen += [(past + chunk)[max(end - spec.window, s.valid) : end] if s else [] for end in ends]
        seen += [[]] * pad
        if rng.random() < 0.5:
            out, lse = self.ops["attention_prefill"](q, k, v, self.cache, *meta, first, start, None)
        else:
            out, lse = self.by_workspace(batch, slots, lower, q, k, v, seen)
        self.store(k, v, *meta)
        for (s, n), chunk in zip(batch, new, strict=True):
            if s is not None:
                s.tags += chunk
                s.written = max(s.written, len(s.tags))
                s.replay, s.accepted = max(s.replay - n, 0), 0
        self.check(out, lse, seen)
        last = {sum(lens[: i + 1]) - 1: s for i, (s, n) in enumerate(batch) if s and n}
        self.compress(
            tags, *meta, [(last.get(t), None if t not in last else len(last[t].tags)) for t in range(len(ids))]
        )

    def by_workspace(
        self, batch: Batch, slots: list[int], lower: list[int], q: Tensor, k: Tensor, v: Tensor | None, seen: list
    ) -> tuple:
        """Gather, plan, attend: the plan is the host's own, and its index names the very tokens to be seen."""
        starts = [0 if s is None else len(s.tags) for s, _ in batch]
        lens = [n for _, n in batch]
        k_lens = [p + n for p, n in zip(starts, lens, strict=True)]
        rows = self.ops["gather"](self.cache, ints(slots), torch.tensor(starts), ints(lower), k, v)
        rows = (*rows, None)[:2]
        self.check_history(batch, rows)
        *plan, index, _ = self.ops["plan"](ints(slots), ints(lens), ints(k_lens), ints(lower), torch.zeros(len(q)))
        lists = {"state_ids": slots, "q_lens": lens, "k_lens": k_lens, "valid_start": lower, "num_tokens": len(q)}
        twin = swa.PrefillMetadata.build(self.case.spec, num_slots=SLOTS, **lists)
        for value, expected in zip(plan, vars(twin).values(), strict=True):
            assert_same(value, expected)
        for row, tags in zip(index, seen, strict=True):
            assert torch.equal(rows[0][row[row >= 0].long()], units(self.case, tags))
        return self.ops["workspace"](q, *rows, twin.pivots, None)

    def decode(self) -> None:
        """Store a token and up to D - 1 drafts of some sequences, attend, accept some of them."""
        rng, spec = self.rng, self.case.spec
        d = spec.tokens_per_step
        batch: Batch = [(s, rng.randint(1, d)) for s in self.owners() if not s.replay]
        batch.insert(rng.randint(0, len(batch)), (None, 0))
        prepare = rng.random() < 0.5
        if prepare:
            batch += [(None, 0)] * (PREPARED - len(batch))
        self.launch(batch)
        self.say(f"decode {describe(batch)}{', prepared' * prepare}")
        ids, at, start, tags = [], [], [], []
        for s, n in batch:
            tags += self.tags(n) + [0] * (d - n)
            ids += [s.slot.id if s else -1] * n + [-1] * (d - n)
            at += [len(s.tags) + i if i < n else 0 for i in range(d)] if s else [0] * d
            start += [s.valid if s and i < n else 0 for i in range(d)]
        k, v, q = self.vectors(tags, ids)
        meta, index = (ints(ids), torch.tensor(at)), None
        if prepare:
            got = self.prepare(batch)
            twin = swa.DecodeMetadata.build(
                spec, num_slots=SLOTS, state_ids=ids, positions=at, valid_start=start, width=spec.window
            )
            for value, expected in zip(vars(got).values(), vars(twin).values(), strict=True):
                assert_same(value, expected)
            meta, index = (got.state_ids, got.positions), got.index
        self.store(k, v, *meta)
        if rng.random() < 0.7:
            out, lse = self.ops["attention"](q, self.cache, *meta, ints(start), None)
        else:
            if index is None:
                _, index = self.ops["decode_index"](*meta, ints(start))
            out, lse = self.ops["attention_index"](q, self.cache, index, None)
        seen: list[list[int]] = []
        reads: list[tuple[Sequence | None, int | None]] = []
        for i, (s, n) in enumerate(batch):
            if s is not None:
                new = tags[i * d : i * d + n]
                run, ends = s.tags + new, range(len(s.tags) + 1, len(s.tags) + n + 1)
                seen += [run[max(end - spec.window, s.valid) : end] for end in ends]
                reads += [(s, end) for end in ends]
                s.written, s.accepted = max(s.written, len(run)), rng.randint(1, n)
                s.tags = run
            seen += [[]] * (d - n)
            reads += [(None, None)] * (d - n)
        self.check(out, lse, seen)
        self.compress(tags, *meta, reads)
        for s, n in batch:
            if s is not None:
                del s.tags[len(s.tags) - n + s.accepted :]

    def prepare(self, batch: Batch) -> swa.DecodeMetadata:
        """Metadata of a step from base lengths and the counts of the last; bad sequences, in padding's place, count."""
        rng, d = self.rng, self.case.spec.tokens_per_step
        rows = []
        for s, n in batch:
            if s is not None:
                rows.append((len(s.tags) - s.accepted, s.accepted, s.slot.id, s.valid, n - 1))
            elif rng.random() < 0.3:
                rows.append(rng.choice(bad_sequences(d)))
                self.errors += 1
            else:
                rows.append((rng.choice([0, -1, 2**62]), rng.choice([0, -1, d + 1]), -1, 0, 0))
        lengths, *rest = zip(*rows, strict=True)
        out = flat(self.prepared)
        self.ops["prepare"](torch.tensor(lengths), *(ints(list(values)) for values in rest), *out)
        assert self.prepared.errors.item() == self.errors, rows
        return unflat(*out).metadata

    def bad_rows(self) -> None:
        """F14: metadata that no step has: eager mode refuses it; compiled code reads and writes nothing for it."""
        ids, at, start = (
            list(x) for x in zip(*self.rng.choices(BAD_ROWS, k=self.case.spec.tokens_per_step), strict=True)
        )
        self.say(f"bad rows {list(zip(ids, at, start, strict=True))}")
        k, v, q = self.vectors([0] * len(ids), [0] * len(ids))
        before, meta = self.state.clone(), (ints(ids), torch.tensor(at))
        attention = partial(self.ops["attention"], q, self.cache, *meta, ints(start), None)
        for name, call in {"store": partial(self.store, k, v, *meta), "attention": attention}.items():
            if name in self.refuses:
                with pytest.raises(swa.InvalidArgumentError):
                    call()
            elif name == "attention":
                self.check(*call(), [[]] * len(ids))
            else:
                call()
        assert torch.equal(self.state, before), "bad metadata has written"

    def store(self, k: Tensor, v: Tensor | None, ids: Tensor, at: Tensor) -> None:
        """By any of the ops that store; no record changes but those of the tokens."""
        how = self.rng.choice(["store", "store", "cast_back", "norm_store"])
        before, live = self.cache.clone(), (ids >= 0) & (ids < SLOTS) & (at >= 0)
        if how == "store":
            self.ops[how](k, v, self.cache, ids, at)
        elif how == "cast_back":
            back = self.ops[how](k, v, self.cache, ids, at)
            for value, expected in zip(back, (k, v), strict=False):
                assert expected is None or torch.equal(value[live], expected[live])
        else:  # a unit vector has a mean square of 1 / TAGS, as large as epsilon: the weight makes it one again
            weight = torch.full((1, TAGS), (2 / TAGS) ** 0.5)
            (rows,) = as_tuple(self.ops[how](k[:, 0], weight, k, v, self.cache, ids, at))
            want = k[:, 0] * (1 / TAGS + X_EPS) ** -0.5
            torch.testing.assert_close(rows[live], want[live], rtol=1e-2, atol=0)
        same = torch.ones(self.cache.shape[:2], dtype=torch.bool)
        same[ids[live].long(), at[live] % self.case.spec.rows] = False
        assert torch.equal(self.cache[same], before[same]), "a record of no token has changed"

    def compress(
        self, tags: list[int], ids: Tensor, at: Tensor, reads: list[tuple[Sequence | None, int | None]]
    ) -> None:
        """Write entries and read them back: those up to `end` of the sequences in `reads`, which hold all new tags."""
        start = [min(s.raw_valid, end - 1) if s else 0 for s, end in reads]
        values = torch.tensor(tags, dtype=torch.float32)[:, None].expand(-1, 4).contiguous()
        (got,) = as_tuple(self.ops["raw"](values, self.raw, ids, at, ints(start)))
        for row, (s, end), first in zip(got, reads, start, strict=True):
            if s is not None:
                want = [0.0] * 3 + [float(tag) for tag in s.tags[max(end - 3, first) : end]]
                assert row.tolist() == [[tag] * 4 for tag in want[-3:]], f"raw entries of {s}"

    # ------------------------------------------------------------------------------------------------ tags

    def tags(self, n: int) -> list[int]:
        first, self.next_tag = self.next_tag, (self.next_tag + n) % TAGS
        return [(first + i) % TAGS for i in range(n)]

    def vectors(self, tags: list[int], ids: list[int]) -> tuple[Tensor, Tensor | None, Tensor]:
        """k, v (None when K = V), q; NaN in padded rows."""
        spec, t = self.case.spec, len(tags)
        k = units(self.case, tags)
        k[torch.tensor(ids) < 0] = torch.nan
        q = torch.full((t, self.case.heads, TAGS), TAGS**0.5, dtype=k.dtype)  # score 1 with every unit vector
        q[torch.tensor(ids) < 0] = torch.nan
        return k, None if spec.v_head_dim is None else k.flip(1), q

    def check(self, out: Tensor, lse: Tensor, seen: list[list[int]]) -> None:
        case = self.case
        n = torch.tensor([len(tags) for tags in seen])
        want = torch.stack([units(case, tags or [0]).sum(0) * bool(tags) for tags in seen])
        if case.spec.v_head_dim is not None:
            want = want.flip(1)
        want = want.repeat_interleave(case.heads // case.spec.num_kv_heads, 1)
        torch.testing.assert_close(out.float() * n[:, None, None], want.float(), rtol=0, atol=0.05)
        torch.testing.assert_close(lse, (n.log() + 1)[:, None].expand_as(lse).float(), rtol=0, atol=1e-3)
        self.compared += len(seen)

    def check_history(self, batch: Batch, rows: tuple[Tensor, Tensor | None]) -> None:
        """Section 1 of the workspace, row by row; its first row, visible to no query, only where the ring has it."""
        spec, w = self.case.spec, self.case.spec.window
        for i, (s, _) in enumerate(batch):
            held = s is None or len(s.tags) - w >= s.written - spec.rows
            tags = [] if s is None else s.tags[max(len(s.tags) - w, s.valid) :]
            want = torch.zeros(w, *rows[0].shape[1:], dtype=rows[0].dtype)
            want[w - len(tags) :] = units(self.case, tags)
            part, skip = slice(i * w, (i + 1) * w), int(not held)
            assert torch.equal(rows[0][part][skip:], want[skip:]), f"history of {s}"
            assert rows[1] is None or torch.equal(rows[1][part][skip:], want.flip(1)[skip:]), f"history of {s}"


LAST32, LAST64 = 2**31 - 1, 2**63 - 1
BAD_ROWS = [  # state id, position, valid_start
    (SLOTS, 5, 0),
    (LAST32, 5, 0),
    (-2, 5, 0),
    (-LAST32 - 1, 5, 0),
    (0, -1, 0),
    (0, -LAST64 - 1, 0),
    (LAST32, LAST64, LAST32),
    (-LAST32 - 1, -LAST64 - 1, -LAST32 - 1),
]


def bad_sequences(d: int) -> list[tuple[int, int, int, int, int]]:
    """For prepare_decode with D = d: length, accepted, state id, valid_start, draft count."""
    return [
        (40, 1, SLOTS, 0, 0),
        (40, 1, LAST32, 0, 0),
        (40, 1, -2, 0, 0),
        (40, 1, -LAST32 - 1, 0, 0),
        (-1, 1, 0, 0, 0),
        (-LAST64 - 1, 1, 0, 0, 0),
        (LAST64, 1, 0, 0, 0),
        (40, d + 1, 0, 0, 0),
        (40, LAST32, 0, 0, 0),
        (40, 1, 0, 42, 0),
        (40, 1, 0, LAST32, 0),
        (40, 1, 0, 0, d),
        (40, 1, 0, 0, LAST32),
    ]


def describe(batch: Batch) -> str:
    """How many new tokens each sequence has, by slot and length."""
    return ", ".join("padding" if s is None else f"slot {s.slot.id}: {n} after {len(s.tags)}" for s, n in batch)


def as_tuple(out: Tensor | tuple) -> tuple:
    return out if isinstance(out, tuple) else (out,)


@cache
def identity(dtype: torch.dtype, kv_heads: int) -> Tensor:
    eye = torch.eye(TAGS, dtype=dtype)
    return torch.stack([eye.roll(h * TAGS // 2, 1) for h in range(kv_heads)], 1)


def units(case: Case, tags: list[int]) -> Tensor:
    """[T, H_kv, TAGS]: the unit vector of each tag, another one in each head."""
    return identity(case.dtype, case.spec.num_kv_heads)[tags]


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned_state(case: Case, poison: int, stored: bool) -> tuple[Tensor, swa.StateLayout]:
    """A state whose layer under test, the last stored or the first dropped one, lies between other rings."""
    other = swa.RingSpec(2, 1, 32)
    rings = ([other, case.spec], [other]) if stored else ([other], [case.spec, other])
    layout = swa.StateLayout(*rings, [raw_spec(case)])
    return layout.allocate(SLOTS).fill_(poison), layout


def layer_view(layout: swa.StateLayout, state: Tensor, stored: bool) -> Tensor:
    return layout.stored_view(state, 1) if stored else layout.dropped_view(state, 0)


def random_case(rng: random.Random) -> Case:
    window, d = rng.randint(3, 9), rng.randint(1, 4)
    kv_heads = rng.choice([1, 1, 2])
    spec = swa.RingSpec(
        window,
        d,
        TAGS,
        num_kv_heads=kv_heads,
        shared_kv=rng.random() < 0.5,
        kv_format=rng.choice(["mxfp8", "fp32", "bf16"]),
        ring_rows=window + d - 1 + rng.choice([0, 0, 1, rng.randint(2, 6)]),
    )
    return Case("random", spec, 2 * kv_heads, FP32)


def run_schedule(seed: int, case: Case | None = None, ops: Ops | None = None, steps: int = 12, **kw: int) -> int:
    """One schedule -> queries compared with the list; the seed is all it takes to run it again."""
    rng = random.Random(seed)
    case = case or random_case(rng)
    engine = Engine(case, ops or functions(case), rng, **kw)
    try:
        engine.run(steps)
    except AssertionError as error:
        raise AssertionError(f"schedule {seed}, {case.spec}: {error}") from error
    return engine.compared


@pytest.fixture(autouse=True)
def _one_thread():  # noqa: ANN202
    """Tensors of a hundred values: handing them to threads takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


RANDOM = st.randoms(use_true_random=False)
"""A source of choices that Hypothesis makes, and makes smaller when an example fails."""


class Schedules(RuleBasedStateMachine):
    """Every action of the engine, in any order."""

    ops: dict[str, Ops] | None = None
    """By case, of those to choose from; None for eager mode over any geometry."""
    refuses: Container[str] = ("store", "attention")
    played = 0
    """Schedules so far, of the class."""

    @initialize(rng=RANDOM)
    def begin(self, rng: random.Random) -> None:
        if self.ops is None:
            case = random_case(rng)
            self.engine = Engine(case, functions(case), rng, refuses=self.refuses, say=note)
        else:
            name = rng.choice(sorted(self.ops))
            case = SMALL[name]
            self.engine = Engine(case, self.ops[name], rng, longest=9, refuses=self.refuses, say=note)
        note(f"{case.spec}, {case.heads} heads")
        self.engine.arrive()
        self.engine.resume()

    def act(self, rng: random.Random, name: str) -> None:
        self.engine.rng = rng
        getattr(self.engine, name)()

    @rule(new=st.integers(0, 2))
    def resume(self, new: int) -> None:
        for _ in range(min(new, SLOTS + 2 - len(self.engine.sequences))):
            self.engine.arrive()
        self.engine.resume()

    @precondition(lambda self: self.engine.live)
    @rule(rng=RANDOM)
    def prefill(self, rng: random.Random) -> None:
        self.act(rng, "prefill")

    @precondition(lambda self: any(not s.replay for s in self.engine.live))
    @rule(rng=RANDOM, times=st.integers(1, 3))
    def decode(self, rng: random.Random, times: int) -> None:
        for _ in range(times):
            self.act(rng, "decode")

    @precondition(lambda self: self.engine.live)
    @rule(rng=RANDOM, name=st.sampled_from(["preempt", "trim", "bad_rows", "finish"]))
    def change(self, rng: random.Random, name: str) -> None:
        self.act(rng, name)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.end()
            type(self).played += 1


def walk(share: float, steps: int, **changes: object) -> int:
    """Schedules of up to `steps` actions, a share of the examples of the profile; -> how many ran to their end."""
    machine = type("Walk", (Schedules,), changes)
    examples = max(1, round(settings().max_examples * share))
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    options = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=options)
    return machine.played


def test_eager() -> None:
    """A1, A5, A8, A9, A11, A12, A13, F1, F14: any geometry."""
    assert walk(1, 20) > 0


SMALL = {
    "mxfp8": Case("mxfp8", swa.RingSpec(5, 3, TAGS, shared_kv=True, ring_rows=7), 2, BF16),
    "bf16": Case("bf16", swa.RingSpec(4, 2, TAGS, num_kv_heads=2, kv_format="bf16"), 2, BF16),
}


@cache
def compiled(name: str) -> dict[str, Runs]:
    """The ops of a case, each compiled once for any number of tokens and sequences."""
    case = SMALL[name]
    x = prefill_inputs(replace(case, valid_start=True))
    state, layout = poisoned_state(case, 0, True)
    x["cache"] = layer_view(layout, state, True)
    rows = torch.zeros(77, case.spec.num_kv_heads, TAGS, dtype=case.dtype)
    lists = [x["slots"], x["q_lens"].int(), x["starts"].int(), x["lower"]]
    decode = [x["state_ids"], x["positions"], x["valid_start"]]
    d = case.spec.tokens_per_step
    step = [t[: len(t) // d * d] for t in (x["q"], *decode)]
    index = torch.zeros(len(x["q"]), case.spec.window, dtype=torch.int32)
    sequences = [torch.zeros(PREPARED, dtype=torch.int64), *(ints([0] * PREPARED) for _ in range(4))]
    buffers = flat(swa.PreparedDecode.allocate(case.spec, PREPARED, width=case.spec.window))
    example = {
        "store": [x[n] for n in STORE_ARGS],
        "cast_back": [x[n] for n in STORE_ARGS],
        "norm_store": [x["k"][:, 0], torch.ones(1, TAGS), *(x[n] for n in STORE_ARGS)],
        "attention_prefill": [x[n] for n in PREFILL_ARGS],
        "gather": [x[n] for n in GATHER_ARGS],
        "plan": [*lists, torch.zeros(29)],
        "workspace": [
            x["q"],
            rows,
            None if x["v"] is None else rows + 1,
            torch.zeros(len(x["q"]), 4, dtype=torch.int32),
            None,
        ],
        "prepare": [*sequences, *buffers],
        "attention": [step[0], x["cache"], *step[1:], None],
        "decode_index": decode,
        "attention_index": [x["q"], x["cache"], index, None],
        "raw": [torch.zeros(len(x["q"]), 4), layout.compression_view(state, 0), *decode],
    }
    return {op: Runs(fn, *example[op]) for op, fn in functions(case).items()}


def ways(how: str, name: str) -> dict[str, Ops]:
    """One case, which takes seconds to compile, but all of them far out."""
    names = SMALL if settings.get_current_profile_name() == "nightly" else [name]
    return {name: {op: partial(run, how) for op, run in compiled(name).items()} for name in names}


def test_generated_source() -> None:
    """The sm_90 source, generated once for any number of tokens."""
    assert walk(0.08, 8, ops=ways("sm_90", "mxfp8"), refuses=()) > 0


def test_compiled_on_the_cpu() -> None:
    """Attention is eager code there."""
    torch._dynamo.reset()
    assert walk(0.2, 12, ops=ways("cpp", "bf16"), refuses=("attention",)) > 0


@pytest.mark.parametrize("how", ["cpp", "sm_90"])
def test_bad_rows_everywhere(how: str) -> None:
    """F14: in every op that takes them; ends of the integers among them: nothing is written, nothing seen."""
    if how == "cpp":
        torch._dynamo.reset()
    name = "bf16" if how == "cpp" else "mxfp8"
    case, ops = SMALL[name], {op: partial(run, how) for op, run in compiled(name).items()}
    engine = Engine(case, ops, random.Random(0))

    def rows(values: list[tuple[int, int, int]]) -> tuple:
        ids, at, start = (torch.tensor(x) for x in zip(*values * case.spec.tokens_per_step, strict=True))
        return engine.vectors([0] * len(ids), [0] * len(ids)), (ids.int(), at), start.int()

    before = engine.state.clone()
    (k, v, _), meta, start = rows(BAD_ROWS)
    engine.ops["store"](k, v, engine.cache, *meta)
    ops["cast_back"](k, v, engine.cache, *meta)
    ops["norm_store"](k[:, 0], torch.ones(1, TAGS), k, v, engine.cache, *meta)
    assert not as_tuple(ops["raw"](torch.ones(len(k), 4), engine.raw, *meta, start))[0].any()
    (k, v, q), meta, start = rows([*BAD_ROWS, (0, 5, 6), (0, 5, LAST32)])
    nothing: list[list[int]] = [[]] * len(k)
    if how == "sm_90":  # attention on the CPU is eager code, which refuses them
        engine.check(*ops["attention"](q, engine.cache, *meta, start, None), nothing)
        engine.check(*ops["attention_prefill"](q, k, v, engine.cache, *meta, meta[1], start, None), nothing)
    offset_len, index = ops["decode_index"](*meta, start)
    assert offset_len.tolist() == [[-1, 0]] * len(k) and (index == -1).all()
    for outside in (-1, -LAST32 - 1, LAST32, SLOTS * case.spec.rows):
        engine.check(*ops["attention_index"](q, engine.cache, torch.full_like(index, outside), None), nothing)
    history = as_tuple(ops["gather"](engine.cache, *meta, start, k, v))[0][: len(k) * case.spec.window]
    assert not history.any()
    assert torch.equal(engine.state, before)
