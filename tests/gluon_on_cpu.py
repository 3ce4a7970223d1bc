"""Runs the text of the generated Gluon kernel of attention on the CPU: its logic in torch, not its layouts.

Triton's interpreter does not know Gluon. What is executed is the very kernel and its helpers (lowerings/_sm90.py), with
`gl` replaced by functions on tensors: indices, masks, permutations, formats and rounding are checked; layouts, barriers
and the instructions of wgmma are not, which a GPU has to show. The decoding in PTX is replaced by the same in integers.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from swa_inductor import lowerings
from swa_inductor.testing import GeneratedCode

INF = float("inf")


class Value(Tensor):  # type: ignore
    """A tensor with Gluon's methods."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        plain = self.as_subclass(Tensor)
        return _value(plain.contiguous().view(dtype) if bitcast else plain.to(dtype))


def _value(x: Any, dtype: torch.dtype | None = None) -> Value:
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


def _plain(x: Any) -> Tensor:
    return torch.as_tensor(x).as_subclass(Tensor)


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def to(self, dtype: torch.dtype, bitcast: bool) -> Pointer:
        width = dtype.itemsize // self.memory.element_size()
        offset = _plain(self.offset)
        assert bitcast and not (offset % width).any()
        whole = len(self.memory) // width * width
        return Pointer(self.memory[:whole].view(dtype), _value(offset // width))


class Shared:
    def __init__(self, data: Tensor) -> None:
        self.data, self.shape = data, data.shape

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        data = self.data.view(dtype)
        assert list(data.shape) == shape
        return Shared(data)

    def store(self, x: Any) -> None:
        assert x.shape == self.data.shape and x.dtype == self.data.dtype
        self.data.copy_(_plain(x))

    def load(self, layout: Any) -> Value:
        return _value(self.data.clone())


def load(at: Pointer, mask: Any = None, other: Any = None) -> Value:
    assert (mask is None) == (other is None)
    offset = _plain(at.offset).long()
    if mask is None:
        return _value(at.memory[offset])
    offset, mask = torch.broadcast_tensors(offset, _plain(mask))
    return _value(
        torch.where(mask, at.memory[torch.where(mask, offset, 0)], torch.tensor(other, dtype=at.memory.dtype))
    )


def store(at: Pointer, x: Any, mask: Any = None) -> None:
    offset, x = torch.broadcast_tensors(_plain(at.offset).long(), _plain(x))
    mask = torch.ones_like(offset, dtype=torch.bool) if mask is None else _plain(mask).expand(offset.shape)
    at.memory[offset[mask]] = x[mask].to(at.memory.dtype)


def greatest(x: Value, axis: int) -> Value:
    """As the hardware: a NaN loses against every number."""
    plain = _plain(x)
    if plain.is_floating_point():
        best = torch.where(plain.isnan(), -INF, plain).amax(axis)
        return _value(torch.where(plain.isnan().all(axis), torch.nan, best))
    return _value(plain.amax(axis))


def pairwise(fn: Any, fn_float: Any) -> Any:
    def call(a: Any, b: Any) -> Value:
        a, b = (_plain(a), _plain(b))
        wide = (
            torch.promote_types(a.dtype, b.dtype)
            if a.dim() and b.dim()
            else (a.dtype if a.dim() >= b.dim() else b.dtype)
        )
        if a.dim() == b.dim() == 0:
            wide = torch.promote_types(a.dtype, b.dtype)
        return _value((fn_float if wide.is_floating_point else fn)(a.to(wide), b.to(wide)))

    return call


def decode(asm: str, constraints: str, args: list[Value], **_: Any) -> tuple[Value, Value, Value]:
    assert "cvt.rn.f16x2.e4m3x2" in asm
    words, scale = (_plain(a).contiguous() for a in args)
    code = words.view(torch.uint8).view(*words.shape, 4).view(torch.float8_e4m3fn)
    value = code.bfloat16() * scale.view(torch.bfloat16).view(*scale.shape, 2)[..., :1]
    pairs = value.contiguous().view(torch.int32)
    return _value(pairs[..., 0]), _value(pairs[..., 1]), _value((~value.isfinite()).any(-1).int())


def product(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    left = a.data if isinstance(a, Shared) else _plain(a)
    assert left.dtype == b.data.dtype == torch.bfloat16 and is_async, (left.dtype, left.shape, b.data.dtype)
    out = left.float() @ b.data.float()
    return _value(_plain(acc) + out if use_acc else out)


def _language(program: list[int]) -> SimpleNamespace:
    layout = lambda *args, **kwargs: None  # noqa: E731
    return SimpleNamespace(
        constexpr=lambda x: x,
        pointer_type=lambda dtype: dtype,
        **{n: getattr(torch, n) for n in ("int32", "int64", "bfloat16", "float32")},
        **dict.fromkeys(("SliceLayout", "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout"), layout),
        **dict.fromkeys(("NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout"), layout),
        program_id=lambda axis: _value(program[axis], torch.int32),
        static_range=range,
        arange=lambda start, end, layout=None: _value(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout=None: _value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout=None: _value(torch.full(shape, value, dtype=dtype)),
        abs=lambda x: _value(_plain(x).abs()),
        full_like=lambda x, value: _value(torch.full_like(_plain(x), value)),
        expand_dims=lambda x, axis: _value(_plain(x).unsqueeze(axis)),
        broadcast=lambda a, b: tuple(_value(x.contiguous()) for x in torch.broadcast_tensors(_plain(a), _plain(b))),
        broadcast_to=lambda x, *shape: _value(_plain(x).expand(shape[0] if len(shape) == 1 else shape)),
        rsqrt=lambda x: _value(torch.rsqrt(_plain(x))),
        split=lambda x: tuple(_value(part) for part in _plain(x).unbind(-1)),
        join=lambda a, b: _value(torch.stack([_plain(a), _plain(b)], -1)),
        convert_layout=lambda x, layout: x,
        where=lambda c, a, b: _value(
            torch.where(_plain(c), *(x if isinstance(x, (int, float)) else _plain(x) for x in (a, b)))
        ),
        minimum=pairwise(torch.minimum, torch.fmin),
        maximum=pairwise(torch.maximum, torch.fmax),
        max=greatest,
        min=lambda x, axis: _value(_plain(x).amin(axis)),
        sum=lambda x, axis: _value(_plain(x).sum(axis)),
        reduce_or=lambda x, axis: _value((_plain(x) != 0).any(axis).int()),
        exp2=lambda x: _value(torch.exp2(_plain(x))),
        log2=lambda x: _value(torch.log2(_plain(x))),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(
            torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)
        ),
        inline_asm_elementwise=decode,
        load=load,
        store=store,
    )


def run_gluon(code: GeneratedCode, arguments: dict[str, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """out and lse of the attention kernel of `code`, for q, cache, state_ids, positions, valid_start, sinks."""
    (name,) = (n for n in code.kernels if "_sm90" in code.kernel_source(n))
    source = code.kernel_source(name)
    (kernel,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef))
    kernel.decorator_list = []
    program = [0, 0]
    gl = _language(program)
    wgmma = {
        "fence_async_shared": lambda: None,
        "warpgroup_mma": product,
        "warpgroup_mma_wait": lambda count, deps: deps[0] if len(deps) == 1 else deps,
    }
    helpers = ast.parse((Path(lowerings.__file__).parent / "_sm90.py").read_text())
    helpers.body = [n for n in helpers.body if not isinstance(n, (ast.Import, ast.ImportFrom))]
    for node in helpers.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            for arg in node.args.args:
                arg.annotation = None
    sm90: dict[str, Any] = {"gl": SimpleNamespace(**vars(gl), barrier=lambda: None), **wgmma}
    exec(compile(helpers, "_sm90", "exec"), sm90)
    names = {"gl": gl, "tl": gl, "sm90": SimpleNamespace(**sm90), **wgmma}
    exec(compile(ast.Module([kernel], []), name, "exec"), names)
    constants = {
        n.target.id: n.value.value
        for n in kernel.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.value, ast.Constant)
    }

    q = arguments["q"]
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], torch.nan)
    pointers: dict[str, Pointer] = {"out_ptr0": Pointer(out.view(-1)), "arg_LSE": Pointer(lse.view(-1))}
    for n, x in arguments.items():
        if x is not None:
            whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            pointers[f"arg_{n.upper()}"] = Pointer(whole, x.storage_offset())
    parameters = [a.arg for a in kernel.args.args]
    programs = len(q) // constants["TOKENS"] * constants["HEAD_BLOCKS"]
    for program[:] in itertools.product(range(programs), range(max(constants["SPLITS"], 1))):
        names[kernel.name](*(pointers[p] for p in parameters))
    return out, lse if "arg_LSE" in parameters else None
