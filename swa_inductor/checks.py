"""The argument checks that fakes and eager implementations share: one place for what is allowed and how it is said.

Dtypes, shapes, strides and devices, at trace time too (sizes may be symbolic); checks_values.py looks into tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from swa_inductor.errors import require, require_integer
from swa_inductor.spec import VALUE_BYTES, RawRingSpec, RingSpec, record_bytes, require_capacity

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _tensor(name: str, t: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, ...], what: str) -> None:
    """`shape` holds a required size, or None for any, per dimension; `what` describes it to the reader."""
    if not isinstance(t, torch.Tensor):  # this runs at every eager call: words only for an error
        require(False, name, t, f"a tensor {what}")
    if t.dtype not in dtypes:
        require(False, f"{name} dtype", t.dtype, " or ".join(map(str, dtypes)))
    require(t.dim() == len(shape), f"{name} shape", tuple(t.shape), what)
    for size, wanted in zip(t.shape, shape, strict=True):
        if wanted is not None:
            require(size == wanted, f"{name} shape", tuple(t.shape), what)


def _same_device(reference: torch.Tensor, where: str = "cache is", **tensors: torch.Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            require(t.device == reference.device, f"{name} device", t.device, f"{reference.device}, where the {where}")


def check_spec(
    spec: Any, cache: torch.Tensor | None = None, kind: type[RingSpec] | type[RawRingSpec] = RingSpec
) -> None:
    """The `spec` of a public function, which is no argument of its op, and that `cache` has the rows it says.

    Traced like its caller, so that it forms no words unless there is an error.
    """
    if not isinstance(spec, kind):
        require(False, "spec", type(spec).__name__, f"a {kind.__name__}")
    ring = spec if isinstance(spec, RingSpec) else spec.ring
    if isinstance(cache, torch.Tensor) and cache.dim() == 4 and cache.shape[1] != ring.rows:
        require(False, "cache shape", tuple(cache.shape), f"R={ring.rows} rows, those of spec")


def check_cache(cache: torch.Tensor, num_kv_heads: Any, record: int, kv_format: str) -> None:
    """A cache is uint8 [num_slots, R, H_kv, record], any strides; a record's bytes are adjacent and aligned."""
    what = f"[num_slots, R, num_kv_heads={num_kv_heads}, record_bytes={record}] (format {kv_format!r})"
    _tensor("cache", cache, (torch.uint8,), (None, None, num_kv_heads, record), what)
    require(cache.shape[0] >= 1, "cache shape", tuple(cache.shape), "at least one slot")
    require(cache.stride(3) == 1, "cache stride(3)", cache.stride(3), "1 (the bytes of a record are adjacent)")
    align = VALUE_BYTES[kv_format]
    for i in range(3):
        require(cache.stride(i) % align == 0, f"cache stride({i})", cache.stride(i), f"a multiple of {align} bytes")
    # Kernels assume 16-byte alignment; torch.compile copies an input that lacks it, whole, at every call.
    offset = cache.storage_offset()
    require(offset % 16 == 0, "cache storage offset", offset, "a multiple of 16 bytes")


def _check_metadata(cache: torch.Tensor, tokens: Any, state_ids: torch.Tensor, positions: torch.Tensor) -> None:
    _tensor("state_ids", state_ids, (torch.int32,), (tokens,), f"[T={tokens}]")
    _tensor("positions", positions, (torch.int64,), (tokens,), f"[T={tokens}]")
    _same_device(cache, state_ids=state_ids, positions=positions)


def check_store(
    k: torch.Tensor,
    v: torch.Tensor | None,
    cache: torch.Tensor,
    state_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_format: str,
    min_amax: float,
) -> None:
    """Arguments of swa_inductor::store (shapes in api_store.store)."""
    _tensor("k", k, FLOATS, (None, None, None), "[T, num_kv_heads, head_dim]")
    tokens, heads, dim = k.shape
    if v is not None:
        _tensor("v", v, (k.dtype,), (tokens, heads, None), f"[T={tokens}, num_kv_heads={heads}, v_head_dim]")
    require(0 < min_amax < math.inf, "min_amax", min_amax, "a positive number")
    check_cache(cache, heads, record_bytes(kv_format, dim, None if v is None else v.shape[2]), kv_format)
    _check_metadata(cache, tokens, state_ids, positions)
    _same_device(cache, k=k, v=v)


