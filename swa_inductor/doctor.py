"""`swa-inductor doctor`: whether this machine can compile and run the ops, and what to do where it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import swa_inductor as swa
from swa_inductor._environment import CannotRun, find_compiler, versions, waiting
from swa_inductor.lowerings import _attention_sm90, _inductor, _template
from swa_inductor.testing import CARDS, resource_usage

OK, WARNING, ERROR = "ok", "warning", "error"

LEAST_CAPABILITY = (8, 0)

LEAST_FREE_BYTES = 1 << 30
"""Of a cache directory: a model that compiles takes some hundred MB."""

VERSIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "python": ((3, 11), (3,)),
    "torch": _inductor.SUPPORTED_TORCH,
    "triton": ((3, 6), (3,)),
    "transformers": ((5, 17), (5,)),
}
"""First and last release that is supported; the last one with all that follows under its number."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it was.
        level: 'ok'; 'warning', where something works less well or not at all that not everybody needs; or 'error'.
        found: what there is.
        advice: what to do about it; empty where all is well.
    """

    subject: str
    level: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings. capability: compute capability that the templates were compiled for."""

    versions: dict[str, str | None]
    capability: tuple[int, int]
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Whether there is no error."""
        return all(finding.level != ERROR for finding in self.findings)


def diagnose(console: Console) -> Diagnosis:
    """Look at everything, in the order in which one thing needs another. Raises nothing that it can report."""
    found = versions()
    gpu, capability = _gpu()
    findings = [*_versions(found, on_gpu=torch.cuda.is_available()), gpu, *_compilers(), *_caches()]
    findings += _templates(capability, found["triton"] is not None, console)
    findings.append(_gluon(capability))
    return Diagnosis(found, capability, findings)


def table(diagnosis: Diagnosis) -> Table:
    """The findings, and below each what to do."""
    result = Table("", "", "found", title="swa-inductor doctor", title_justify="left")
    styles = {OK: "green", WARNING: "yellow", ERROR: "bold red"}
    for finding in diagnosis.findings:
        text = finding.found + (f"\n{finding.advice}" if finding.advice else "")
        result.add_row(finding.subject, Text(finding.level, styles[finding.level]), Text(text))
    return result


# ---------------------------------------------------------------------------------------------------- versions


def _versions(found: dict[str, str | None], on_gpu: bool) -> Iterator[Finding]:
    yield Finding("swa-inductor", OK, swa.__version__)
    pin = _pinned_triton()
    for name, (first, last) in VERSIONS.items():
        version, least = found[name], _dotted(first)
        if version is None and name == "triton":
            advice = f"pip install triton=={pin}" if pin else "install the triton that belongs to this torch"
            what = "not installed: kernels for GPUs can be neither compiled nor checked"
            yield Finding(name, ERROR if on_gpu else WARNING, what, advice)
            continue
        if version is None:
            yield Finding(name, WARNING, "not installed: no rings for its models", f"pip install '{name}>={least}'")
            continue
        release = tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
        supported = f"supported: {least} to {_dotted(last)}.x"
        if not first <= release or release[: len(last)] > last:
            level = WARNING if name == "transformers" else ERROR
            yield Finding(name, level, version, f"{supported}: install one of these")
        elif name == "triton" and pin not in (None, version.split("+")[0]):
            yield Finding(name, ERROR, version, f"this torch was built for another one: pip install triton=={pin}")
        else:
            yield Finding(name, OK, f"{version} ({supported})")


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _pinned_triton() -> str | None:
    """The triton that the installed torch asks for; builds for the CPU ask for none."""
    pins = [re.match(r"triton==([\w.]+)", line) for line in importlib.metadata.requires("torch") or ()]
    return next((pin.group(1) for pin in pins if pin), None)


# ---------------------------------------------------------------------------------------------------- the machine


def _gpu() -> tuple[Finding, tuple[int, int]]:
    """What there is, and the capability to compile for: that of the card, or of the nearest one that is described."""
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            return Finding("GPU", OK, "none: ops run on the CPU; templates are compiled for sm_90"), (9, 0)
        built = torch.version.cuda
        advice = "check its driver, and CUDA_VISIBLE_DEVICES" if built else "install a build of torch for CUDA"
        what = f"torch {torch.__version__} sees none, though this machine has nvidia-smi"
        return Finding("GPU", WARNING, what, advice), (9, 0)
    real = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()}, sm_{real[0]}{real[1]}"
    if real < LEAST_CAPABILITY:
        advice = "kernels compile for sm_80 and later: use a later GPU, or the CPU"
        return Finding("GPU", ERROR, found, advice), LEAST_CAPABILITY
    near = max(known for known in CARDS if known <= real)
    if near != real:
        advice = f"this card is not described: templates are compiled for sm_{near[0]}{near[1]} instead"
        return Finding("GPU", WARNING, found, advice), near
    return Finding("GPU", OK, found), real


def _compilers() -> Iterator[Finding]:
    kinds = {"cpu": "C++ compiler"} | ({"cuda": "C compiler"} if torch.cuda.is_available() else {})
    for device_type, subject in kinds.items():
        try:
            yield Finding(subject, OK, find_compiler(device_type))
        except CannotRun as error:
            what, _, advice = str(error).partition(". ")
            yield Finding(subject, ERROR, what, advice)


def _caches() -> Iterator[Finding]:
    for subject, variable, find in (
        ("Inductor cache", "TORCHINDUCTOR_CACHE_DIR", _inductor.cache_dir),
        ("Triton cache", "TRITON_CACHE_DIR", lambda: _inductor.triton_cache_dir(0)),
    ):
        advice = f"name a directory of your own in {variable}"
        path = os.environ.get(variable, "")
        try:
            path = find()
            os.makedirs(path, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            yield Finding(subject, ERROR, f"{path} cannot be written: {error.strerror}", advice)
            continue
        disk = os.statvfs(path)
        free = disk.f_bavail * disk.f_frsize
        if disk.f_flag & os.ST_NOEXEC:
            yield Finding(subject, ERROR, f"{path} lets no compiled code be loaded (mounted noexec)", advice)
        elif free < LEAST_FREE_BYTES:
            yield Finding(subject, WARNING, f"{path} has {free >> 20} MB left", f"make room, or {advice}")
        else:
            yield Finding(subject, OK, f"{path}, writable")


# ---------------------------------------------------------------------------------------------------- kernels


def _calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """A small call of each op with a template."""
    spec = swa.RingSpec(window=64, tokens_per_step=2, head_dim=64, num_kv_heads=2, kv_format="mxfp8")
    k, q = torch.zeros(4, 2, 64, dtype=torch.bfloat16), torch.zeros(4, 8, 64, dtype=torch.bfloat16)
    cache = torch.zeros(spec.cache_shape(2), dtype=torch.uint8)
    ids, at = torch.zeros(4, dtype=torch.int32), torch.arange(4)
    new, ring = (k, k, cache, ids, at), (cache, ids, at)

    def norm_store(*args: Any) -> Any:
        return swa.norm_store(*args, spec=spec, x_eps=1e-6)

    def prepare_decode(*args: Any) -> Any:
        return swa.prepare_decode(*args, spec=spec, num_slots=2)

    def gather(*args: Any) -> Any:
        return swa.gather(*args, spec=spec, dtype=torch.bfloat16)

    def attention_index(*args: Any) -> Any:
        return swa.attention_index(*args, kv_format=spec.kv_format, v_head_dim=spec.v_head_dim)

    def attention_workspace(*args: Any) -> Any:
        return swa.attention_workspace(*args, window=spec.window)

    return {
        "store": (lambda *args: swa.store(*args, spec=spec), new),
        "norm_store": (norm_store, (q.flatten(1), *new)),
        "store_cast_back": (lambda *args: swa.store_cast_back(*args, spec=spec), new),
        "attention": (lambda *args: swa.attention(*args, spec=spec, tokens_per_step=2), (q, *ring)),
        "attention_prefill": (lambda *args: swa.attention_prefill(*args, spec=spec), (q, *new, torch.zeros_like(at))),
        "gather": (gather, (cache, ids[:2], at[:2])),
        "attention_workspace": (attention_workspace, (q, k, k, torch.zeros(4, 4, dtype=torch.int32))),
        "attention_index": (attention_index, (q, cache, torch.zeros(4, 64, dtype=torch.int32))),
        "prepare_decode": (prepare_decode, (at, ids, ids)),
    }


def _templates(capability: tuple[int, int], triton: bool, console: Console) -> list[Finding]:
    calls = _calls()
    if not triton:
        return [Finding("templates", WARNING, "not checked: there is no triton", "see triton")]
    with waiting(console, "Compiling templates", len(calls)) as advance:
        findings = []
        for op, call in calls.items():
            findings.append(_compiled(f"template {op}", capability, *call))
            advance()
    return findings


def _compiled(subject: str, capability: tuple[int, int], fn: Callable[..., Any], args: tuple[Any, ...]) -> Finding:
    target = f"sm_{capability[0]}{capability[1]}"
    try:
        (usage,) = [u for u in resource_usage(fn, *args, capability=capability) if u.name.startswith("triton_tem")]
    except Exception as error:  # whatever the compilers raise is what was asked for
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        advice = "see the errors above, if any; else report it with the output of --json"
        return Finding(subject, ERROR, f"does not compile for {target}: {reason}", advice)
    numbers = f"{usage.registers} registers, {usage.spills} spills, {usage.shared_bytes:,} bytes of shared memory"
    return Finding(subject, OK, f"{target}: {numbers}")


def _gluon(capability: tuple[int, int]) -> Finding:
    importable, sm_90 = _attention_sm90.template() is not None, capability == (9, 0)
    if not _template.GLUON:
        can = "importable: SWA_INDUCTOR_GLUON=1 switches it on" if importable else "not importable"
        return Finding("Gluon", OK, f"off; {can}")
    asked = os.environ.get("SWA_INDUCTOR_GLUON") is not None
    unset = "unset SWA_INDUCTOR_GLUON, or set it to 0"
    if not importable:
        advice = f"{unset}, or install the triton that belongs to this torch"
        return Finding("Gluon", ERROR, "asked for, but this triton has none that the kernel is written for", advice)
    if not sm_90 and asked:
        return Finding("Gluon", WARNING, "asked for, but its kernel is for sm_90 alone", unset)
    return Finding("Gluon", OK, "on" if sm_90 else "off: its kernel is for sm_90 alone")
