"""The simulation of the command line: the requests of a trace, with random prompts, through the engine."""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from swa_inductor._environment import CannotRun, device_name, find_device, versions, waiting
from swa_inductor.demo import DTYPES, load
from swa_inductor.errors import require
from swa_inductor.serving.decode_step import DecodeStep
from swa_inductor.serving.engine import Engine, Iteration, Request
from swa_inductor.serving.small_model import SmallModel
from swa_inductor.serving.trace import TraceRow, read_trace, sample_trace

DEFAULT_REQUESTS = 100
"""Requests to draw where there is no trace file."""

GEOMETRY: dict[str, Any] = dict(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=32, window=128, kv_format="fp32")
"""Of the built-in model: so small that a CPU serves hundreds of requests."""

Chooser = Callable[[list[int], int], list[int]]
"""From the tokens of a sequence, the greedy choices behind its last ones, as many as asked for."""


@dataclass
class Options:
    """What the command line asked for (help texts in cli.py)."""

    trace: str | None = None
    requests: int | None = None
    slots: int = 64
    buckets: str = "1,2,4,8,16,32,64"
    drafts: int = 0
    chunk_tokens: int = 256
    max_length: int | None = None
    time_slice: int | None = None
    sync: bool = False
    realtime: float | None = None
    device: str | None = None
    seed: int = 0
    model: str | None = None
    dtype: str = "auto"
    verify: str = "0"


@dataclass
class Report:
    """Figures of a run. Times in seconds, host time; bytes of all layers.

    steps: decode steps; launches: the same by bucket. decode_rows: sequences that they ran; padded_rows: rows added to
    reach a bucket. launch_s, gap_s: median and 95th percentile, see `Statistics`. ring_bytes: what the rings of all
    slots take, always; full_kv_bytes: what full-length caches of the sequences alive would have taken, at most. wrong:
    what is wrong with the tokens of requests, a line each.
    """

    options: dict[str, Any]
    device: str
    versions: dict[str, str | None]
    requests: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    prefill_calls: int
    prefill_tokens: int
    decode_rows: int
    padded_rows: int
    launches: dict[int, int]
    compiled_buckets: int
    recordings: int
    replays: int
    launch_s: tuple[float, float]
    gap_s: tuple[float, float]
    preemptions: int
    drafts: int
    accepted_drafts: int
    tokens_per_sequence_step: float
    ring_bytes: int
    full_kv_bytes: int
    seconds: float
    tokens_per_s: float
    device_errors: int
    timeline: dict[str, list[int]]
    clipped: int = 0
    verified: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Every request has its number of tokens, each that was verified those it gets alone; no bad device state."""
        return not self.wrong and not self.device_errors


def build_requests(rows: Sequence[TraceRow], vocab_size: int, seed: int) -> list[Request]:
    """A request per row of a trace; its prompt is random and depends on the seed and its number only."""
    requests = []
    for i, row in enumerate(rows):
        prompt = random.Random(f"{seed} {i}").choices(range(vocab_size), k=row.context)
        requests.append(Request(i, prompt, row.generated, row.arrival))
    return requests


def first_difference(choose: Chooser, request: Request, generated: Sequence[int]) -> str | None:
    """Where the tokens of a request are not those it gets alone, by greedy choice; None if they are.

    One forward of the whole sequence without rings tells: if its choice behind every token is the token that follows,
    then token by token this is what the request alone would have generated.
    """
    alone = choose([*request.prompt, *generated[:-1]], len(generated))
    for i, (want, got) in enumerate(zip(alone, generated, strict=True)):
        if want != got:
            return f"request {request.id}: generated token {i} is {got}, alone {want}"
    return None


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """The tensors of the built-in model are so small that threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def run(options: Options, console: Console) -> Report:
    """The whole simulation.

    Raises:
        CannotRun, InvalidArgumentError, UnsupportedError: before any request has run.
    """
    with _one_thread(options.model is None):
        return _run(options, console)


def _run(options: Options, console: Console) -> Report:
    rows, clipped, max_length = _load_rows(options)
    buckets = _buckets(options)
    to_verify = _sample_to_verify(options, len(rows))
    model = _build_model(options, max_length, console)
    step = DecodeStep(model, buckets=buckets, drafts=options.drafts)
    engine = Engine(
        model, step, chunk_tokens=options.chunk_tokens, overlapped=not options.sync, time_slice=options.time_slice
    )
    requests = build_requests(rows, model.vocab_size, options.seed)
    with waiting(console, f"Compiling for {', '.join(map(str, buckets))} sequences"):
        engine.warm_up()
    with _progress(console, requests) as progress:
        start = time.perf_counter()
        engine.run(requests, speed=options.realtime, progress=progress)
        seconds = time.perf_counter() - start
    report = _report(options, engine, requests, seconds)
    report.clipped, report.verified = clipped, len(to_verify)
    for request in requests:
        if (count := len(engine.finished[request.id])) != request.max_new_tokens:
            report.wrong.append(f"request {request.id}: {count} tokens generated, {request.max_new_tokens} asked for")
    if to_verify:
        choose = _alone(model)
        with waiting(console, "Verifying: requests alone", len(to_verify)) as advance:
            for i in to_verify:
                wrong = first_difference(choose, requests[i], engine.finished[i])
                report.wrong += [wrong] if wrong else []
                advance()
    return report


def _load_rows(options: Options) -> tuple[list[TraceRow], int, int]:
    """The requests of the trace, how many of them were clipped, and the length of the longest sequence allowed."""
    count = options.requests
    require(count is None or count >= 1, "--requests", count, "an integer of at least 1")
    if options.trace is None:
        rows = sample_trace(count or DEFAULT_REQUESTS, options.seed)
    else:
        rows = read_trace(Path(options.trace), count)
    max_length = options.max_length or max(row.total for row in rows)
    require(max_length >= 2, "--max-length", max_length, "an integer of at least 2")
    return [r.clip(max_length) for r in rows], sum(r.total > max_length for r in rows), max_length