def check_normed(x: torch.Tensor, tokens: Any, cache: torch.Tensor) -> None:
    """Rows that swa_inductor::norm_store normalises (shapes in api_store.norm_store)."""
    what = f"[T={tokens}, N], N at least 1"
    _tensor("x", x, FLOATS, (tokens, None), what)
    require(x.shape[1] >= 1, "x shape", tuple(x.shape), what)
    _same_device(cache, x=x)


def _check_query(
    q: torch.Tensor, kv_heads: Any, sinks: torch.Tensor | None, scale: float, softcap: float | None
) -> None:
    _tensor("q", q, FLOATS, (None, None, None), "[T, num_heads, head_dim]")
    heads = q.shape[1]
    require(heads % kv_heads == 0, "q heads", heads, f"a multiple of num_kv_heads={kv_heads}")
    if sinks is not None:
        _tensor("sinks", sinks, FLOATS, (heads,), f"[num_heads={heads}]")
    require(softcap is None or 0 < softcap < math.inf, "softcap", softcap, "None or a positive number")
    require(-math.inf < scale < math.inf, "scale", scale, "a finite number")


def _check_records(cache: torch.Tensor, head_dim: Any, v_head_dim: int | None, kv_format: str) -> Any:
    """A cache that is read with vectors of these dims; returns its number of KV heads."""
    _tensor("cache", cache, (torch.uint8,), (None,) * 4, "[num_slots, R, num_kv_heads, record_bytes]")
    kv_heads = cache.shape[2]
    check_cache(cache, kv_heads, record_bytes(kv_format, head_dim, v_head_dim), kv_format)
    return kv_heads


def _check_new(
    k: torch.Tensor, v: torch.Tensor | None, tokens: Any, heads: Any, dim: Any, v_dim: Any, dtype: torch.dtype
) -> None:
    """New vectors of an attention call or a workspace; `tokens` None for any number of rows."""
    rows = "T" if tokens is None else f"T={tokens}"
    _tensor("k", k, (dtype,), (tokens, heads, dim), f"[{rows}, num_kv_heads={heads}, head_dim={dim}]")
    if v is not None:
        wanted = f"[{rows}, num_kv_heads={heads}, v_head_dim={'any' if v_dim is None else v_dim}]"
        _tensor("v", v, (dtype,), (k.shape[0], heads, v_dim), wanted)


