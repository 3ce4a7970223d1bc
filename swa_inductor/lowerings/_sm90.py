"""Parts of the kernel in templates/_attention_sm90.py.jinja, in Gluon: layouts, the window, vectors, softmax.

The window of K = V stays in shared memory as bf16 tiles [rows, dim] whose columns are permuted inside each block of 32:
column 8i + 2n + e lies at 8n + 2i + e. So the registers that wgmma wants of a thread, of its left operand as of its
accumulator, hold 8 adjacent columns of a vector: q and out travel between memory and registers 16 bytes at a time, and
no step of the loop over tokens meets a barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the name until Triton 3.6


@gluon.constexpr_function
def blocks_layout(rows, groups, warps):
    """[rows, groups, 8] words: a thread holds blocks of 32 codes; warps side by side in rows, then in blocks.

    A warp spans 8 rows x 4 blocks, whole lines of memory, where there are rows for all warps, else 16 x 2. The lanes of
    a row must be adjacent: a reduction over its blocks, as Triton 3.6 and 3.7 lower it, shuffles the lowest lanes,
    wherever the layout puts them (with blocks at lanes 1 and 8 it mixed rows and read scratch that nobody had written).
    """
    register = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    if rows >= 8 * warps:
        lane, r, g = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], 8, 4
    else:
        lane, r, g = [[0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]], 16, 2
    warp = []
    while warps > 1:
        if r < rows:
            warp, r = warp + [[r, 0, 0]], 2 * r
        else:
            warp, g = warp + [[0, g if g < groups else 0, 0]], 2 * g
        warps //= 2
    while g < groups:
        register, g = register + [[0, g, 0]], 2 * g
    while r < rows:
        register, r = register + [[r, 0, 0]], 2 * r
    return gl.DistributedLinearLayout(register, lane, warp, [], [rows, groups, 8])


@gluon.constexpr_function
def vectors_layout(rows, columns, warps, halves):
    """[rows, columns] of q or out: four lanes hold 8 adjacent columns each, as wgmma does of permuted ones.

    Four warps hold 64 rows. Those behind hold further rows; `halves`: the next four hold the same rows, and
    the upper half of the columns (2) or the same columns (1).
    """
    register, warp = [[0, 1], [0, 2], [0, 4], [8, 0]], [[16, 0], [32, 0]]
    c, r = 32, 64
    while c < columns // max(halves, 1):
        register, c = register + [[0, c]], 2 * c
    while warps > 4:
        if halves:
            warp = warp + [[0, columns // 2] if halves == 2 else [0, 0]]
        else:
            warp, r = warp + [[r, 0]], 2 * r
        warps //= 2
    return gl.DistributedLinearLayout(register, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], warp, [], [rows, columns])


@gluon.constexpr_function
def product_layout(warps, columns, split):
    """Accumulator of wgmma: warpgroups side by side in rows or, with `split`, in columns."""
    across = warps // 4 if split else 1
    return gl.NVMMADistributedLayout([3, 0], [warps // across, across], [16, columns // across, 16])


@gluon.jit
def live_keys(
    STATE_IDS, POSITIONS, VALID_START, token, exists, STRIDES: gl.constexpr, SLOTS, LIMIT, WINDOW: gl.constexpr
):
    """Slot, first visible position and position of tokens, and whether they are neither padded nor bad."""
    slot = gl.load(STATE_IDS + token * STRIDES[0], mask=exists, other=-1)
    position = gl.load(POSITIONS + token * STRIDES[1], mask=exists, other=-1).to(gl.int64)
    start = gl.maximum(position - (WINDOW - 1), 0)
    if VALID_START is not None:
        start = gl.maximum(start, gl.load(VALID_START + token * STRIDES[2], mask=exists, other=0).to(gl.int64))
    live = (slot >= 0) & (slot < SLOTS) & (position >= 0) & (start <= position)
    if LIMIT is not None:
        live = live & (position < LIMIT)
    return slot, start, position, live


@gluon.jit
def window_of(slot, start, position, live, R: gl.constexpr):
    """The window of the tokens of a program: slot, first position, number of keys (int32), row of the first."""
    owner = gl.max(gl.where(live, slot, -1), 0)
    live = live & (slot == owner)
    lo = gl.min(gl.where(live, start, 0x7FFFFFFFFFFFFFFF), 0)
    hi = gl.max(gl.where(live, position, -1), 0)
    n = gl.where(owner >= 0, gl.minimum(hi - lo + 1, R), 0).to(gl.int32)
    return owner, lo, n, gl.where(owner >= 0, lo % R, 0).to(gl.int32)


@gluon.jit
def load_blocks(
    ring,
    first_row,
    n,
    j0,
    column,
    ROWS: gl.constexpr,
    GROUPS: gl.constexpr,
    R: gl.constexpr,
    STRIDE: gl.constexpr,
    DIM: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Keys j0 .. j0 + ROWS of the window: int32 [ROWS, GROUPS, 8] of codes from `column` up, bytes [ROWS, GROUPS]."""
    L: gl.constexpr = blocks_layout(ROWS, GROUPS, WARPS)
    LG: gl.constexpr = gl.SliceLayout(2, L)
    j = j0 + gl.arange(0, ROWS, gl.SliceLayout(1, LG))
    row = first_row + j
    row = gl.expand_dims(gl.where(row >= R, row - R, row), 1)
    present = gl.expand_dims(j < n, 1)
    g = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, LG)), 0)
    w = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, L)))
    at = gl.expand_dims(row * (STRIDE // 4) + g * 8, 2) + gl.expand_dims(gl.expand_dims(w, 0), 0)
    codes = (ring + column).to(gl.pointer_type(gl.int32), bitcast=True)
    words = gl.load(codes + at, mask=gl.expand_dims(present, 2), other=0)
    byte = gl.load((ring + column // 32) + (row * STRIDE + g + DIM), mask=present, other=127)
    return words, byte.to(gl.int32)


# Four codes times the scale of their block -> four bf16, and bits other than signs where one of them is not finite.
# By way of fp16 and fp32: conversion of e4m3 to bf16 in one instruction runs at a quarter of the rate.
DECODE: gl.constexpr = gl.constexpr("""{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 pair, x, y, zero;
    mov.b32 {low, high}, $3;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {a, b}, pair;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {c, d}, pair;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    cvt.rn.bf16x2.f32 pair, y, x;
    mul.rn.bf16x2 $0, pair, $4;
    cvt.f32.f16 x, c;
    cvt.f32.f16 y, d;
    cvt.rn.bf16x2.f32 pair, y, x;
    mul.rn.bf16x2 $1, pair, $4;
    mov.b32 zero, 0;
    mul.rn.bf16x2 $2, $0, zero;
    fma.rn.bf16x2 $2, $1, zero, $2;
}""")


@gluon.jit
def store_blocks(words, byte, tile):
    """Dequantise blocks into `tile` int32 [ROWS, pairs], columns permuted; -> int32 [ROWS], not 0 where not finite."""
    ROWS: gl.constexpr = words.shape[0]
    GROUPS: gl.constexpr = words.shape[1]
    scale = gl.where(byte == 0, 0x40, gl.where(byte == 255, 0x7FC0, byte << 7))
    words, scale = gl.broadcast(words, gl.expand_dims(scale | (scale << 16), 2))
    lo, hi, rest = gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,=&r,r,r", [words, scale], dtype=(gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    pairs = gl.join(lo, hi).reshape([ROWS, GROUPS, 4, 4]).permute([0, 1, 3, 2])
    tile.store(pairs.reshape([ROWS, GROUPS * 16]))
    return gl.reduce_or(gl.reduce_or(rest, 2), 1) & 0x7FFF7FFF


@gluon.jit
def make_finite(tile, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """What is not finite leaves a tile: 0 * NaN must not appear in a row that does not see the key."""
    for c in gl.static_range(tile.shape[1] // COLUMNS):
        part = tile.slice(c * COLUMNS, COLUMNS, dim=1)
        x = part.load(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))
        part.store(gl.where(gl.abs(x.to(gl.float32)) < float("inf"), x, 0.0))


@gluon.jit
def load_vectors(Q, at, columns: gl.constexpr, first, L: gl.constexpr, wanted):
    """q of the rows that start at `at` int64 [rows], columns first .. first + columns; `wanted`: a scalar, or None."""
    c = gl.arange(0, columns, gl.SliceLayout(0, L)).to(gl.int64)
    p = (Q + first) + (gl.expand_dims(at, 1) + gl.expand_dims(c, 0))
    if wanted is None:
        return gl.load(p)
    else:
        return gl.load(p, mask=wanted, other=0.0)


@gluon.jit
def squares_of(x):
    """Sum of squares of each row, fp32."""
    return gl.sum(x.to(gl.float32) * x.to(gl.float32), 1)


@gluon.jit
def permute_columns(x):
    """The permutation of the tiles; its own inverse. Registers keep their place."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, COLUMNS // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, COLUMNS])


@gluon.jit
def rotate(
    x,
    ROPE,
    POSITIONS,
    token0,
    first,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    STRIDES: gl.constexpr,
    LIMIT,
    DIM: gl.constexpr,
    INVERSE: gl.constexpr,
):
    """RoPE of the last DIM columns of x, whose row m is of the program's token first + m // HEADS; -> fp32.

    Both of a pair are in one thread. Rows without a token are turned as those of the last one.
    """
    ROWS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1] // 2
    a, b = gl.split(x.to(gl.float32).reshape([ROWS // HEADS, HEADS, PAIRS, 2]))
    LT: gl.constexpr = gl.SliceLayout(1, a.type.layout)  # [tokens, pairs]
    token = gl.minimum(first + gl.arange(0, ROWS // HEADS, gl.SliceLayout(1, LT)), TOKENS - 1)
    pair = gl.expand_dims(gl.arange(0, PAIRS, gl.SliceLayout(0, LT)) - (PAIRS - DIM // 2), 0)
    position = gl.expand_dims(gl.load(POSITIONS + (token0 + token) * STRIDES[0]).to(gl.int64), 1)
    turned = (pair >= 0) & (position >= 0) & (position < LIMIT)
    at = ROPE + (position * STRIDES[1] + pair)
    cos = gl.expand_dims(gl.load(at, mask=turned, other=1.0), 1)
    sin = gl.expand_dims(gl.load(at + DIM // 2, mask=turned, other=0.0), 1)
    if INVERSE:
        sin = -sin
    return gl.join(a * cos - b * sin, b * cos + a * sin).reshape([ROWS, 2 * PAIRS])


@gluon.jit
def visible_scores(s, flags, any_broken, j0: gl.constexpr, first_key, last_key, L: gl.constexpr):
    """Scores of the keys j0 up: NaN where a key is not finite, -inf where it is not visible."""
    LJ: gl.constexpr = gl.SliceLayout(0, L)
    if any_broken != 0:
        s = gl.where(gl.expand_dims(flags.slice(j0, s.shape[1]).load(LJ), 0) != 0, float("nan"), s)
    j = gl.expand_dims(j0 + gl.arange(0, s.shape[1], LJ), 0)
    first = gl.expand_dims(gl.convert_layout(first_key, gl.SliceLayout(1, L)), 1)
    last = gl.expand_dims(gl.convert_layout(last_key, gl.SliceLayout(1, L)), 1)
    return gl.where((j >= first) & (j <= last), s, float("-inf"))


@gluon.jit
def weights_of(s, scale, base, L: gl.constexpr):
    """exp2(s * scale - base); scale and base of each row, as of another product."""
    LR: gl.constexpr = gl.SliceLayout(1, L)
    return gl.exp2(s * gl.expand_dims(gl.convert_layout(scale, LR), 1) - gl.expand_dims(gl.convert_layout(base, LR), 1))


@gluon.jit
def take_sink(top, total, SINKS, head, STRIDE: gl.constexpr, LOG2E: gl.constexpr):
    """What the output is multiplied by, with the sink in the denominator; top and total in base 2."""
    decay = gl.full_like(top, 1.0)
    if SINKS is not None:
        sink = gl.load(SINKS + head * STRIDE).to(gl.float32) * LOG2E
        high = gl.maximum(top, sink)
        base = gl.where(high == float("-inf"), 0.0, high)
        decay = gl.exp2(top - base)
        total = total * decay + gl.exp2(sink - base)
    return decay / gl.where(total == 0.0, 1.0, total)