def _buckets(options: Options) -> list[int]:
    """The batch sizes asked for that `slots` sequences can make use of."""
    parts = options.buckets.split(",")
    ok = all(p.strip().isascii() and p.strip().isdigit() and int(p) >= 1 for p in parts)
    require(ok, "--buckets", repr(options.buckets), "integers of at least 1 with commas between them")
    sizes = sorted({int(p) for p in parts})
    require(1 <= options.slots <= sizes[-1], "--slots", options.slots, f"1 to {sizes[-1]}, the largest bucket")
    return sizes[: next(i for i, size in enumerate(sizes) if size >= options.slots) + 1]


def _sample_to_verify(options: Options, count: int) -> list[int]:
    """Numbers of the requests to verify."""
    text = options.verify
    require(text == "all" or (text.isascii() and text.isdigit()), "--verify", repr(text), "a number, or all")
    wanted = count if text == "all" else min(int(text), count)
    return sorted(random.Random(options.seed).sample(range(count), wanted))


def _build_model(options: Options, max_length: int, console: Console) -> Any:
    """A `SlotModel`."""
    geometry: dict[str, Any] = {
        "num_slots": options.slots,
        "max_length": max_length,
        "tokens_per_step": options.drafts + 1,
    }
    require(options.drafts >= 0, "--drafts", options.drafts, "an integer of at least 0")
    device = find_device(options.device)
    if options.model is None:
        # Dense parts in fp64: the greedy choice of a random model must not depend on what else is in the batch.
        return SmallModel(**geometry, **GEOMETRY, dense_dtype=torch.float64, seed=options.seed, device=device)
    if importlib.util.find_spec("transformers") is None:
        raise CannotRun("--model needs transformers. Install the extra: pip install 'swa-inductor[cli]'")
    from swa_inductor.integrations.transformers import TransformersSlotModel

    dtype = options.dtype if options.dtype != "auto" else "bf16" if device.type == "cuda" else "fp32"
    _, model = load(options.model, DTYPES[dtype], device, console)
    return TransformersSlotModel(model, **geometry)


def _alone(model: Any) -> Chooser:
    """The greedy choices of a model for one sequence, without rings. A transformers model is stock from then on."""
    if isinstance(model, SmallModel):
        return lambda tokens, count: model.reference_logits(tokens)[-count:].argmax(-1).tolist()
    from swa_inductor.integrations.transformers import use_stock

    use_stock(model.model)

    def choose(tokens: list[int], count: int) -> list[int]:
        ids = torch.tensor([tokens], device=model.device)
        return model.model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0].argmax(-1).tolist()

    return choose


@contextmanager
def _progress(console: Console, requests: Sequence[Request]) -> Iterator[Callable[[Engine], None]]:
    """A bar of finished requests and tokens per second; yields what the engine calls, which shows ten a second."""
    rate = TextColumn("{task.fields[rate]:,.0f} tokens/s")
    columns = (TextColumn("Serving"), BarColumn(), MofNCompleteColumn(), rate, TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(requests), rate=0.0)
        start, shown = time.perf_counter(), 0.0

        def show(engine: Engine) -> None:
            nonlocal shown
            now = time.perf_counter()
            if now - shown > 0.1 or not engine.busy:
                shown = now
                tokens = _generated(engine)
                bar.update(task, completed=len(engine.finished), rate=tokens / (now - start))

        yield show


def _generated(engine: Engine) -> int:
    return sum(map(len, engine.finished.values()))


def _report(options: Options, engine: Engine, requests: Sequence[Request], seconds: float) -> Report:
    """Everything but the verification."""
    step, model, seen = engine.step, engine.model, engine.statistics
    generated = _generated(engine)
    timeline: dict[str, list[int]] = {name: [getattr(t, name) for t in seen.iterations] for name in Iteration._fields}
    # Of the sequences alive, as a pool of pages would be counted.
    timeline["ring_bytes"] = [model.state_bytes // model.num_slots * live for live in timeline["live"]]
    timeline["full_kv_bytes"] = [model.full_kv_bytes(tokens) for tokens in timeline["alive_tokens"]]
    return Report(
        options=asdict(options),
        device=device_name(model.device),
        versions=versions(),
        requests=len(requests),
        prompt_tokens=sum(len(r.prompt) for r in requests),
        generated_tokens=generated,
        steps=len(seen.launch_s),
        prefill_calls=sum(n > 0 for n in timeline["prefill_tokens"]),
        prefill_tokens=sum(timeline["prefill_tokens"]),
        decode_rows=sum(timeline["rows"]),
        padded_rows=sum(timeline["padded"]),
        launches=dict(step.launches),
        compiled_buckets=step.compiles,
        recordings=step.recordings,
        replays=step.replays,
        launch_s=_spread(seen.launch_s),
        gap_s=_spread(seen.gap_s),
        preemptions=seen.preemptions,
        drafts=seen.drafts,
        accepted_drafts=seen.accepted_drafts,
        tokens_per_sequence_step=seen.decode_tokens / max(1, seen.sequence_steps),
        ring_bytes=model.state_bytes,
        full_kv_bytes=max(timeline["full_kv_bytes"]),
        seconds=seconds,
        tokens_per_s=generated / seconds,
        device_errors=step.error_count(),
        timeline=timeline,
    )


def _spread(times: Sequence[float]) -> tuple[float, float]:
    """Median and 95th percentile; 0 where there are none."""
    ordered = sorted(times) or [0.0]
    return statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
