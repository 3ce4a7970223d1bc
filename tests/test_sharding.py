"""Tensor parallelism: every op on DTensors, and the V4 layer split over ranks; two processes, with gloo or NCCL."""

from __future__ import annotations

import copy
import gc
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import ATTENTION_ARGS, BY_NAME, STORE_ARGS, attention_op, decode_inputs, store_op
from numerics import assert_same, relative_error
from test_contract import op_calls, raw_call
from torch import Tensor
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import swa_inductor as swa
from swa_inductor.lowerings._inductor import cudagraph_recordings
from swa_inductor.meta._library import OPS
from swa_inductor.models import deepseek_v4 as ds
from swa_inductor.models.deepseek_v4_parallel import parallelize

RANKS = 2


def on_all_ranks(check: Callable[[DeviceMesh], None], backend: str = "gloo") -> None:
    """Run a function of this module in a process for each rank; its assertions are those of the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(check, backend, port), nprocs=RANKS)


def _rank(rank: int, check: Callable[[DeviceMesh], None], backend: str, port: int) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        with torch.no_grad():
            check(init_device_mesh("cuda" if backend == "nccl" else "cpu", (RANKS,)))
    finally:
        torch.compiler.reset()  # a recorded graph holds the communicator of NCCL, whose end would wait for it for ever
        gc.collect()
        dist.destroy_process_group()


def heads_dim(name: str, value: Tensor) -> int | None:
    """Dim of an argument that the ranks share, written down once more; a raw ring has one head."""
    kv = {"k": 1, "v": 1, "cache": 2} if value.dim() > 2 and value.shape[-2] > 1 else {}
    return {"q": 1, "sinks": 0, **kv}.get(name)


def shared(value: object, name: str, mesh: DeviceMesh, metadata: bool = True) -> object:
    """An argument as the ranks hold it; what is no head stays a plain tensor without `metadata`."""
    if not isinstance(value, Tensor):
        return value
    dim = heads_dim(name, value)
    if dim is None and not metadata and name not in ("k", "v", "cache"):
        return value
    return distribute_tensor(value, mesh, [Replicate() if dim is None else Shard(dim)])


# ---------------------------------------------------------------------------------------------------- ops


def check_every_op(mesh: DeviceMesh) -> None:
    for case in (BY_NAME["gpt-oss"], BY_NAME["mimo"], BY_NAME["v4"]):
        for name, (fn, args) in op_calls(case).items():
            op, args, options = raw_call(name, fn, args)
            named = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | options
            for metadata in (True, False):
                ours = {n: shared(value, n, mesh, metadata) for n, value in named.items()}
                plain = {n: value.clone() if isinstance(value, Tensor) else value for n, value in named.items()}
                got, want = op(**ours), op(**plain)
                if not any(isinstance(value, DTensor) for value in ours.values()):
                    continue  # an op on metadata alone
                for result, expected in zip(as_tuple(got), as_tuple(want), strict=True):
                    split = name.startswith("attention") or (case.spec.num_kv_heads > 1 and name in KV_RESULTS)
                    split = split and expected.dim() > 1
                    assert result.placements == ((Shard(1) if split else Replicate()),), name
                    assert result.shape == expected.shape
                    torch.testing.assert_close(result.full_tensor(), expected)
                for n, value in plain.items():  # whatever the op writes, and what it must leave alone
                    if isinstance(value, Tensor):
                        mine = ours[n].full_tensor() if isinstance(ours[n], DTensor) else ours[n]
                        assert_same(mine, value)


KV_RESULTS = ("gather", "store_cast_back")


def as_tuple(out: object) -> tuple:
    return out if isinstance(out, tuple) else () if out is None else (out,)


def check_refusals(mesh: DeviceMesh) -> None:
    case = BY_NAME["gpt-oss"]
    x = decode_inputs(case)
    right = {n: shared(x[n], n, mesh) for n in ("q", "k", "v", "cache", "state_ids", "positions", "sinks")}
    whole = {n: distribute_tensor(x[n], mesh, [Replicate()]) for n in ("q", "k", "v", "cache", "sinks")}
    by_rows = distribute_tensor(x["cache"], mesh, [Shard(1)])
    odd = distribute_tensor(torch.cat([x["cache"], x["cache"][:, :, :1]], 2), mesh, [Shard(2)])
    partial = DTensor.from_local(x["sinks"], mesh, [Partial()])
    other = DeviceMesh(mesh.device_type, [[0], [1]])
    wrong = [
        ("attention", {"cache": x["cache"]}, "cache: got a plain tensor; allowed: a DTensor on the mesh"),
        ("attention", {"sinks": x["sinks"]}, "sinks: got a plain tensor"),
        ("attention", {"cache": whole["cache"]}, r"cache placements: got \(Replicate\(\),\); allowed: Shard\(2\)"),
        ("attention", {"cache": by_rows}, r"cache placements: got \(Shard\(dim=1\),\); allowed: Shard\(2\)"),
        ("attention", {"cache": odd}, "cache heads: got 3; allowed: a multiple of the 2 ranks"),
        ("attention", {"sinks": partial}, r"sinks placements: got \(Partial\(sum\),\)"),
        ("attention", {"positions": distribute_tensor(x["positions"], mesh, [Shard(0)])}, "positions placements"),
        ("attention", {"q": distribute_tensor(x["q"], mesh, [Shard(0)])}, "q placements"),
        ("attention", {"sinks": distribute_tensor(x["sinks"], other, [Replicate()] * 2)}, "sinks: got .*mesh"),
        ("store", {"cache": whole["cache"]}, r"k placements: got \(Shard\(dim=1\),\); allowed: \(Replicate\(\),\)"),
    ]
    before = x["cache"].clone()
    for name, changes, message in wrong:
        args = {**right, **changes}
        fn, names = (store_op(case), STORE_ARGS) if name == "store" else (attention_op(case), ATTENTION_ARGS)
        with pytest.raises(swa.InvalidArgumentError, match=message):
            fn(*map(args.get, names))
    assert_same(right["cache"].full_tensor(), before)
    assert_same(whole["cache"].full_tensor(), before)
    # A replicated argument counts as any part of itself.
    ours = {**right, "q": whole["q"], "sinks": whole["sinks"]}
    out, _ = attention_op(case)(*map(ours.get, ATTENTION_ARGS))
    want, _ = attention_op(case)(*map({**x, "valid_start": None}.get, ATTENTION_ARGS))
    torch.testing.assert_close(out.full_tensor(), want)


def check_two_dims(mesh: DeviceMesh) -> None:
    """KV heads over one dim of a mesh, the query heads of each over the other."""
    case = BY_NAME["gpt-oss"]
    x = {**decode_inputs(case), "valid_start": None}
    grid = init_device_mesh(mesh.device_type, (1, RANKS))
    cache = x["cache"][:, :, :1].contiguous()
    q = distribute_tensor(x["q"], grid, [Shard(1), Shard(1)])
    rings = distribute_tensor(cache, grid, [Shard(2), Replicate()])
    sinks = distribute_tensor(x["sinks"], grid, [Shard(0), Shard(0)])
    out, lse = attention_op(case)(q, rings, x["state_ids"], x["positions"], None, sinks)
    assert out.placements == lse.placements == (Shard(1), Shard(1))
    want = attention_op(case)(x["q"], cache, x["state_ids"], x["positions"], None, x["sinks"])
    for part, expected in zip((out, lse), want, strict=True):
        torch.testing.assert_close(part.full_tensor(), expected)
    grid = init_device_mesh(mesh.device_type, (RANKS, 1))  # the other way round heads would not belong together
    q, sinks = (DTensor.from_local(t.to_local(), grid, t.placements) for t in (q, sinks))
    rings = distribute_tensor(cache, grid, [Replicate(), Shard(2)])
    with pytest.raises(swa.InvalidArgumentError, match="cache placements: .* KV heads split over the first"):
        attention_op(case)(q, rings, x["state_ids"], x["positions"], None, sinks)


def check_ops(mesh: DeviceMesh) -> None:
    check_every_op(mesh)
    check_refusals(mesh)
    check_two_dims(mesh)


def test_every_op_on_dtensors() -> None:
    """Values, written bytes and placements of all ops with the heads on two ranks, and what is refused."""
    assert set(op_calls(BY_NAME["v4"])) == set(OPS)
    on_all_ranks(check_ops)


def check_compiled_ops(mesh: DeviceMesh) -> None:
    case = BY_NAME["gpt-oss"]
    x = decode_inputs(case)

    def fn(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, ids: Tensor, at: Tensor, sinks: Tensor) -> Tensor:
        store_op(case)(k * 2, v, cache, ids, at)
        return attention_op(case, return_lse=False)(q + 1, cache, ids, at, None, sinks) * 3

    names = ("q", "k", "v", "cache", "state_ids", "positions", "sinks")
    ours = {n: shared(x[n], n, mesh, metadata=False) for n in names}
    out = torch.compile(fn, fullgraph=True, backend="aot_eager")(*ours.values())
    want = fn(*(x[n] for n in names))
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), want)
    assert_same(ours["cache"].full_tensor(), x["cache"])


# ---------------------------------------------------------------------------------------------------- the V4 layer


def v4_layer(device: str, dtype: torch.dtype) -> ds.SlidingAttention:
    config = ds.SlidingLayerConfig(
        48, 8, 40, o_groups=4, o_lora_rank=24, head_dim=64, rope_dim=32, window=37, tokens_per_step=2
    )
    torch.manual_seed(0)
    cache = torch.full(config.ring.cache_shape(3), 0xFF, dtype=torch.uint8)
    layer = ds.SlidingAttention(config, ds.rope_table(config, 512), cache, dtype=dtype)
    for weight in (layer.q_a_norm, layer.kv_norm, layer.sinks):
        weight.data.uniform_(0.5, 1.5)
    # Whole numbers: sums are the same in any order, so that bytes behind a norm can be compared.
    layer.qkv_a.weight.data = torch.randint(-1, 2, layer.qkv_a.weight.shape).to(dtype)
    return layer.eval().requires_grad_(False).to(device)


def run_layer(layer: Callable, prefill: Callable, dtype: torch.dtype, device: str, steps: int = 8) -> list[Tensor]:
    """Two prompts, then decode steps whose second sequence is padding now and then."""
    g = torch.Generator().manual_seed(2)
    ids = torch.tensor([0] * 50 + [2] * 20, dtype=torch.int32)
    at = torch.cat([torch.arange(50), torch.arange(20)])
    inputs = [
        t.to(device) for t in (torch.randint(-3, 4, (70, 48), generator=g).to(dtype), ids, at, torch.zeros(70).long())
    ]
    outputs = [prefill(*inputs[:3], q_starts=inputs[3])]
    for i in range(steps):
        ids = torch.tensor([0, 0, *([-1, -1] if i % 3 == 2 else [2, 2])], dtype=torch.int32)
        at = torch.tensor([50 + i, 51 + i, 20 + i, 21 + i])
        inputs = [t.to(device) for t in (torch.randint(-3, 4, (4, 48), generator=g).to(dtype), ids, at)]
        torch.compiler.cudagraph_mark_step_begin()
        outputs.append(layer(*inputs).clone())
    return outputs


def check_v4(
    mesh: DeviceMesh, mode: str | None = None, dtype: torch.dtype = torch.float32, bound: float = 1e-5
) -> None:
    device = mesh.device_type
    whole = v4_layer(device, dtype)
    layer = parallelize(copy.deepcopy(whole), mesh)
    assert layer.q_b.weight.to_local().shape == (8 // RANKS * 64, 40) and layer.o_a.to_local().shape == (2, 24, 128)
    want = run_layer(whole, whole, dtype, device)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    recorded = cudagraph_recordings()
    for decode in (layer, compiled):
        layer.cache.fill_(0xFF)
        for out, expected in zip(run_layer(decode, layer, dtype, device), want, strict=True):
            error = relative_error(out, expected)
            assert error < bound, (decode is compiled, error)
        assert (layer.cache != 0xFF).any()
        if device == "cpu":
            assert_same(layer.cache, whole.cache)
        copies = [torch.empty_like(layer.cache) for _ in range(RANKS)]
        dist.all_gather(copies, layer.cache)
        for other in copies:
            assert_same(layer.cache, other)
        assert (layer.cache != whole.cache).float().mean() < 1e-3
    assert cudagraph_recordings() - recorded == (0 if mode is None else 1)


def check_compiled(mesh: DeviceMesh) -> None:
    check_compiled_ops(mesh)
    check_v4(mesh)
    for bad, message in ((init_device_mesh("cpu", (1, RANKS)), "mesh: got 2 dims; allowed: one dim"),):
        with pytest.raises(swa.InvalidArgumentError, match=message):
            parallelize(v4_layer("cpu", torch.float32), bad)
    layer = v4_layer("cpu", torch.float32)
    layer.config = copy.copy(layer.config)
    object.__setattr__(layer.config, "o_groups", 3)
    with pytest.raises(swa.InvalidArgumentError, match="mesh: got 2 ranks; allowed: a divisor of o_groups=3"):
        parallelize(layer, mesh)


def test_layers_on_two_ranks() -> None:
    """Eager and compiled: outputs of one process up to the order of the sum over ranks, the same bytes in all rings."""
    on_all_ranks(check_compiled)


def check_v4_on_gpus(mesh: DeviceMesh) -> None:
    check_v4(mesh, mode="reduce-overhead", dtype=torch.bfloat16, bound=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")
def test_layers_on_two_gpus() -> None:
    """NCCL; a decode step is one CUDA graph on each rank, the all-reduce in it."""
    on_all_ranks(check_v4_on_gpus, "nccl")
