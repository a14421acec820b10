# SPDX-License-Identifier: LGPL-3.0-or-later
"""The entry point: cheap, silent, never the reason why deepmd-kit fails to import."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import fresh_process
import pytest

_ENTRY = "import deepmd_prewarm.deepmd_kit.entry as entry\n"

_TRAINER = """
    class Trainer:
        def on_train_begin(self, tasks): print("began")
        def on_train_end(self, tasks): print("ended")
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Make a package `deepmd` whose trainer imports in no time."""
    package = tmp_path / "deepmd" / "pt_expt" / "train"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "training.py").write_text(textwrap.dedent(_TRAINER))
    return tmp_path


def python(code: str, *, path: Path, **environment: str) -> str:
    """Run code in a process that has torch, but not deepmd-kit, imported."""
    begin = f"import sys\nsys.path.insert(0, {str(path)!r})\n"
    done = fresh_process.run(
        begin + _ENTRY + textwrap.dedent(code), **{"DP_PREWARM": "1"} | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_importing_it_loads_neither_torch_nor_numpy_nor_deepmd() -> None:
    code = "import sys; print(sorted({'torch', 'numpy', 'deepmd'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", _ENTRY + code], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_it_waits_for_the_trainer_and_then_takes_itself_away(stand_in: Path) -> None:
    said = python(
        """
        import sys
        from deepmd_prewarm.deepmd_kit import entry
        print("waits", entry._finder in sys.meta_path)
        from deepmd_prewarm.deepmd_kit import trainer
        seen = []
        trainer.install = seen.append
        import deepmd.pt_expt.train.training as training
        print("hooked", seen == [training])
        print("waits", entry._finder in sys.meta_path)
        print(type(training.__loader__).__name__, training.__spec__.loader is
              training.__loader__)
        """,
        path=stand_in,
    )
    assert said == "waits True\nhooked True\nwaits False\nSourceFileLoader True\n"


def test_other_modules_are_left_to_other_finders(stand_in: Path) -> None:
    said = python(
        """
        import deepmd.pt_expt.train, json.tool
        print(entry._finder.find_spec("json.tool", None), json.tool.__spec__.name)
        """,
        path=stand_in,
    )
    assert said == "None json.tool\n"


def test_an_import_that_failed_is_hooked_when_it_is_tried_again(stand_in: Path) -> None:
    source = stand_in / "deepmd" / "pt_expt" / "train" / "training.py"
    source.write_text("import os\nif not os.environ.pop('SECOND', ''): raise OSError\n")
    said = python(
        """
        import os
        from deepmd_prewarm.deepmd_kit import trainer
        trainer.install = lambda module: print("hooked")
        try:
            import deepmd.pt_expt.train.training
        except OSError:
            print("failed")
        os.environ["SECOND"] = "1"
        import deepmd.pt_expt.train.training
        """,
        path=stand_in,
    )
    assert said == "failed\nhooked\n"


def test_a_trainer_that_is_there_already_is_hooked_at_once(stand_in: Path) -> None:
    said = python(
        """
        entry.unhook()
        import deepmd.pt_expt.train.training as training
        from deepmd_prewarm.deepmd_kit import trainer
        trainer.install = lambda module: print(module is training)
        entry.hook()
        """,
        path=stand_in,
    )
    assert said == "True\n"


@pytest.mark.parametrize("word", ["0", "off", "False", "no"])
def test_switched_off_it_does_nothing(stand_in: Path, word: str) -> None:
    said = python(
        """
        import sys
        print(entry._finder in sys.meta_path)
        import deepmd.pt_expt.train.training as training
        training.Trainer().on_train_begin(None)
        """,
        path=stand_in,
        DP_PREWARM=word,
    )
    assert said == "False\nbegan\n"


def test_a_fault_of_the_hook_is_a_warning_and_the_trainer_is_unchanged(
    stand_in: Path,
) -> None:
    said = python(
        """
        from deepmd_prewarm.deepmd_kit import trainer
        def broken(module): raise KeyError("moved")
        trainer.install = broken
        import deepmd.pt_expt.train.training as training
        training.Trainer().on_train_begin(None)
        """,
        path=stand_in,
    )
    assert "began" in said
    assert "cannot hook deepmd.pt_expt.train.training (KeyError: 'moved')" in said


def test_a_trainer_without_the_known_names_is_told_by_name(stand_in: Path) -> None:
    said = python(
        """
        from deepmd_prewarm.deepmd_kit.trainer import misfit
        import deepmd.pt_expt.train.training as training
        print(misfit(training))
        """,
        path=stand_in,
    )
    assert "has no _trace_and_compile, " in said
    assert "Trainer.get_data" in said
    assert "(known: 3.2.0)" in said


def test_a_training_that_compiles_nothing_is_left_alone(stand_in: Path) -> None:
    # No agreement, no library, no warning: all ranks have the same input file.
    said = python(
        """
        import deepmd.pt_expt.train.training as training
        one = training.Trainer()
        one.enable_compile = False
        one.on_train_begin(None)
        one.on_train_end(None)
        """,
        path=stand_in,
    )
    assert said == "began\nended\n"


def test_an_unknown_trainer_degrades_with_one_warning(stand_in: Path) -> None:
    said = python(
        """
        import deepmd.pt_expt.train.training as training
        one = training.Trainer()
        one.enable_compile, one.rank = True, 0
        one.on_train_begin(None)
        one.on_train_end(None)
        """,
        path=stand_in,
    )
    assert said.startswith("began\nended\n")
    assert said.count("training goes on without it on all ranks") == 1
    assert "DP_PREWARM_STRICT=1 makes this an error" in said


def test_an_unknown_trainer_is_an_error_where_faults_are_errors(stand_in: Path) -> None:
    said = python(
        """
        import deepmd.pt_expt.train.training as training
        one = training.Trainer()
        one.enable_compile, one.rank = True, 0
        try:
            one.on_train_begin(None)
        except RuntimeError as error:
            print(error)
        """,
        path=stand_in,
        DP_PREWARM_STRICT="1",
    )
    assert "rank 0: deepmd-kit 3.2.0 has no _trace_and_compile" in said
