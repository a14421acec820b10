# SPDX-License-Identifier: LGPL-3.0-or-later
"""What ``deepmd-prewarm doctor`` looks at."""

from __future__ import annotations

import importlib
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Finding", "examine"]

_OPERATORS = (
    "cache_bytes",
    "explain_release",
    "release_trace_inputs",
    "safe_empty_cache",
    "scalarize_losses",
    "sync_ranks",
    "warmup_compiled",
)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    good: bool
    subject: str
    text: str


def examine(run_on_device: bool = False) -> list[Finding]:
    """Look at everything; never raises, needs no process group.

    Imports deepmd-kit's trainer where there is one, which takes seconds.

    Parameters
    ----------
    run_on_device
        Also run a kernel on each CUDA device, which creates contexts there;
        nothing else here creates one.

    Returns
    -------
    list of Finding
        In the order in which to read them.
    """
    findings = [
        _versions(),
        _library(),
        _operators(),
        _device(),
        _communication(),
        _deepmd_kit(),
        _hooks(),
        _cache_folder(),
        _time_out(),
        _settings(),
    ]
    if run_on_device:
        findings += _kernels()
    return findings


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Finding:
    names = ("deepmd-prewarm", "torch", "numpy")
    said = ", ".join(f"{name} {_version(name)}" for name in names)
    return Finding(True, "versions", f"{said}, Python {platform.python_version()}")


def _library() -> Finding:
    try:
        from . import _library as library

        library.load()
        return Finding(True, "library", str(library.library_path()))
    except Exception as error:
        return Finding(False, "library", str(error))


def _operators() -> Finding:
    try:
        import torch

        missing = [n for n in _OPERATORS if not hasattr(torch.ops.deepmd, n)]
    except Exception as error:
        return Finding(False, "operators", f"torch cannot be imported: {error}")
    if missing:
        return Finding(False, "operators", f"missing: {', '.join(missing)}")
    return Finding(True, "operators", ", ".join(_OPERATORS))


def _device() -> Finding:
    try:
        import torch

        from ._library import bridge

        state, text, versions = bridge().device_extension()
        built = torch.version.cuda or torch.version.hip
    except Exception as error:
        return Finding(False, "device", f"cannot be asked: {error}")
    said = f"torch for CUDA {built}" if built else "torch without a GPU"
    if state == "failed":
        text = (
            f"{said}; libdeepmd_prewarm_cuda.so does not load: {text}. Training"
            " works; the report lacks NCCL's health"
        )
        return Finding(False, "device", text)
    said += "".join(f", {name} {number}" for name, number in versions)
    return Finding(True, "device", f"{said}; {text}")


def _communication() -> Finding:
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            return Finding(True, "communication", "torch without torch.distributed")
        backends = ["gloo"] if dist.is_gloo_available() else []
        if dist.is_nccl_available():
            version = ".".join(str(part) for part in torch.cuda.nccl.version())
            backends.append(f"NCCL {version}")
        backends += ["MPI"] if dist.is_mpi_available() else []
    except Exception as error:
        return Finding(False, "communication", f"torch does not tell: {error}")
    return Finding(True, "communication", ", ".join(backends) or "no backend")


def _kernels() -> list[Finding]:
    try:
        import torch

        from ._library import bridge

        count = torch.cuda.device_count()
        problems = [bridge().probe_device(index) for index in range(count)]
    except Exception as error:
        return [Finding(False, "kernel", str(error))]
    if not problems:
        return [Finding(False, "kernel", "torch sees no CUDA device")]
    return [
        Finding(not problem, f"kernel on cuda:{index}", problem or "ran, result right")
        for index, problem in enumerate(problems)
    ]


def _deepmd_kit() -> Finding:
    found = _version("deepmd-kit")
    if found == "not installed":
        text = "not installed; only needed to train with deepmd-kit"
        return Finding(True, "deepmd-kit", text)
    return Finding(True, "deepmd-kit", found)


def _hooks() -> Finding:
    points = metadata.entry_points(group="deepmd.pt_expt")
    ours = [p for p in points if p.value.startswith("deepmd_prewarm.")]
    if not ours:
        return Finding(
            False,
            "hooks",
            "the entry point of group deepmd.pt_expt is missing; reinstall"
            " deepmd-prewarm",
        )
    try:
        ours[0].load()
        from .deepmd_kit.entry import TRAINER_MODULE, switched_off

        if switched_off():
            return Finding(True, "hooks", "switched off by DP_PREWARM")
        if _version("deepmd-kit") == "not installed":
            return Finding(True, "hooks", f"entry point {ours[0].value}")
        from .deepmd_kit.trainer import misfit

        problem = misfit(importlib.import_module(TRAINER_MODULE))
    except Exception as error:
        return Finding(False, "hooks", f"{ours[0].value}: {error}")
    if problem is not None:
        return Finding(False, "hooks", problem)
    text = f"entry point {ours[0].value}, {TRAINER_MODULE} has every name it needs"
    return Finding(True, "hooks", text)


def _cache_folder() -> Finding:
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        folder = Path(cache_dir())
    except Exception as error:
        return Finding(False, "cache folder", f"torch does not tell: {error}")
    existing = folder if folder.exists() else folder.parent
    if not os.access(existing, os.W_OK):
        return Finding(
            False,
            "cache folder",
            f"{folder} is not writable: every start compiles anew."
            " Set TORCHINDUCTOR_CACHE_DIR",
        )
    graphs = folder / "fxgraph"
    count = sum(1 for _ in graphs.glob("*/*")) if graphs.is_dir() else 0
    return Finding(True, "cache folder", f"{folder}, {count} graphs")


def _time_out() -> Finding:
    try:
        from torch.distributed.distributed_c10d import _get_default_timeout

        limits = ", ".join(
            f"{backend} {_get_default_timeout(backend).total_seconds():.0f} s"
            for backend in ("gloo", "nccl")
        )
    except Exception as error:
        return Finding(False, "group time-out", f"torch does not tell: {error}")
    text = f"default {limits}; a report shows that of the training's own group"
    return Finding(True, "group time-out", text)


def _settings() -> Finding:
    given = {k: v for k, v in os.environ.items() if k.startswith("DP_PREWARM")}
    said = ", ".join(f"{k}={v}" for k, v in sorted(given.items()))
    return Finding(True, "environment", said or "no DP_PREWARM_* set")
