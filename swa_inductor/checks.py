"""The argument checks that fakes and eager implementations share: one place for what is allowed and how it is said.

Shape and dtype checks run at trace time (sizes may be symbolic); value checks run only on real CPU tensors, where
reading them costs no device synchronisation. On a device, bad metadata makes a row a padded row (see reference.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from swa_inductor.errors import require
from swa_inductor.spec import VALUE_BYTES, record_bytes, require_capacity

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _tensor(name: str, t: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, ...], what: str) -> None:
    """`shape` holds a required size, or None for any, per dimension; `what` describes it to the reader."""
    require(t.dtype in dtypes, f"{name} dtype", t.dtype, " or ".join(map(str, dtypes)))
    require(t.dim() == len(shape), f"{name} shape", tuple(t.shape), what)
    for size, wanted in zip(t.shape, shape, strict=True):
        if wanted is not None:
            require(size == wanted, f"{name} shape", tuple(t.shape), what)


def _same_device(reference: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            require(t.device == reference.device, f"{name} device", t.device, f"{reference.device}, where the cache is")


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
    """Arguments of swa_inductor::store (shapes in api.store)."""
    _tensor("k", k, FLOATS, (None, None, None), "[T, num_kv_heads, head_dim]")
    tokens, heads, dim = k.shape
    if v is not None:
        _tensor("v", v, (k.dtype,), (tokens, heads, None), f"[T={tokens}, num_kv_heads={heads}, v_head_dim]")
    require(min_amax > 0, "min_amax", min_amax, "a positive number")
    check_cache(cache, heads, record_bytes(kv_format, dim, None if v is None else v.shape[2]), kv_format)
    _check_metadata(cache, tokens, state_ids, positions)
    _same_device(cache, k=k, v=v)


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
    softcap: float | None,
) -> None:
    """Arguments of swa_inductor::attention (shapes in api.attention)."""
    _tensor("q", q, FLOATS, (None, None, None), "[T, num_heads, head_dim]")
    tokens, heads, dim = q.shape
    require(cache.dim() == 4, "cache shape", tuple(cache.shape), "[num_slots, R, num_kv_heads, record_bytes]")
    kv_heads = cache.shape[2]
    require(heads % kv_heads == 0, "q heads", heads, f"a multiple of num_kv_heads={kv_heads}")
    check_cache(cache, kv_heads, record_bytes(kv_format, dim, v_head_dim), kv_format)
    _check_metadata(cache, tokens, state_ids, positions)
    if valid_start is not None:
        _tensor("valid_start", valid_start, (torch.int32,), (tokens,), f"[T={tokens}]")
    if sinks is not None:
        _tensor("sinks", sinks, FLOATS, (heads,), f"[num_heads={heads}]")
    _same_device(cache, q=q, valid_start=valid_start, sinks=sinks)
    require(window >= 1, "window", window, "an integer of at least 1")
    require(tokens_per_step >= 1, "tokens_per_step", tokens_per_step, "an integer of at least 1")
    require(
        tokens % tokens_per_step == 0, "q shape", tuple(q.shape), f"T a multiple of tokens_per_step={tokens_per_step}"
    )
    require_capacity(cache.shape[1], window, tokens_per_step)
    require(softcap is None or softcap > 0, "softcap", softcap, "None or a positive number")


def check_values(
    cache: torch.Tensor,
    state_ids: torch.Tensor,
    positions: torch.Tensor,
    valid_start: torch.Tensor | None = None,
    tokens_per_step: int = 1,
) -> None:
    """Values of the metadata, read only where that needs no device synchronisation: real tensors on the CPU."""
    if state_ids.device.type != "cpu" or isinstance(state_ids, FakeTensor) or state_ids.numel() == 0:
        return
    slots = cache.shape[0]
    require(bool((state_ids < slots).all()), "state_ids", int(state_ids.max()), f"-1 (padded row) to {slots - 1}")
    require(bool((state_ids >= -1).all()), "state_ids", int(state_ids.min()), f"-1 (padded row) to {slots - 1}")
    live = state_ids >= 0
    require(bool((positions[live] >= 0).all()), "positions", "a negative position", "0 and up where state_ids >= 0")
    if valid_start is not None:
        late = live & (valid_start > positions)
        require(not bool(late.any()), "valid_start", "a start after the query", "valid_start <= positions")
    if tokens_per_step > 1:
        s, p = state_ids.view(-1, tokens_per_step), positions.view(-1, tokens_per_step)
        first = s.argmax(1, keepdim=True)  # any live row of the step: all share one slot, positions count up by one
        base = p.gather(1, first) - first
        steps = base + torch.arange(tokens_per_step)
        ok = (s < 0) | ((s == s.gather(1, first)) & (p == steps))
        require(
            bool(ok.all()),
            "positions",
            "a step that mixes slots or skips a position",
            f"{tokens_per_step} consecutive positions of one slot per step (padded rows apart)",
        )