def check_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    state_ids: torch.Tensor,
    positions: torch.Tensor,
    valid_start: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: int,
    kv_format: str,
    v_head_dim: int | None,
    tokens_per_step: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Arguments of swa_inductor::attention (shapes in api.attention)."""
    _tensor("q", q, FLOATS, (None, None, None), "[T, num_heads, head_dim]")
    tokens, _, dim = q.shape
    _check_query(q, _check_records(cache, dim, v_head_dim, kv_format), sinks, scale, softcap)
    _check_metadata(cache, tokens, state_ids, positions)
    if valid_start is not None:
        _tensor("valid_start", valid_start, (torch.int32,), (tokens,), f"[T={tokens}]")
    _same_device(cache, q=q, valid_start=valid_start, sinks=sinks)
    require(window >= 1, "window", window, "an integer of at least 1")
    require(tokens_per_step >= 1, "tokens_per_step", tokens_per_step, "an integer of at least 1")
    require(
        tokens % tokens_per_step == 0, "q shape", tuple(q.shape), f"T a multiple of tokens_per_step={tokens_per_step}"
    )
    require_capacity(cache.shape[1], window, tokens_per_step)


def check_attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cache: torch.Tensor,
    state_ids: torch.Tensor,
    positions: torch.Tensor,
    q_starts: torch.Tensor,
    valid_start: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: int,
    kv_format: str,
    scale: float,
    softcap: float | None,
) -> None:
    """Arguments of swa_inductor::attention_prefill (shapes in api.attention_prefill)."""
    v_dim = None if v is None else v.shape[-1]
    _tensor("q", q, FLOATS, (None, None, None), "[T, num_heads, head_dim]")
    tokens, _, dim = q.shape
    kv_heads = _check_records(cache, dim, v_dim, kv_format)
    _check_query(q, kv_heads, sinks, scale, softcap)
    _check_new(k, v, tokens, kv_heads, dim, v_dim, q.dtype)
    _check_metadata(cache, tokens, state_ids, positions)
    _tensor("q_starts", q_starts, (torch.int64,), (tokens,), f"[T={tokens}]")
    if valid_start is not None:
        _tensor("valid_start", valid_start, (torch.int32,), (tokens,), f"[T={tokens}]")
    _same_device(cache, q=q, k=k, v=v, q_starts=q_starts, valid_start=valid_start, sinks=sinks)
    require(window >= 1, "window", window, "an integer of at least 1")
    require_capacity(cache.shape[1], window, 1)


def check_attention_workspace(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    pivots: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Arguments of swa_inductor::attention_workspace (shapes in api.attention_workspace)."""
    _tensor("q", q, FLOATS, (None, None, None), "[T, num_heads, head_dim]")
    tokens, _, dim = q.shape
    _tensor("k", k, (q.dtype,), (None, None, dim), f"[rows, num_kv_heads, head_dim={dim}]")
    _check_query(q, k.shape[1], sinks, scale, softcap)
    _check_new(k, v, None, k.shape[1], dim, None, q.dtype)
    _tensor("pivots", pivots, (torch.int32,), (tokens, 4), f"[T={tokens}, 4]")
    _same_device(q, "queries are", k=k, v=v, pivots=pivots, sinks=sinks)
    require(window >= 1, "window", window, "an integer of at least 1")


def check_attention_index(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor,
    sinks: torch.Tensor | None,
    kv_format: str,
    v_head_dim: int | None,
    scale: float,
    softcap: float | None,
) -> None:
    """Arguments of swa_inductor::attention_index (shapes in api.attention_index)."""
    _tensor("q", q, FLOATS, (None, None, None), "[T, num_heads, head_dim]")
    _check_query(q, _check_records(cache, q.shape[2], v_head_dim, kv_format), sinks, scale, softcap)
    _tensor("index", index, (torch.int32,), (q.shape[0], None), f"[T={q.shape[0]}, N]")
    _same_device(cache, q=q, index=index, sinks=sinks)


def check_gather(
    cache: torch.Tensor,
    state_ids: torch.Tensor,
    q_starts: torch.Tensor,
    valid_start: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    window: int,
    kv_format: str,
    head_dim: int,
    v_head_dim: int | None,
    dtype: torch.dtype,
) -> None:
    """Arguments of swa_inductor::gather (shapes in api.gather)."""
    kv_heads = _check_records(cache, head_dim, v_head_dim, kv_format)
    require(dtype in FLOATS, "dtype", dtype, " or ".join(map(str, FLOATS)))
    _tensor("state_ids", state_ids, (torch.int32,), (None,), "[B]")
    sequences = state_ids.shape[0]
    _tensor("q_starts", q_starts, (torch.int64,), (sequences,), f"[B={sequences}]")
    if valid_start is not None:
        _tensor("valid_start", valid_start, (torch.int32,), (sequences,), f"[B={sequences}]")
    needs_v = k is not None and v_head_dim is not None
    require((v is not None) == needs_v, "v", "a tensor" if v is not None else "None", "as k, and None when K = V")
    if k is not None:
        _check_new(k, v, None, kv_heads, head_dim, v_head_dim, dtype)
    _same_device(cache, state_ids=state_ids, q_starts=q_starts, valid_start=valid_start, k=k, v=v)
    require(window >= 1, "window", window, "an integer of at least 1")
    require_capacity(cache.shape[1], window, 1)


