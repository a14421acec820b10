# SPDX-License-Identifier: LGPL-3.0-or-later
"""The command line: bad input is exit code 2 with a clear text, never a trace."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from deepmd_prewarm import cli
from test_report import a_report


def run(*arguments: object):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


@pytest.fixture
def an_input(tmp_path):
    path = tmp_path / "input.json"
    path.write_text(json.dumps({"training": {"numb_steps": 1}}))
    return path


@pytest.fixture
def started(monkeypatch):
    """What `train` would have started, without starting it."""
    seen = []

    class Process:
        def __init__(self, command, env, cwd=None):
            seen.append((command, env))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def wait(self):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    return seen


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "nothing there"),
        ("{", "expected JSON"),
        ("[1]", "a JSON list"),
        ("{}", "the keys none"),
        ('{"model": 1}', "section 'training', got the keys model"),
    ],
)
def test_an_input_that_is_not_there_or_not_an_input_is_refused(
    tmp_path, started, content, said
):
    path = tmp_path / "input.json"
    if content is not None:
        path.write_text(content)
    result = run("train", path)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert started == []


def test_a_folder_is_no_input(tmp_path, started):
    result = run("train", tmp_path)
    assert result.exit_code == 2 and "a folder" in result.output
    assert started == []


@pytest.mark.parametrize("nproc", ["0", "-3", "two"])
def test_a_number_of_ranks_below_one_is_refused(an_input, started, nproc):
    result = run("train", an_input, "--nproc", nproc)
    assert result.exit_code == 2
    assert "--nproc" in result.output
    assert started == []


def test_train_starts_the_runner_below_torchrun(an_input, started, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = run(
        "train", an_input, "--nproc", 2, "--seed", 3, "--restart", "model.ckpt"
    )
    assert result.exit_code == 0, result.output
    ((command, environment),) = started
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "2"
    runner = command.index("deepmd_prewarm.deepmd_kit.runner")
    assert command[runner + 1 :] == [
        str(an_input),
        "--seed",
        "3",
        "--restart",
        "model.ckpt",
    ]
    assert int(environment["OMP_NUM_THREADS"]) >= 1


def test_train_passes_the_report_folder_on_and_shows_the_report(
    an_input, started, tmp_path
):
    a_report().save(tmp_path / "out" / "prewarm.json")
    result = run("train", an_input, "--report", tmp_path / "out")
    assert result.exit_code == 0, result.output
    command = started[0][0]
    assert command[command.index("--report") + 1] == str(tmp_path / "out")
    assert "graphs compiled from step 1 on: 0" in result.output


def test_train_ends_as_the_training_ended(an_input, started, monkeypatch):
    monkeypatch.setattr(cli, "run_training", lambda *_: 7)
    assert run("train", an_input).exit_code == 7


def test_report_shows_the_table_and_draws_the_picture_that_is_missing(tmp_path):
    a_report().save(tmp_path / "prewarm.json")
    result = run("report", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Cu" in result.output and "wait s" in result.output
    assert (tmp_path / "prewarm.png").read_bytes().startswith(b"\x89PNG")


def test_report_without_a_report_is_refused(tmp_path):
    result = run("report", tmp_path)
    assert result.exit_code == 2
    assert "expected a prewarm.json" in " ".join(result.output.split())
    (tmp_path / "prewarm.json").write_text("{}")
    result = run("report", tmp_path)
    assert result.exit_code == 2
    assert "version: Field required" in " ".join(result.output.split())


def test_doctor_names_versions_library_operators_hooks_cache_and_time_out():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for words in (
        "torch 2.",
        "libdeepmd_prewarm.so",
        "release_trace_inputs",
        "deepmd_prewarm.deepmd_kit.entry",
        "has every name it needs",
        "cache folder",
        "gloo 1800 s",
    ):
        assert words in result.output, words


def test_doctor_says_which_part_is_broken(monkeypatch, tmp_path):
    from deepmd_prewarm import _library

    def unloadable():
        raise ImportError("built for torch 9.9")

    from deepmd_prewarm.deepmd_kit import trainer

    monkeypatch.setattr(_library, "load", unloadable)
    monkeypatch.setattr(trainer, "misfit", lambda module: "has no Trainer.get_data")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/nowhere")
    monkeypatch.setenv("DP_PREWARM_STRICT", "1")
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAIL  library         built for torch 9.9" in result.output
    assert "FAIL  hooks           has no Trainer.get_data" in result.output
    assert "FAIL  cache folder" in result.output
    assert "DP_PREWARM_STRICT=1" in result.output


def test_the_command_is_quick_to_answer_and_needs_no_torch_for_help():
    code = (
        "import sys; from deepmd_prewarm.cli import main;"
        "sys.argv = ['deepmd-prewarm', '--help'];"
        "\ntry: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
