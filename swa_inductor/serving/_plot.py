"""The timeline of a simulation as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from swa_inductor._environment import CannotRun
from swa_inductor.errors import require

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Say before the work what would fail after it.

    Raises:
        CannotRun: matplotlib is not installed. InvalidArgumentError: a name that does not end in one of SUFFIXES.
    """
    require(path.suffix in SUFFIXES, "--plot", path, f"a file name that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise CannotRun("--plot needs matplotlib. Install the extra: pip install 'swa-inductor[cli]'") from None


_PANELS = {
    "sequences": {"live": "live", "waiting": "waiting"},
    "decode rows": {"rows": "sequences", "padded": "padding"},
    "prefill tokens": {"prefill_tokens": "prompts"},
    "MB, sequences alive": {"ring_bytes": "rings", "full_kv_bytes": "full-length cache"},
}
"""Label of each panel; what it shows of the timeline, and under which name."""


def plot_timeline(timeline: Mapping[str, Sequence[int]], title: str, path: Path) -> None:
    """Sequences, work of a turn and bytes of the caches, over the turns of the engine's loop."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    for axes, (label, lines) in zip(figure.subplots(len(_PANELS), 1, sharex=True), _PANELS.items(), strict=True):
        for name, line in lines.items():
            scale = 1e6 if name.endswith("bytes") else 1
            axes.plot([value / scale for value in timeline[name]], label=line, linewidth=1)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xlabel("turn of the loop")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
