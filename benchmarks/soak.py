"""A decode loop for as long as you like: one CUDA graph, replayed a million times, with nobody waiting for it.

Each step makes its metadata on the device, stores a token and drafts of every sequence, attends, accepts some of the
drafts, and lets a sequence end now and then, whose slot goes to the spare ones while another of them starts anew. One
sequence of every step has bad metadata. Tokens are tags: their vectors are unit vectors, so outputs count the tags that
a query saw; a rejected draft has another tag than the token that takes its place. The device checks every step; the
host, which plays the same steps with Python lists, checks all state and the last step of every thousand.

    python -m benchmarks.soak [--steps 1000000] [--check]

--check: 150 steps of few short sequences on the CPU, uncompiled.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import swa_inductor as swa
from benchmarks import _measure

TAGS, D, HEADS = 128, 6, 4


class Size(NamedTuple):
    """Sequences of a step beside the bad one, slots, and the steps between two looks of the host."""

    window: int
    sequences: int
    slots: int
    block: int

    @property
    def spec(self) -> swa.RingSpec:
        return swa.RingSpec(self.window, D, TAGS, shared_kv=True)


LARGE, SMALL = Size(128, 47, 64, 1000), Size(12, 5, 9, 40)
LIMIT = 0.05
"""Of the error of a count; a wrong row is 1 or more."""


class Rolls:
    """The dice of a block of steps, a row a step, the same for device and host.

    drafts, accepted [steps, sequences]. ends [steps, 3]: the sequence that ends, the entry of a spare slot, where the
    next one starts; if nobody ends, the entry for nobody twice.
    """

    def __init__(self, generator: torch.Generator, size: Size, steps: int) -> None:
        def roll(low: int, end: int, *shape: int) -> Tensor:
            return torch.randint(low, end, (steps, *shape), generator=generator)

        self.drafts = roll(0, D, size.sequences)
        self.accepted = 1 + roll(0, 1 << 30, size.sequences) % (self.drafts + 1)
        starts = torch.stack([roll(0, 1), roll(0, 2 * size.window), roll(0, 2**31)], 1)
        start = starts.gather(1, roll(0, 3, 1))[:, 0]
        ends = torch.stack([roll(0, size.sequences), roll(size.sequences + 1, size.slots + 1), start], 1)
        nobody = torch.tensor([size.slots + 1, size.slots + 1, 0])
        self.ends = torch.where(roll(0, 5, 1) == 0, ends, nobody)


@dataclass
class State:
    """All that a step reads and writes, at fixed addresses. The last sequence is the bad one.

    slots: of the sequences, the bad one, the spare ones, and an entry for nobody.
    """

    size: Size
    cache: Tensor
    q: Tensor
    slots: Tensor
    seeds: Tensor
    lengths: Tensor
    accepted: Tensor
    start: Tensor
    prepared: swa.PreparedDecode
    at: Tensor
    drafts: Tensor
    takes: Tensor
    ends: Tensor
    out: Tensor
    worst: Tensor

    @classmethod
    def new(cls, size: Size, device: str) -> State:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        b, entries, int32 = size.sequences + 1, size.slots + 2, torch.int32
        return cls(
            size=size,
            cache=torch.full(size.spec.cache_shape(size.slots), 0x7F, dtype=torch.uint8, device=device),
            q=torch.full((b * D, HEADS, TAGS), TAGS**0.5, dtype=torch.bfloat16, device=device),
            slots=torch.tensor(first_slots(size), dtype=int32, device=device),
            seeds=torch.arange(entries, device=device),
            lengths=zeros(entries),
            accepted=zeros(b, dtype=int32),
            start=zeros(entries, dtype=int32),
            prepared=swa.PreparedDecode.allocate(size.spec, b, device=device),
            at=zeros(1),
            drafts=zeros(size.block, b, dtype=int32),
            takes=zeros(size.block, b, dtype=int32),
            ends=zeros(size.block, 3),
            out=zeros(b * D, HEADS, TAGS, dtype=torch.bfloat16),
            worst=zeros(1, dtype=torch.float32),
        )

    def load(self, rolls: Rolls) -> None:
        steps = len(rolls.ends)
        self.drafts[:steps, :-1].copy_(rolls.drafts)
        self.takes[:steps, :-1].copy_(rolls.accepted)
        self.ends[:steps].copy_(rolls.ends)
        self.at.zero_()


def first_slots(size: Size) -> list[int]:
    return [*range(size.sequences), size.slots, *range(size.sequences, size.slots), -1]


def tag(seeds: Any, positions: Any, rejected: Any) -> Any:
    """Of the token of a sequence at a position, numbers or tensors; a rejected draft has another one."""
    return ((seeds * 31 + positions) * 48271 % 2147483647 + rejected * (TAGS // 2)) % TAGS


def step(s: State) -> None:
    spec, b, slots = s.size.spec, s.size.sequences + 1, s.size.slots
    drafts, takes, ends = (x.index_select(0, s.at)[0] for x in (s.drafts, s.takes, s.ends))
    m, lengths, _ = swa.prepare_decode(
        s.lengths[:b],
        s.accepted,
        s.slots[:b],
        spec=spec,
        num_slots=slots,
        valid_start=s.start[:b],
        draft_counts=drafts,
        out=s.prepared,
    )
    first_rejected = (lengths + takes).repeat_interleave(D)
    seeds = s.seeds[:b].repeat_interleave(D)
    tags = tag(seeds, m.positions, (m.positions >= first_rejected).long())
    column = torch.arange(TAGS, device=tags.device)
    k = (tags[:, None] == column).to(torch.bfloat16)[:, None]
    swa.store(k, None, s.cache, m.state_ids, m.positions, spec=spec)
    options = {"spec": spec, "valid_start": m.valid_start, "tokens_per_step": D}
    out = swa.attention(s.q, s.cache, m.state_ids, m.positions, **options)  # type: ignore[arg-type]
    s.out.copy_(out)
    at = m.positions[:, None] - torch.arange(spec.window, device=tags.device)
    seen = (at >= m.valid_start[:, None]) & (m.state_ids >= 0)[:, None]
    tags = tag(seeds[:, None], at, (at >= first_rejected[:, None]).long())
    counts = ((tags[..., None] == column) & seen[..., None]).sum(1)
    error = (out.float() * seen.sum(1)[:, None, None] - counts[:, None]).abs().amax()
    s.worst.copy_(torch.maximum(s.worst, torch.where(error.isnan(), torch.inf, error)))
    s.lengths[:b].copy_(lengths)
    s.accepted.copy_(takes)
    # one sequence ends, another starts in a slot that was spare
    who, spare, start = ends.split(1)
    old, new = s.slots[who], s.slots[spare]
    s.slots.index_copy_(0, who, new)
    s.slots.index_copy_(0, spare, old)
    s.lengths.index_copy_(0, who, start)
    s.start.index_copy_(0, who, start.int())
    s.seeds.index_add_(0, who, torch.full_like(who, slots + 2))
    s.accepted.copy_(torch.where(torch.arange(b, device=who.device) == who, 0, s.accepted))
    s.at.add_(1)


class Host:
    """The same steps with Python lists: sequences as the tokens that they hold."""

    def __init__(self, size: Size) -> None:
        self.size, self.slots = size, first_slots(size)
        self.seeds = list(range(size.slots + 2))
        self.lengths = [0] * size.sequences  # before the last step
        self.accepted = [0] * size.sequences
        self.start = [0] * size.sequences
        self.steps = self.ended = 0

    def play(self, rolls: Rolls) -> list[list[int]]:
        """A block; the tags that each row of its last step must have seen."""
        for i, (takes, (who, spare, start)) in enumerate(
            zip(rolls.accepted.tolist(), rolls.ends.tolist(), strict=True)
        ):
            self.lengths = [n + a for n, a in zip(self.lengths, self.accepted, strict=True)]
            self.accepted = takes
            if i == len(rolls.ends) - 1:
                seen = self.last_step(rolls.drafts[i].tolist())
            if who < self.size.sequences:
                self.slots[who], self.slots[spare] = self.slots[spare], self.slots[who]
                self.lengths[who] = self.start[who] = start
                self.seeds[who] += self.size.slots + 2
                self.accepted[who] = 0
                self.ended += 1
        self.steps += len(rolls.ends)
        return seen

    def last_step(self, drafts: list[int]) -> list[list[int]]:
        rows: list[list[int]] = []
        for b in range(self.size.sequences):
            for p in range(self.lengths[b], self.lengths[b] + D):
                visible = range(max(p - self.size.window + 1, self.start[b]), p + 1)
                end = self.lengths[b] + self.accepted[b]
                runs = p - self.lengths[b] <= drafts[b]
                rows.append([tag(self.seeds[b], x, int(x >= end)) for x in visible] if runs else [])
        return rows + [[]] * D

    def check(self, s: State, seen: list[list[int]]) -> None:
        wanted = {"slots": self.slots, "lengths": self.lengths, "accepted": self.accepted, "start": self.start}
        for name, values in wanted.items():
            got = getattr(s, name).tolist()[: len(values)]
            if got != values:
                raise SystemExit(f"{name} after {self.steps} steps: {got}, not {values}")
        if s.prepared.errors.item() != self.steps:
            raise SystemExit(f"{s.prepared.errors.item()} bad sequences after {self.steps} steps with one each")
        counts = torch.zeros(len(seen), TAGS)
        for row, tags in enumerate(seen):
            counts[row] += torch.bincount(torch.tensor(tags, dtype=torch.int64), minlength=TAGS)
        error = s.out.float().cpu() * counts.sum(1)[:, None, None] - counts[:, None]
        worst = max(float(error.abs().max()), float(s.worst))
        if not worst <= LIMIT:
            raise SystemExit(
                f"error of a count {worst} in the {self.size.block} steps to {self.steps}, allowed {LIMIT}"
            )


def replayed(s: State) -> Any:
    """The step as a captured graph; on the CPU the function itself. Sequences start anew behind it."""
    if _measure.DEVICE != "cuda":
        return lambda: step(s)
    compiled = torch.compile(step, fullgraph=True, dynamic=False, options={"triton.cudagraphs": False})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            compiled(s)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(s)
    torch.cuda.synchronize()
    fresh = State.new(s.size, _measure.DEVICE)
    for name, value in vars(fresh).items():
        if isinstance(value, Tensor):
            getattr(s, name).copy_(value)
    s.prepared.errors.zero_()
    return graph.replay


def memory(device: str) -> tuple[int, int]:
    """Bytes reserved on the device, and the most the process has held on the host."""
    used = torch.cuda.memory_reserved() if device == "cuda" else 0
    return used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@torch.no_grad()
def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    device, cuda = _measure.DEVICE, _measure.DEVICE == "cuda"
    size, steps = (LARGE, args.steps) if cuda else (SMALL, 150)
    host, s, block = Host(size), State.new(size, device), size.block
    generator = torch.Generator().manual_seed(args.seed)
    replay = replayed(s)
    before, begin = (0, 0), time.perf_counter()
    following = Rolls(generator, size, min(block, steps))
    for done in range(0, steps, block):
        rolls = following
        s.load(rolls)
        for _ in range(len(rolls.ends)):
            replay()
        seen = host.play(rolls)  # while the device runs
        following = Rolls(generator, size, min(block, max(steps - done - block, 0)))
        host.check(s, seen)
        if done == 2 * block:
            before = memory(device)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    grown = [after - was for after, was in zip(memory(device), before, strict=True)]
    if steps > 3 * block and (grown[0] > 0 or grown[1] > 64 << 20):
        raise SystemExit(f"memory has grown by {grown[0]} bytes on the device and {grown[1]} on the host")
    return [
        {
            "steps": host.steps,
            "tokens": host.steps * size.sequences * D,
            "sequences ended": host.ended,
            "bad sequences refused": int(s.prepared.errors),
            "largest error of a count": f"{float(s.worst):.3f}",
            "us per step": seconds / host.steps * 1e6,
            "device MiB grown": grown[0] >> 20,
            "host MiB grown": grown[1] >> 20,
        }
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    _measure.report("soak", run, options)
