# SPDX-License-Identifier: LGPL-3.0-or-later
"""Handles on AOTInductor packages.

A package does not say which torch made it, and needs not: it calls a C interface
that torch keeps. One made by torch 2.15 runs under 2.11, unless it calls what 2.11
does not have yet.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from deepmd_prewarm import CompiledTask, warmup_compiled

X = torch.ones(4, 4)
FAST = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "cpp.vec_isa_ok": True,
    "cpp_cache_precompile_headers": False,
}


class Square(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("package")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        program = torch.export.export(Square(), (X,))
        with torch._inductor.config.patch(FAST):
            path = torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / "square.pt2")
            )
    yield Path(path)


def edited(package: Path, to: Path, edit: Callable[[str, bytes], bytes]) -> Path:
    """Copy a package with each file in it changed by `edit(name, content)`."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            # An archive's name is its folder.
            inside = name.replace(package.stem, to.stem, 1)
            new.writestr(inside, edit(name, old.read(name)))
    return to


def test_a_package_is_warmed_for_inference(package: Path) -> None:
    task = CompiledTask.from_package("square", package)
    assert (task.backend(), task.is_warm()) == ("package", False)
    x = X.clone().requires_grad_()
    warmup_compiled(task, [x], backward=False)
    stats = task.stats()
    assert task.is_warm() and stats["runs"] == 1 and stats["covers_training"] == 0
    assert x.grad is None
    task.close()
    with pytest.raises(RuntimeError, match=r"task .square. after close"):
        warmup_compiled(task, [X], backward=False)


def test_a_package_of_a_torch_with_other_functions_is_an_error_that_names_one(
    package: Path, tmp_path: Path
) -> None:
    def newer(name: str, content: bytes) -> bytes:
        return content.replace(b"aoti_torch_get_sizes\0", b"aoti_torch_get_futur\0")

    other = edited(package, tmp_path / "newer.pt2", newer)
    with pytest.raises(ValueError) as raised:
        CompiledTask.from_package("square", other)
    text = str(raised.value)
    series = torch.__version__.partition("+")[0]
    assert f"expected a package that torch {series} can load, got '{other}'" in text
    assert "undefined symbol: aoti_torch_get_futur" in text
    assert "Make it again under this torch" in text


def test_a_package_for_another_machine_is_an_error_that_says_so(
    package: Path, tmp_path: Path
) -> None:
    def foreign(name: str, content: bytes) -> bytes:
        return content[:100] if name.endswith(".so") else content

    other = edited(package, tmp_path / "foreign.pt2", foreign)
    with pytest.raises(ValueError, match="Make it again under this torch"):
        CompiledTask.from_package("square", other)


def test_a_cut_package_and_no_package_are_errors_that_name_the_file(
    package: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(package.read_bytes()[:-200])
    with pytest.raises(ValueError, match="Make it again under this torch"):
        CompiledTask.from_package("square", cut)
    with pytest.raises(ValueError, match=r"got no file at '.*absent.pt2'"):
        CompiledTask.from_package("square", tmp_path / "absent.pt2")