def check_row_ids(window: int, ring_rows: int, num_slots: int) -> None:
    """Geometry of an op that makes flat row ids, which leave as int32."""
    require(window >= 1, "window", window, "an integer of at least 1")
    require_capacity(ring_rows, window, 1)
    require_integer("num_slots", num_slots)
    rows = num_slots * ring_rows
    require(rows < 2**31, "num_slots", f"{num_slots} of R={ring_rows}", "1 and up, num_slots * R below 2^31")


def check_decode_index(
    state_ids: torch.Tensor,
    positions: torch.Tensor,
    valid_start: torch.Tensor | None,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None,
) -> None:
    """Arguments of swa_inductor::decode_index (shapes in api.decode_index)."""
    _tensor("state_ids", state_ids, (torch.int32,), (None,), "[T]")
    tokens = state_ids.shape[0]
    _tensor("positions", positions, (torch.int64,), (tokens,), f"[T={tokens}]")
    if valid_start is not None:
        _tensor("valid_start", valid_start, (torch.int32,), (tokens,), f"[T={tokens}]")
    _same_device(state_ids, "state_ids are", positions=positions, valid_start=valid_start)
    check_row_ids(window, ring_rows, num_slots)
    require(width is None or width >= window, "width", width, f"None or at least window={window}")


def check_prepare_decode(
    lengths: torch.Tensor,
    accepted: torch.Tensor,
    state_ids: torch.Tensor,
    valid_start: torch.Tensor | None,
    draft_counts: torch.Tensor | None,
    tokens_per_step: int,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None,
) -> None:
    """Arguments of swa_inductor::prepare_decode (shapes in api_metadata.prepare_decode)."""
    _tensor("state_ids", state_ids, (torch.int32,), (None,), "[B]")
    sequences = state_ids.shape[0]
    _tensor("lengths", lengths, (torch.int64,), (sequences,), f"[B={sequences}]")
    lists = {"accepted": accepted, "valid_start": valid_start, "draft_counts": draft_counts}
    for name, t in lists.items():
        if t is not None or name == "accepted":
            _tensor(name, t, (torch.int32,), (sequences,), f"[B={sequences}]")
    _same_device(state_ids, "state_ids are", lengths=lengths, **lists)
    require(tokens_per_step >= 1, "tokens_per_step", tokens_per_step, "an integer of at least 1")
    check_row_ids(window, ring_rows, num_slots)
    require_capacity(ring_rows, window, tokens_per_step)
    require(width is None or width >= window, "width", width, f"None or at least window={window}")


