"""The position-tag oracle: random schedules of a serving engine against plain Python lists.

Every token that is written gets a tag of its own, and its vectors are the unit vector of that tag, exact in every
format. All queries have the same score with every such key, so `out * n` counts, tag by tag, the tokens that a query
saw: a wrong, missing, doubled or foreign row cannot hide. What it should have seen is a slice of a Python list.
"""

from __future__ import annotations

import random
from collections.abc import Callable
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
    Case,
    attention_op,
    gather_op,
    index_op,
    prefill_inputs,
    prefill_op,
    store_op,
    workspace_op,
)
from runs import Runs
from torch import Tensor

import swa_inductor as swa

TAGS = 128
SLOTS = 4
Ops = dict[str, Callable[..., tuple]]


def functions(case: Case) -> Ops:
    """The ops of a layer; every argument a tensor or None."""
    geometry = {"spec": case.spec, "num_slots": SLOTS}

    def plan(slots: Tensor, q_lens: Tensor, k_lens: Tensor, lower: Tensor, tokens: Tensor) -> tuple:
        _, pivots, *rest = swa.prefill_plan(
            slots, q_lens, k_lens, valid_start=lower, num_tokens=len(tokens), **geometry
        )
        return pivots, *rest, tokens + 1

    return {
        "store": store_op(case),
        "attention_prefill": prefill_op(case),
        "gather": gather_op(case),
        "plan": plan,
        "workspace": workspace_op(case),
        "attention": attention_op(case),
        "decode_index": lambda ids, at, start: swa.decode_index(ids, at, valid_start=start, **geometry),
        "attention_index": index_op(case),
    }


@dataclass
class Sequence:
    """A sequence on the host: the tag of the token at each position, and what its ring holds."""

    tags: list[int] = field(default_factory=list)
    slot: swa.Slot | None = None
    valid: int = 0  # first position that its ring may be read at
    written: int = 0  # positions written into the ring, drafts included
    replay: int = 0  # tokens to recompute before it goes on
    saved: Tensor | None = None


