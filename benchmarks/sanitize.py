"""Every kernel once at small edge shapes, for compute-sanitizer; exits 0 when results and all guard bytes are right.

Compile first, without the sanitizer, so that the second run finds its kernels in the cache:

    python -m benchmarks.sanitize
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m benchmarks.sanitize
    compute-sanitizer --tool initcheck --error-exitcode 1 python -m benchmarks.sanitize

Numbers after the name choose geometries, so that several processes can share the work; --check runs all on the CPU,
uncompiled, and prints the ops that were called.

Every tensor is an allocation of its own, so that a read beyond it shows. Rows not visible hold NaN codes. 0, 1, 7 and
129 tokens or sequences, in the first and the last slot, padded and bad ones; with 7 the last slot starts behind 2^31
bytes. Results are compared with each other and with eager code.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import swa_inductor as swa  # noqa: E402

SPECS = {
    "mxfp8, K = V": (swa.RingSpec(128, 6, 512, shared_kv=True), 64),
    "mxfp8, odd group": (swa.RingSpec(40, 6, 96, v_head_dim=64, num_kv_heads=2), 6),
    "bf16": (swa.RingSpec(20, 6, 64, num_kv_heads=2, kv_format="bf16"), 4),
    "fp32": (swa.RingSpec(20, 3, 64, shared_kv=True, kv_format="fp32"), 3),
}
TOKENS = (0, 1, 7, 129)
FAR = 7
SLOTS, GUARD, NAN, EDGE = 3, 0xA5, 0x7F, 32
DEVICE = "cuda"
CALLED: set[str] = set()


class Ring:
    """A cache whose slots lie guard bytes apart, at least 32, with guards at both ends; on a GPU far apart for FAR."""

    def __init__(self, spec: swa.RingSpec, tokens: int) -> None:
        self.bytes = spec.ring_bytes
        self.stride = self.bytes + -self.bytes % EDGE + EDGE
        if tokens == FAR and DEVICE == "cuda":
            self.stride = max(self.stride, (1 << 30) + EDGE)
        size = EDGE + (SLOTS - 1) * self.stride + self.bytes + EDGE
        self.buffer = torch.full((size,), GUARD, dtype=torch.uint8, device=DEVICE)
        rows = self.buffer[EDGE:].as_strided((SLOTS, self.bytes), (self.stride, 1), EDGE)
        rows.fill_(NAN)
        self.cache = rows.view(spec.cache_shape(SLOTS))

    def require_intact(self, when: str) -> None:
        ends = [0, *(EDGE + i * self.stride + self.bytes for i in range(SLOTS))]
        starts = [*(EDGE + i * self.stride for i in range(SLOTS)), len(self.buffer)]
        for end, start in zip(ends, starts, strict=True):
            if not bool((self.buffer[end:start] == GUARD).all()):
                raise SystemExit(f"guard bytes overwritten at {when}")


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, dynamic=False) if DEVICE == "cuda" else fn


def require_equal(name: str, value: Tensor, wanted: Tensor, tolerance: float = 0) -> None:
    torch.testing.assert_close(value.cpu(), wanted.cpu(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")


def on_device(*values: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in values]


def batch(tokens: int) -> list[Tensor]:
    """state_ids, positions, q_starts, valid_start of `tokens` tokens, and slots, q_lens, starts of the sequences: new
    tokens of a sequence in the last slot, one token of the first slot, padding."""
    lens = torch.tensor([max(tokens - 3, min(tokens, 1)), int(tokens > 1), max(min(tokens - 2, 2), 0)])
    slots, starts = torch.tensor([SLOTS - 1, 0, -1], dtype=torch.int32), torch.tensor([0, 0, 0])
    own = torch.arange(int(lens.sum())) - (lens.cumsum(0) - lens).repeat_interleave(lens)
    ids = slots.repeat_interleave(lens)
    start = torch.zeros_like(ids)
    return on_device(ids, torch.where(ids >= 0, own, -1), torch.zeros_like(own), start, slots, lens.int(), starts)


def check_tokens(spec: swa.RingSpec, heads: int, tokens: int) -> None:
    """Prefill and decode of the same tokens, by each op that can."""
    ring = Ring(spec, tokens)
    cache = ring.cache
    ids, at, q_starts, start, slots, lens, starts = batch(tokens)
    k = torch.randn(tokens, spec.num_kv_heads, spec.head_dim, device=DEVICE, dtype=torch.bfloat16)
    v = None if spec.v_head_dim is None else torch.randn_like(k)[..., : spec.v_head_dim].contiguous()
    q = torch.randn(tokens, heads, spec.head_dim, device=DEVICE, dtype=torch.bfloat16)
    sinks = torch.randn(heads, device=DEVICE)
    weight = torch.rand(spec.head_dim, device=DEVICE)
    table = torch.rand(max(tokens, 1), 32, device=DEVICE)
    names = {"kv_format": spec.kv_format, "v_head_dim": spec.v_head_dim}

    def prefill(q, k, v, cache):  # noqa: ANN001, ANN202
        back_k, back_v = swa.store_cast_back(k, v, cache.clone(), ids, at, spec=spec)
        options = {"spec": spec, "sinks": sinks, "valid_start": start}
        out = swa.attention_prefill(q, back_k, back_v, cache, ids, at, q_starts, **options)
        _, pivots, *_ = swa.prefill_plan(slots, lens, lens, spec=spec, num_slots=SLOTS, num_tokens=tokens)
        rows = swa.gather(cache, slots, starts, spec=spec, dtype=q.dtype, k=back_k, v=back_v)
        other = swa.attention_workspace(q, *rows, pivots, window=spec.window, sinks=sinks)
        swa.store(k, v, cache, ids, at, spec=spec)
        return out, other, swa.prefill_index(pivots, spec=spec)

    def decode(q, cache):  # noqa: ANN001, ANN202
        out, lse = swa.attention(q, cache, ids, at, spec=spec, return_lse=True)
        _, index = swa.decode_index(ids, at, spec=spec, num_slots=SLOTS)
        none = swa.attention_index(q, cache, index * 0 - 1, return_lse=True, **names)
        merged, _ = swa.merge_attention(out, lse, *none, sinks=sinks)
        return merged, swa.attention_index(q, cache, index, sinks=sinks, **names)

    def turned(q, k, v, cache):  # noqa: ANN001, ANN202
        options = {"spec": spec, "norm_eps": 1e-6, "norm_weight": weight, "rope": table}
        rows = swa.norm_store(k.flatten(1), k, v, cache, ids, at, x_eps=1e-6, **options)
        swa.store(k, v, cache, ids, at, **options)
        back = swa.store_cast_back(k, v, cache, ids, at, rope_interleaved=False, **options)
        query = {"spec": spec, "q_norm_eps": 1e-6, "q_norm_weight": weight, "rope": table, "inverse_rope": True}
        out = swa.attention(q, cache, ids, at, **query)
        return rows, back, out, swa.attention_prefill(q, *back, cache, ids, at, q_starts, **query)

    torch._dynamo.reset()
    when = f"T = {tokens}"
    out, other, _ = compiled(prefill)(q, k, v, cache)
    ring.require_intact(f"prefill, {when}")
    held = torch.full_like(cache[[0, -1]].cpu(), NAN)  # the slots that are written, stored by eager code
    near = torch.where(ids > 0, 1, ids.long()).int()
    swa.store(k.cpu(), None if v is None else v.cpu(), held, near.cpu(), at.cpu(), spec=spec)
    require_equal(f"records, {when}", cache[[0, -1]], held)
    if not bool((cache[1] == NAN).all()):
        raise SystemExit(f"a slot of nobody has changed at {when}")
    decoded, by_index = compiled(decode)(q, cache)
    live = ids >= 0
    require_equal(f"workspace, {when}", other[live], out[live], 3e-2)
    whole = live & ((at - spec.window + 1).clamp(min=0) >= int(lens[0]) - spec.rows)  # of the window, in the ring
    for name, value in (("attention", decoded), ("attention_index", by_index)):
        require_equal(f"{name}, {when}", value[whole], out[whole], 3e-2)
    rows, back, by_ring, by_prefill = compiled(turned)(q, k, v, cache)
    x = k.flatten(1).float()
    normed = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    require_equal(f"norm_store, {when}", rows, normed.to(rows.dtype), 2e-2)
    require_equal(f"attention with norm and RoPE, {when}", by_ring[whole], by_prefill[whole], 3e-2)
    ring.require_intact(when)


def check_steps(spec: swa.RingSpec, heads: int, sequences: int) -> None:
    """A decode step of D tokens of each sequence, metadata from the device; few of them are live, some are bad."""
    ring, d = Ring(spec, sequences), spec.tokens_per_step
    slots = [SLOTS - 1, 0, -1, SLOTS, -2, 2**31 - 1, -(2**31)]
    ids = torch.tensor((slots + [-1] * sequences)[:sequences], dtype=torch.int32)
    bad = int(((ids < -1) | (ids >= SLOTS)).sum())
    lengths = torch.arange(sequences) * 0 + 3 * spec.rows
    start = lengths.int()  # nothing older may be read: the ring holds NaN codes
    accepted, drafts = torch.zeros_like(start), torch.full_like(start, d - 1)
    raw = swa.RawRingSpec(3, d, 5)
    entries = torch.full(raw.ring.cache_shape(SLOTS), NAN, dtype=torch.uint8)
    k = torch.randn(sequences * d, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16)
    v = None if spec.v_head_dim is None else torch.randn_like(k)[..., : spec.v_head_dim].contiguous()
    q = torch.randn(sequences * d, heads, spec.head_dim, dtype=torch.bfloat16)

    def step(q, k, v, cache, entries, lengths, accepted, ids, start, drafts, out):  # noqa: ANN001, ANN202
        geometry = {
            "spec": spec,
            "num_slots": SLOTS,
            "valid_start": start,
            "draft_counts": drafts,
            "width": spec.window,
        }
        other = swa.prepare_decode(lengths, accepted, ids, **geometry)
        m = swa.prepare_decode(lengths, accepted, ids, out=out, **geometry).metadata
        swa.store(k, v, cache, m.state_ids, m.positions, spec=spec)
        swa.ring_write_raw(k[:, 0, :5], entries, m.state_ids, m.positions, spec=raw)
        seen = swa.ring_read_raw(entries, m.state_ids, m.positions, spec=raw, valid_start=m.valid_start)
        options = {"spec": spec, "valid_start": m.valid_start, "tokens_per_step": d}
        return (
            swa.attention(q, cache, m.state_ids, m.positions, **options),
            seen,
            other.metadata.index + 0,
            other.errors,
        )

    def run(call: Callable[..., Any], device: str, cache: Tensor) -> tuple:
        given = [None if t is None else t.to(device) for t in (q, k, v)]
        lists = [t.to(device) for t in (lengths, accepted, ids, start, drafts)]
        out = swa.PreparedDecode.allocate(spec, sequences, width=spec.window, device=device)
        return *call(*given, cache, entries.to(device), *lists, out), out.errors

    torch._dynamo.reset()
    when = f"{sequences} sequences"
    got = run(compiled(step), DEVICE, ring.cache)
    ring.require_intact(when)
    want = run(step, "cpu", held := torch.full(spec.cache_shape(SLOTS), NAN, dtype=torch.uint8))
    require_equal(f"records of {when}", ring.cache, held)
    for name, value, wanted in zip(("out", "entries", "index", "errors", "out.errors"), got, want, strict=True):
        require_equal(f"{name} of {when}", value, wanted, 3e-2 if name == "out" else 0)
    if got[-1].item() != bad:
        raise SystemExit(f"{got[-1].item()} errors counted, not {bad}, at {when}")


class Names(TorchDispatchMode):
    """Notes the ops that are called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if func.namespace == "swa_inductor":
            CALLED.add(str(func).removeprefix("swa_inductor.").removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sanitize")
    parser.add_argument("geometries", nargs="*", type=int)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.check:
        DEVICE = "cpu"
        Names().__enter__()
    for i, (name, (spec, heads)) in enumerate(SPECS.items()):
        if args.geometries and i not in args.geometries:
            continue
        for tokens in TOKENS[:3] if args.check else TOKENS:
            check_tokens(spec, heads, tokens)
            check_steps(spec, heads, tokens)
        print(f"{name}: all right, guard bytes intact")
    if args.check:
        print(*sorted(CALLED))


if __name__ == "__main__":
    main()