def check_out(
    inputs: Sequence[torch.Tensor | None],
    out: Mapping[str, torch.Tensor | None],
    wanted: Mapping[str, tuple[tuple[Any, ...], torch.dtype]],
) -> None:
    """Buffers of the caller for the results: contiguous, shape and dtype as `wanted`; None only for an absent index."""
    device = next(t.device for t in inputs if t is not None)
    for name, (shape, dtype) in wanted.items():
        t, absent = out[name], name == "index" and len(shape) == 1
        require(
            (t is None) == absent, f"out.{name}", "None" if t is None else "a tensor", "an index exactly with width"
        )
        if t is None:
            continue
        _tensor(f"out.{name}", t, (dtype,), shape, str(list(shape)))
        require(t.device == device, f"out.{name} device", t.device, f"{device}, where the inputs are")
        # Inductor hands a copy of anything else to a kernel, and what the kernel wrote would be lost with it.
        strides = (1,) if t.dim() == 1 else (shape[1], 1)
        require(t.stride() == strides, f"out.{name} stride", t.stride(), f"{strides} (contiguous)")
        offset = t.storage_offset() * t.element_size()
        require(offset % 16 == 0, f"out.{name} storage offset", f"{offset} bytes", "a multiple of 16 bytes")
        shared = any(_overlap(t, other) for other in inputs if other is not None)
        require(not shared, f"out.{name}", "memory of an input", "memory of its own")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the ranges of addresses of two tensors meet; when traced, whether they are one."""
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
        return a is b

    def end(t: torch.Tensor) -> int:
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr() + (last + 1) * t.element_size()

    return a.numel() > 0 and b.numel() > 0 and a.data_ptr() < end(b) and b.data_ptr() < end(a)


def check_prefill_plan(
    state_ids: torch.Tensor,
    q_lens: torch.Tensor,
    k_lens: torch.Tensor,
    valid_start: torch.Tensor | None,
    num_tokens: Any,
    window: int,
    ring_rows: int,
    num_slots: int,
) -> None:
    """Arguments of swa_inductor::prefill_plan (shapes in api.prefill_plan)."""
    _tensor("state_ids", state_ids, (torch.int32,), (None,), "[B]")
    sequences = state_ids.shape[0]
    lists = {"q_lens": q_lens, "k_lens": k_lens, "valid_start": valid_start}
    for name, t in lists.items():
        if t is not None or name != "valid_start":
            _tensor(name, t, (torch.int32,), (sequences,), f"[B={sequences}]")
    _same_device(state_ids, "state_ids are", **lists)
    require(num_tokens >= 0, "num_tokens", num_tokens, "0 and up")
    check_row_ids(window, ring_rows, num_slots)


def check_prefill_index(pivots: torch.Tensor, window: int) -> None:
    """Arguments of swa_inductor::prefill_index (shapes in api.prefill_index)."""
    _tensor("pivots", pivots, (torch.int32,), (None, 4), "[T, 4]")
    require(window >= 1, "window", window, "an integer of at least 1")


def check_ring_read_raw(
    cache: torch.Tensor,
    state_ids: torch.Tensor,
    positions: torch.Tensor,
    valid_start: torch.Tensor | None,
    window: int,
    kv_format: str,
) -> None:
    """Arguments of swa_inductor::ring_read_raw (shapes in api.ring_read_raw)."""
    raw = [name for name in VALUE_BYTES if name != "mxfp8"]
    require(kv_format in raw, "kv_format", repr(kv_format), "one of " + ", ".join(map(repr, raw)))
    what = "[num_slots, entries, 1, bytes of an entry]"
    _tensor("cache", cache, (torch.uint8,), (None,) * 4, what)
    size = VALUE_BYTES[kv_format]
    require(cache.shape[3] % size == 0, "cache shape", tuple(cache.shape), f"{what}, {size} bytes a value")
    check_cache(cache, 1, cache.shape[3], kv_format)
    _tensor("state_ids", state_ids, (torch.int32,), (None,), "[T]")
    _check_metadata(cache, state_ids.shape[0], state_ids, positions)
    if valid_start is not None:
        _tensor("valid_start", valid_start, (torch.int32,), tuple(state_ids.shape), f"[T={state_ids.shape[0]}]")
    _same_device(cache, valid_start=valid_start)
    require(window >= 1, "window", window, "an integer of at least 1")
    require_capacity(cache.shape[1], window, 1)


def check_raw_values(values: torch.Tensor, cache: torch.Tensor, width: int) -> None:
    """Entries that go into a raw ring (api.ring_write_raw); traced like check_spec."""
    _tensor("values", values, FLOATS, (None, None), "[T, width]")
    if values.shape[1] != width:
        require(False, "values shape", tuple(values.shape), f"[T, width={width}]")
    if isinstance(cache, torch.Tensor):
        _same_device(cache, values=values)


def check_merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    """Arguments of api.merge_attention, which is no op; traced like check_spec. fp64 is for those who judge others."""
    _tensor("out_a", out_a, (*FLOATS, torch.float64), (None, None, None), "[T, H, Dv]")
    lse = ((torch.float32, torch.float64), tuple(out_a.shape[:2]), "[T, H], as out_a has them")
    _tensor("lse_a", lse_a, *lse)
    _tensor("out_b", out_b, (*FLOATS, torch.float64), tuple(out_a.shape), "[T, H, Dv], as out_a has them")
    _tensor("lse_b", lse_b, *lse)
    if sinks is not None:
        _tensor("sinks", sinks, (*FLOATS, torch.float64), tuple(out_a.shape[1:2]), "[H], as out_a has it")
    _same_device(out_a, "first output is", lse_a=lse_a, out_b=out_b, lse_b=lse_b, sinks=sinks)
