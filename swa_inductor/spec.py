"""What a ring is: record formats and ring geometry, in plain Python.

The numbers below are shared by the host, the fakes, the lowerings and the docs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swa_inductor.errors import require, require_integer

MXFP8_BLOCK = 32
"""Values along the head dim that share one ue8m0 scale byte."""

DEFAULT_MIN_AMAX = 1e-4
"""Floor of a block's absolute maximum: an all-zero block gets scale byte 105, never a division by zero."""

VALUE_BYTES = {"mxfp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one stored value, by record format."""


def vector_bytes(kv_format: str, dim: int, name: str = "head_dim") -> int:
    """Bytes of one stored vector of `dim` values: data, then (mxfp8) one scale byte per block of 32.

    Raises InvalidArgumentError for an unknown format, or an mxfp8 dim, called `name`, that is no multiple of 32.
    """
    known = isinstance(kv_format, str) and kv_format in VALUE_BYTES
    require(known, "kv_format", repr(kv_format), "one of " + ", ".join(map(repr, VALUE_BYTES)))
    if kv_format != "mxfp8":
        return dim * VALUE_BYTES[kv_format]
    require(dim % MXFP8_BLOCK == 0, name, dim, f"a multiple of {MXFP8_BLOCK} in format 'mxfp8'")
    return dim + dim // MXFP8_BLOCK


def record_bytes(kv_format: str, head_dim: int, v_head_dim: int | None) -> int:
    """Bytes of one (token, KV head) record: the K vector, then the V vector unless K = V (`v_head_dim` None)."""
    k_bytes = vector_bytes(kv_format, head_dim)
    return k_bytes + (0 if v_head_dim is None else vector_bytes(kv_format, v_head_dim, "v_head_dim"))


def require_capacity(rows: int, window: int, tokens_per_step: int) -> None:
    """R >= W + D - 1: with fewer rows a draft of this step overwrites a record that the first query still reads."""
    minimum = window + tokens_per_step - 1
    if isinstance(rows, int) and rows >= minimum:
        return  # no message is made, as in require_integer
    require(
        rows >= minimum,
        "ring rows",
        f"R={rows} with window W={window}, tokens_per_step D={tokens_per_step}",
        f"R >= W + D - 1 = {minimum}",
    )


@dataclass(frozen=True)
class RingSpec:
    """Geometry of the ring of one layer.

    Args:
        window: keys a query sees, itself included (W).
        tokens_per_step: query tokens of one sequence in a decode step, drafts included (D).
        head_dim: values of a K vector.
        num_kv_heads: KV heads (H_kv); query heads are any multiple of it.
        v_head_dim: values of a V vector; default `head_dim`. Must be left out when `shared_kv`.
        shared_kv: K and V are one and the same vector, stored once.
        kv_format: 'mxfp8' (e4m3fn data plus one ue8m0 scale byte per 32 values), 'bf16', 'fp16' or 'fp32'.
        ring_rows: rows of the ring (R); default W + D, never below W + D - 1.
        min_amax: floor of a block's absolute maximum when casting to mxfp8.

    Raises:
        InvalidArgumentError: naming the argument, what came and what is allowed.
    """

    window: int
    tokens_per_step: int
    head_dim: int
    num_kv_heads: int = 1
    v_head_dim: int | None = None
    shared_kv: bool = False
    kv_format: str = "mxfp8"
    ring_rows: int | None = None
    min_amax: float = DEFAULT_MIN_AMAX

    def __post_init__(self) -> None:
        for name in ("window", "tokens_per_step", "head_dim", "num_kv_heads"):
            require_integer(name, getattr(self, name))
        if self.shared_kv:
            require(self.v_head_dim is None, "v_head_dim", self.v_head_dim, "None when shared_kv (K is V)")
        elif self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        else:
            require_integer("v_head_dim", self.v_head_dim)
        if not (isinstance(self.min_amax, int | float) and 0 < self.min_amax < math.inf):
            require(False, "min_amax", repr(self.min_amax), "a positive number")
        record_bytes(self.kv_format, self.head_dim, self.v_head_dim)
        if self.ring_rows is None:
            object.__setattr__(self, "ring_rows", self.window + self.tokens_per_step)
        require_integer("ring_rows", self.ring_rows)
        require_capacity(self.rows, self.window, self.tokens_per_step)

    @property
    def rows(self) -> int:
        """Rows of the ring (R)."""
        assert self.ring_rows is not None  # __post_init__ filled it
        return self.ring_rows

    @property
    def record_bytes(self) -> int:
        """Bytes of one (token, KV head) record; 528 for mxfp8, head_dim 512, K = V."""
        return record_bytes(self.kv_format, self.head_dim, self.v_head_dim)

    @property
    def ring_bytes(self) -> int:
        """Bytes of one ring: R rows of H_kv records."""
        return self.rows * self.num_kv_heads * self.record_bytes

    @property
    def output_head_dim(self) -> int:
        """Values of an output vector: those of V."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def max_rollback(self) -> int:
        """Most tokens that can be taken back from the end of a sequence with every visible row still in the ring."""
        return self.rows - self.window + 1

    def cache_shape(self, num_slots: int) -> tuple[int, int, int, int]:
        """Shape of the uint8 cache tensor that holds one ring for each of `num_slots` sequences."""
        return (num_slots, self.rows, self.num_kv_heads, self.record_bytes)

    def visible(self, position: int, valid_start: int = 0) -> tuple[int, int]:
        """First visible position and number of visible positions of the query at `position`."""
        lo = max(position - self.window + 1, valid_start, 0)
        return lo, position - lo + 1

    def flat_row(self, slot: int, position: int) -> int:
        """Flat row id of a record: `slot * R + position % R`. Not a byte offset: caches are strided views."""
        return slot * self.rows + position % self.rows


@dataclass(frozen=True)
class RawRingSpec:
    """Geometry of a ring of raw values: the state of a layer that compresses `ratio` tokens into one.

    Args:
        ratio: entries that a compression reads.
        tokens_per_step: query tokens of one sequence in a decode step, drafts included (D).
        width: values of an entry.
        dtype: 'fp32', 'fp16' or 'bf16'; entries are stored as they are.
        entries: entries of the ring; default and minimum ratio + D - 1.

    Raises:
        InvalidArgumentError: naming the argument, what came and what is allowed.
    """

    ratio: int
    tokens_per_step: int
    width: int
    dtype: str = "fp32"
    entries: int | None = None

    def __post_init__(self) -> None:
        raw = [name for name in VALUE_BYTES if name != "mxfp8"]
        require(self.dtype in raw, "dtype", repr(self.dtype), "one of " + ", ".join(map(repr, raw)))
        for name in ("ratio", "tokens_per_step", "width"):
            require_integer(name, getattr(self, name))
        if self.entries is None:
            object.__setattr__(self, "entries", self.ratio + self.tokens_per_step - 1)
        require_integer("entries", self.entries)
        self.ring  # noqa: B018  refuses a ring that is too small

    @property
    def ring(self) -> RingSpec:
        """The same ring as a RingSpec: a window of `ratio` records, each of them one entry."""
        return RingSpec(
            self.ratio,
            self.tokens_per_step,
            self.width,
            shared_kv=True,
            kv_format=self.dtype,
            ring_rows=self.entries,
        )
