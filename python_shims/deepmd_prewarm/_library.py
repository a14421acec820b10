# SPDX-License-Identifier: LGPL-3.0-or-later
"""Find, check and load ``libdeepmd_prewarm.so``.

The loader never warns and goes on: either every operator is there, with its
fake and its effect, or ``ImportError`` says what does not fit and what to
reinstall. Nothing is registered by a load that fails.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import struct
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

_NAME = "libdeepmd_prewarm.so"
_REINSTALL = (
    "Reinstall it for the running torch: "
    "pip install --force-reinstall --no-deps --no-build-isolation deepmd-prewarm"
)
# Guards the steps of load(), not the operators: one thread loads, others wait.
_lock = threading.RLock()
_loaded: Path | None = None


class Stamp(NamedTuple):
    """What a library file says about itself, readable without loading it."""

    version: str
    torch: str
    cxx11_abi: str


def library_path() -> Path:
    """Where the operator library is, for ``torch.ops.load_library`` or ``dlopen``.

    Returns
    -------
    Path
        ``DP_PREWARM_LIBRARY`` if set, else the file inside this package.

    Raises
    ------
    ImportError
        If there is no such file.
    """
    override = os.environ.get("DP_PREWARM_LIBRARY")
    path = Path(override) if override else Path(__file__).parent / "lib" / _NAME
    if not path.is_file():
        cause = "DP_PREWARM_LIBRARY names it" if override else _REINSTALL
        raise ImportError(
            f"deepmd-prewarm: expected the operator library at {path}, "
            f"got no such file. {cause}."
        )
    return path


def load() -> Path:
    """Load the operators, their fakes and their effects; once per process.

    Not collective. Safe from several threads.

    Returns
    -------
    Path
        The library that serves this process: the one that registered first.

    Raises
    ------
    ImportError
        If torch is missing, or the library is missing, made for another torch
        or C++ ABI, damaged, or of another version than this package or than a
        copy that is loaded already. The operators are then not registered.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            path = _registered_copy()
            if path is None:
                path = library_path()
                _check_stamp(path, read_stamp(path))
                _open(path)
            for module in ("_fakes", "_fake_task", "_effects", "_released"):
                importlib.import_module(f"deepmd_prewarm.{module}")
            _loaded = path
        return _loaded


def bridge() -> ModuleType:
    """Return the extension module that turns Python callables into handles.

    Raises
    ------
    ImportError
        As `load`, or if the extension is not part of the installation.
    """
    load()
    return importlib.import_module("deepmd_prewarm._bridge")


def read_stamp(path: Path) -> Stamp:
    """Read versions out of a library file, without running any of its code.

    Raises
    ------
    ImportError
        If the file is not a deepmd-prewarm library, or not all of it.
    """
    data = path.read_bytes()
    match = re.search(rb"deepmd_prewarm version=(\S+) torch=(\S+) cxx11_abi=(\d)", data)
    if not match:
        raise ImportError(
            f"deepmd-prewarm: expected a deepmd-prewarm library at {path}, got a "
            f"file without its version stamp. {_REINSTALL}."
        )
    # The section table ends an ELF file. dlopen of a file that lost its end
    # kills the process (SIGBUS) instead of failing.
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size_of_entry, entries = struct.unpack_from("<HH", data, 0x3A)
    if len(data) < table + size_of_entry * entries:
        raise ImportError(
            f"deepmd-prewarm: expected {table + size_of_entry * entries} bytes in "
            f"{path}, got {len(data)}: the file is damaged. {_REINSTALL}."
        )
    return Stamp(*(part.decode() for part in match.groups()))


def package_version() -> str | None:
    """Version of the installed distribution; None in a bare source tree."""
    try:
        return version("deepmd-prewarm")
    except PackageNotFoundError:
        return None


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "deepmd-prewarm: expected an importable torch, got "
            f"{type(error).__name__}: {error}. Install torch, then {_REINSTALL}."
        ) from error
    return torch


def _registered_copy() -> Path | None:
    """Return another copy's path if a C++ or Python caller loaded one before us."""
    torch = _torch()
    if not hasattr(torch.ops.deepmd, "prewarm_library"):
        return None
    found, built_for, path = torch.ops.deepmd.prewarm_library()
    expected = package_version()
    if expected not in (None, found):
        raise ImportError(
            f"deepmd-prewarm: expected version {expected} of the operator library "
            f"(this package's), got version {found}, loaded before from {path} "
            f"(built for torch {built_for}). A process holds one version: load "
            "neither, or both from the same installation."
        )
    return Path(path)


def _check_stamp(path: Path, stamp: Stamp) -> None:
    torch = _torch()
    running = str(torch.__version__)
    abi = str(int(torch._C._GLIBCXX_USE_CXX11_ABI))
    same_torch = stamp.torch.split(".")[:2] == running.split("+")[0].split(".")[:2]
    if not same_torch or stamp.cxx11_abi != abi:
        raise ImportError(
            f"deepmd-prewarm: expected a library built for torch {running} "
            f"(C++11 ABI {abi}), got {path} built for torch {stamp.torch} "
            f"(C++11 ABI {stamp.cxx11_abi}). {_REINSTALL}."
        )
    expected = package_version()
    if expected not in (None, stamp.version):
        raise ImportError(
            f"deepmd-prewarm: expected version {expected} of the operator library "
            f"(this package's), got version {stamp.version} at {path}. {_REINSTALL}."
        )


def _open(path: Path) -> None:
    torch = _torch()
    try:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
        library.deepmd_prewarm_load_error.restype = ctypes.c_char_p
        problem = library.deepmd_prewarm_load_error().decode(errors="replace")
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"deepmd-prewarm: expected {path} to load into torch "
            f"{torch.__version__}, got: {error.__cause__ or error}. "
            f"It was built for torch {read_stamp(path).torch}. {_REINSTALL}."
        ) from error
    if problem:
        raise ImportError(
            f"deepmd-prewarm: expected {path} to register its operators, got: {problem}"
        )