class Engine:
    """Runs a random schedule through `ops`; every output is checked at once."""

    def __init__(self, case: Case, ops: Ops, rng: random.Random, longest: int | None = None) -> None:
        self.case, self.ops, self.rng = case, ops, rng
        self.longest = longest or 2 * case.spec.rows + 2  # new tokens of a sequence in a step
        self.poison = rng.choice([0x7F, 0xFF])
        self.stored = rng.random() < 0.5
        self.state, self.layout = poisoned_state(case, self.poison, self.stored)
        self.cache = layer_view(self.layout, self.state, self.stored)
        self.allocator = swa.SlotAllocator(SLOTS)
        self.sequences: list[Sequence] = []
        self.next_tag = rng.randrange(TAGS)
        self.compared = 0

    def run(self, steps: int) -> None:
        actions = (self.prefill, self.decode, self.decode, self.preempt, self.resume, self.trim, self.finish)
        for _ in range(steps):
            while len(self.sequences) < SLOTS + 1 and self.rng.random() < 0.5:
                self.sequences.append(Sequence())
            self.rng.choices(actions, (4, 4, 4, 2, 3, 1, 1))[0]()
            if not any(s.slot for s in self.sequences):
                self.resume()
        outside = self.state.clone()
        layer_view(self.layout, outside, self.stored).fill_(self.poison)
        assert ((outside == self.poison) | (outside == swa.state.POISON)).all(), "bytes of another ring have changed"

    # ------------------------------------------------------------------------------------------------ owners of slots

    def owners(self) -> list[Sequence]:
        """Some of the sequences that hold a slot, in any order."""
        live = [s for s in self.sequences if s.slot]
        return self.rng.sample(live, self.rng.randint(min(1, len(live)), len(live)))

    def launch(self) -> None:
        """The host runs up to two steps ahead."""
        self.allocator.settle(max(self.allocator.begin_step() - self.rng.randint(0, 2), 0))

    def resume(self) -> None:
        """Give a slot to sequences that have none: new ones, and preempted ones, by import or by bounded replay."""
        for s in [s for s in self.sequences if s.slot is None]:
            try:
                s.slot = self.allocator.allocate()
            except swa.OutOfSlotsError:
                self.allocator.settle(self.allocator.begin_step())
                return
            if s.saved is not None:
                self.layout.import_slot(self.state, s.slot.id, s.saved)
            if s.saved is None or not self.stored:
                start = max(len(s.tags) - self.case.spec.window, 0)
                s.replay, s.valid, s.written = len(s.tags) - start, start, start
                del s.tags[start:]
            s.saved = None

    def preempt(self) -> None:
        for s in self.owners()[:1]:
            if self.rng.random() < 0.6:
                s.saved = self.layout.export_slot(self.state, s.slot.id)
            self.allocator.free(s.slot)
            s.slot = None

    def finish(self) -> None:
        for s in self.owners()[:1]:
            self.allocator.free(s.slot)
            self.sequences.remove(s)

    def trim(self) -> None:
        """A8: take tokens back, as far as the ring still holds every row that is then visible."""
        for s in self.owners()[:1]:
            oldest = max(s.written - self.case.spec.max_rollback, s.valid)
            del s.tags[self.rng.randint(min(oldest, len(s.tags)), len(s.tags)) :]

    # ------------------------------------------------------------------------------------------------ steps

    def prefill(self) -> None:
        """A chunk of some sequences, with empty and padded ones among them: attend, then store."""
        self.launch()
        rng, spec = self.rng, self.case.spec
        batch: list[tuple[Sequence | None, int]] = []
        for s in self.owners():
            n = s.replay if s.replay and rng.random() < 0.7 else rng.choice([0, 1, 2, rng.randint(0, self.longest)])
            batch.append((s, min(n, self.longest)))
        batch.insert(rng.randint(0, len(batch)), (None, rng.randint(0, 2)))
        lens = [n for _, n in batch]
        slots = [-1 if s is None else s.slot.id for s, _ in batch]
        starts = [0 if s is None else len(s.tags) for s, _ in batch]
        lower = [0 if s is None else s.valid for s, _ in batch]
        new = [self.tags(n) for n in lens]
        if not sum(lens):
            return
        pad = rng.randint(0, 2)
        ids = [slot for slot, n in zip(slots, lens, strict=True) for _ in range(n)] + [-1] * pad
        at = [p + i for p, n in zip(starts, lens, strict=True) for i in range(n)] + [-1] * pad
        each = [i for i, n in enumerate(lens) for _ in range(n)]
        first = torch.tensor([starts[i] for i in each] + [0] * pad)
        start = ints([lower[i] for i in each] + [0] * pad)
        k, v, q = self.vectors([tag for tags in new for tag in tags] + [0] * pad, ids)
        meta = (ints(ids), torch.tensor(at))
        if rng.random() < 0.5:
            out, lse = self.ops["attention_prefill"](q, k, v, self.cache, *meta, first, start, None)
        else:
            args = (self.cache, ints(slots), torch.tensor(starts), ints(lower), k, v)
            rows = (*self.ops["gather"](*args), None)[:2]
            k_lens = ints([p + n for p, n in zip(starts, lens, strict=True)])
            pivots = self.ops["plan"](ints(slots), ints(lens), k_lens, ints(lower), torch.zeros(len(ids)))[0]
            self.check_history(batch, rows)
            out, lse = self.ops["workspace"](q, *rows, pivots, None)
        self.ops["store"](k, v, self.cache, *meta)
        seen: list[list[int]] = []
        for (s, n), tags in zip(batch, new, strict=True):
            if s is None:
                seen += [[]] * n
                continue
            for tag in tags:
                s.tags.append(tag)
                seen.append(s.tags[max(len(s.tags) - spec.window, s.valid) :])
            s.written = max(s.written, len(s.tags))
            s.replay = max(s.replay - n, 0)
        self.check(out, lse, seen + [[]] * pad)

    def decode(self) -> None:
        """Store a token and up to D - 1 drafts of some sequences, attend, accept some of them."""
        self.launch()
        rng, spec = self.rng, self.case.spec
        d = spec.tokens_per_step
        batch: list[tuple[Sequence | None, int]] = [(s, rng.randint(1, d)) for s in self.owners() if not s.replay]
        batch.insert(rng.randint(0, len(batch)), (None, 0))
        ids, at, start, seen, tags = [], [], [], [], []
        for s, n in batch:
            new = self.tags(n)
            tags += new + [0] * (d - n)
            ids += [s.slot.id if s else -1] * n + [-1] * (d - n)
            at += [len(s.tags) + i for i in range(n)] + [-1] * (d - n) if s else [-1] * d
            start += [s.valid if s else 0] * n + [0] * (d - n)
            if s is not None:
                run = s.tags + new
                ends = range(len(s.tags) + 1, len(run) + 1)
                seen += [run[max(end - spec.window, s.valid) : end] for end in ends]
                s.written = max(s.written, len(run))
                s.tags += new[: rng.randint(1, n)]
            seen += [[]] * (d - n)
        k, v, q = self.vectors(tags, ids)
        meta = (ints(ids), torch.tensor(at))
        self.ops["store"](k, v, self.cache, *meta)
        if rng.random() < 0.7:
            out, lse = self.ops["attention"](q, self.cache, *meta, ints(start), None)
        else:
            _, index = self.ops["decode_index"](*meta, ints(start))
            out, lse = self.ops["attention_index"](q, self.cache, index, None)
        self.check(out, lse, seen)

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

    def check_history(self, batch: list[tuple[Sequence | None, int]], rows: tuple[Tensor, Tensor | None]) -> None:
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
    layout = swa.StateLayout(*rings, [swa.RawRingSpec(2, 1, 4)])
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


@pytest.mark.parametrize("part", range(10))
def test_eager(part: int) -> None:
    """A1, A5, A9, A11, A12, A13: 2,000 schedules."""
    assert sum(run_schedule(seed) for seed in range(200 * part, 200 * (part + 1))) > 200


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
    example = {
        "store": [x[n] for n in STORE_ARGS],
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
        "attention": [step[0], x["cache"], *step[1:], None],
        "decode_index": decode,
        "attention_index": [x["q"], x["cache"], index, None],
    }
    return {op: Runs(fn, *example[op]) for op, fn in functions(case).items()}


def run_compiled(how: str, name: str, seeds: range) -> int:
    runs = compiled(name)
    ops = {op: partial(run, how) for op, run in runs.items()}
    return sum(run_schedule(seed, SMALL[name], ops, steps=6, longest=9) for seed in seeds)


@pytest.mark.parametrize("name", SMALL)
def test_generated_source(name: str) -> None:
    """The sm_90 source, generated once for any number of tokens."""
    assert run_compiled("sm_90", name, range(5000, 5012)) > 12


def test_compiled_on_the_cpu() -> None:
    torch._dynamo.reset()
    assert run_compiled("cpp", "mxfp8", range(6000, 6005)) > 5
