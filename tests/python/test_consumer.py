# SPDX-License-Identifier: LGPL-3.0-or-later
"""C++ projects that build against the installed package."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import deepmd_prewarm
import pytest
import torch
from deepmd_prewarm import _library

ROOT = Path(__file__).parents[2]
PACKAGE = deepmd_prewarm.library_path().parents[1]
BIN = Path(sysconfig.get_path("scripts"))


def no_toolkit(folder: Path) -> dict[str, str]:
    """Return an environment in which no CUDA toolkit can be found."""
    hidden = {k: v for k, v in os.environ.items() if not k.startswith("CUDA")}
    paths = [
        path
        for path in os.environ["PATH"].split(os.pathsep)
        if not (Path(path) / "nvcc").exists()
    ]
    return {
        **hidden,
        "PATH": os.pathsep.join([str(BIN), *paths]),
        "CUDA_HOME": str(folder / "absent"),
        "CUDAToolkit_ROOT": str(folder / "absent"),
    }


def cmake(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "cmake"), *(str(a) for a in arguments)],
        env=no_toolkit(folder),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def configure(
    folder: Path, source: Path, *defines: str
) -> subprocess.CompletedProcess[str]:
    return cmake(
        folder,
        *("-S", source, "-B", folder / "build", "-G", "Ninja"),
        # Whoever asks for it finds none.
        "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON",
        "-DCMAKE_DISABLE_FIND_PACKAGE_CUDA=ON",
        *defines,
    )


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Build tests/consumer against the installed package, and run it."""
    folder = tmp_path_factory.mktemp("consumer")
    prefix = f"-DCMAKE_PREFIX_PATH={PACKAGE}"
    done = configure(folder, ROOT / "tests" / "consumer", prefix)
    assert done.returncode == 0, done.stdout
    done = cmake(folder, "--build", folder / "build")
    assert done.returncode == 0, done.stdout
    program = folder / "build" / "two_tasks"
    out = subprocess.run([program], text=True, capture_output=True)
    assert out.returncode == 0, out.stderr
    return [line.split() for line in out.stdout.splitlines()]


def test_a_cpp_project_warms_two_tasks_and_gives_their_samples_back(
    printed: list[list[str]],
) -> None:
    warm = ["function", "warm=1", "training=1", "calls=1", "grad=0", "freed=160"]
    assert [line[1:] for line in printed if line[0] == "warm"] == [
        ["metal", *warm],
        ["water", *warm],
    ]


def test_a_cpp_project_trains_as_python_does(printed: list[list[str]]) -> None:
    def numbers(rows: int, columns: int) -> torch.Tensor:
        values = torch.linspace(-1, 1, rows * columns, dtype=torch.float64)
        return values.reshape(rows, columns)

    shared = numbers(3, 4).requires_grad_()
    heads = {name: numbers(4, 1).requires_grad_() for name in ("metal", "water")}
    expected = []
    for step in range(6):
        for name, target in (("metal", -1.0), ("water", 2.0)):
            y = torch.full((5, 1), target, dtype=torch.float64)
            x = numbers(5, 3)
            loss = (torch.tanh(x @ shared) @ heads[name] - y).square().mean()
            weights = [shared, heads[name]]
            slopes = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, slope in zip(weights, slopes, strict=True):
                    weight.sub_(slope * 0.1)
            expected.append((step, name, loss.item()))
    losses = [
        (int(step), name, float(loss))
        for kind, step, name, loss, *_ in printed
        if kind == "loss"
    ]
    assert losses == expected


@pytest.mark.parametrize("cuda", ["AUTO", "OFF"])
def test_this_project_configures_without_a_cuda_toolkit(
    cuda: str, tmp_path: Path
) -> None:
    # Empty: cmake takes it for found and doesn't look for one itself.
    done = configure(
        tmp_path,
        ROOT,
        "-DDEEPMD_PREWARM_TESTS=OFF",
        "-DDEEPMD_PREWARM_NVCC=",
        f"-DDEEPMD_PREWARM_CUDA={cuda}",
    )
    assert done.returncode == 0, done.stdout
    rules = (tmp_path / "build" / "build.ninja").read_text()
    assert "libtorch_cpu.so" in rules
    assert "nvcc" not in rules and "cuda_probe" not in rules
    if cuda == "OFF":
        assert "libcudart" not in rules


def test_another_torch_than_the_library_was_built_for_is_named(tmp_path: Path) -> None:
    root = tmp_path / "torch"
    header = root / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text(
        "#define TORCH_VERSION_MAJOR 9\n"
        "#define TORCH_VERSION_MINOR 8\n"
        "#define TORCH_VERSION_PATCH 7\n"
    )
    done = configure(
        tmp_path,
        ROOT / "tests" / "consumer",
        f"-DCMAKE_PREFIX_PATH={PACKAGE}",
        f"-DDEEPMD_PREWARM_TORCH_ROOT={root}",
    )
    built_for = _library.read_stamp(deepmd_prewarm.library_path()).torch
    text = " ".join(done.stdout.split())
    assert done.returncode != 0
    assert f"expected torch {built_for}" in text and "got torch 9.8.7" in text
