"""Every kernel once at small edge shapes, for compute-sanitizer; exits 0 when all guard bytes are intact.

Compile first, without the sanitizer, so that the second run finds its kernels in the cache:

    python3 benchmarks/sanitize.py
    compute-sanitizer --tool memcheck --error-exitcode 1 python3 benchmarks/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python3 benchmarks/sanitize.py

Numbers after the name of the file choose geometries, so that several processes can share the work.

Every tensor is an allocation of its own, so that a read beyond it shows. Rows not visible hold NaN codes. T = 0, 1, 7
and 129, sequences in the first and the last slot, and padding.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402

import swa_inductor as swa  # noqa: E402

SPECS = {
    "mxfp8, K = V": (swa.RingSpec(128, 6, 512, shared_kv=True), 64),
    "mxfp8, odd group": (swa.RingSpec(40, 6, 96, v_head_dim=64, num_kv_heads=2), 6),
    "bf16": (swa.RingSpec(20, 6, 64, num_kv_heads=2, kv_format="bf16"), 4),
}
SLOTS, GUARD, NAN = 3, 0xA5, 0x7F


def guarded_cache(spec: swa.RingSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose slots lie 32 guard bytes apart, with guards at both ends; and the buffer that holds it."""
    ring, stride = spec.ring_bytes, spec.ring_bytes + -spec.ring_bytes % 32 + 32
    buffer = torch.full((SLOTS * stride + 32,), GUARD, dtype=torch.uint8, device="cuda")
    slots = buffer[32:].view(SLOTS, stride)[:, :ring]
    slots.fill_(NAN)
    return slots.view(spec.cache_shape(SLOTS)), buffer


def guards_intact(spec: swa.RingSpec, buffer: torch.Tensor) -> bool:
    outside = buffer.clone()
    outside[32:].view(SLOTS, -1)[:, : spec.ring_bytes] = GUARD
    return bool((outside == GUARD).all())


def batch(tokens: int) -> tuple[torch.Tensor, ...]:
    """state_ids, positions, q_starts of `tokens` tokens, and slots, q_lens, starts of the sequences: new tokens of a
    sequence in the last slot, one token of the first slot, padding."""
    lens = torch.tensor([max(tokens - 3, min(tokens, 1)), int(tokens > 1), max(min(tokens - 2, 2), 0)])
    slots, starts = torch.tensor([SLOTS - 1, 0, -1], dtype=torch.int32), torch.tensor([0, 0, 0])
    own = torch.arange(int(lens.sum())) - (lens.cumsum(0) - lens).repeat_interleave(lens)
    ids = slots.repeat_interleave(lens)
    values = (ids, torch.where(ids >= 0, own, -1), torch.zeros_like(own), slots, lens.int(), starts)
    return tuple(t.cuda() for t in values)


def check(spec: swa.RingSpec, heads: int, tokens: int) -> None:
    cache, buffer = guarded_cache(spec)
    ids, at, q_starts, slots, lens, starts = batch(tokens)
    k = torch.randn(tokens, spec.num_kv_heads, spec.head_dim, device="cuda", dtype=torch.bfloat16)
    v = None if spec.v_head_dim is None else torch.randn_like(k)[..., : spec.v_head_dim].contiguous()
    q = torch.randn(tokens, heads, spec.head_dim, device="cuda", dtype=torch.bfloat16)
    sinks = torch.randn(heads, device="cuda")

    def prefill(q, k, v, cache):  # noqa: ANN001, ANN202
        back_k, back_v = swa.store_cast_back(k, v, cache.clone(), ids, at, spec=spec)
        out = swa.attention_prefill(q, back_k, back_v, cache, ids, at, q_starts, spec=spec, sinks=sinks)
        _, pivots, *_ = swa.prefill_plan(slots, lens, lens, spec=spec, num_slots=SLOTS, num_tokens=tokens)
        rows = swa.gather(cache, slots, starts, spec=spec, dtype=q.dtype, k=back_k, v=back_v)
        other = swa.attention_workspace(q, *rows, pivots, window=spec.window, sinks=sinks)
        swa.store(k, v, cache, ids, at, spec=spec)
        return out, other, swa.prefill_index(pivots, spec=spec)

    def decode(q, cache):  # noqa: ANN001, ANN202
        out = swa.attention(q, cache, ids, at, spec=spec, sinks=sinks)
        _, index = swa.decode_index(ids, at, spec=spec, num_slots=SLOTS)
        names = {"kv_format": spec.kv_format, "v_head_dim": spec.v_head_dim}
        step = swa.prepare_decode(at, torch.zeros_like(ids), ids, spec=spec, num_slots=SLOTS, width=spec.window)
        return out, swa.attention_index(q, cache, index, sinks=sinks, **names), step

    weight = torch.rand(spec.head_dim, device="cuda")
    table = torch.rand(tokens + 1, 32, device="cuda")

    def turned(k, v, cache):  # noqa: ANN001, ANN202
        options = {"spec": spec, "norm_eps": 1e-6, "norm_weight": weight, "rope": table}
        rows = swa.norm_store(k.flatten(1), k, v, cache, ids, at, x_eps=1e-6, **options)
        return rows, swa.store_cast_back(k, v, cache, ids, at, rope_interleaved=False, **options)

    torch._dynamo.reset()
    out, other, _ = torch.compile(prefill, fullgraph=True, dynamic=False)(q, k, v, cache)
    ring, index, step = torch.compile(decode, fullgraph=True, dynamic=False)(q, cache)
    torch.compile(turned, fullgraph=True, dynamic=False)(k, v, cache)
    torch.cuda.synchronize()
    if not guards_intact(spec, buffer):
        raise SystemExit(f"guard bytes overwritten at T = {tokens}")
    if not torch.equal(step.metadata.positions[:: spec.tokens_per_step], at.clamp(min=0)) or step.errors.item():
        raise SystemExit(f"wrong positions of a step at T = {tokens}")
    live = ids >= 0
    torch.testing.assert_close(other[live], out[live], rtol=3e-2, atol=3e-2)
    held = live & ((at - spec.window + 1).clamp(min=0) >= int(lens[0]) - spec.rows)  # whole window still in the ring
    for value in (ring, index):
        torch.testing.assert_close(value[held], out[held], rtol=3e-2, atol=3e-2)


def main() -> None:
    torch.manual_seed(0)
    chosen = {int(i) for i in sys.argv[1:]} or range(len(SPECS))
    for i, (name, (spec, heads)) in enumerate(SPECS.items()):
        if i not in chosen:
            continue
        for tokens in (0, 1, 7, 129):
            check(spec, heads, tokens)
        print(f"{name}: T = 0, 1, 7, 129, guard bytes intact")


if __name__ == "__main__":
    main()
