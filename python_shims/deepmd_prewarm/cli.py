# SPDX-License-Identifier: LGPL-3.0-or-later
"""The command ``deepmd-prewarm``: train, report, doctor.

Exit codes: 0; 1 where ``doctor`` found a problem; 2 for bad input; ``train``
otherwise passes on what the training ended with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deepmd-prewarm")
def main() -> None:
    """Compile every task before step 1, free what that needed, lose no rank."""


def _checked_input(path: str) -> Path:
    source = Path(path)
    if not source.is_file():
        what = "a folder" if source.is_dir() else "nothing there"
        raise click.BadParameter(
            f"expected a deepmd-kit input file, got '{path}' ({what})",
            param_hint="INPUT.json",
        )
    try:
        content = json.loads(source.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise click.BadParameter(
            f"expected JSON, got '{path}' ({error})", param_hint="INPUT.json"
        ) from error
    if not isinstance(content, dict) or "training" not in content:
        got = (
            f"the keys {', '.join(content) or 'none'}"
            if isinstance(content, dict)
            else f"a JSON {type(content).__name__}"
        )
        raise click.BadParameter(
            f"expected a deepmd-kit input with a section 'training', got {got} in"
            f" '{path}'",
            param_hint="INPUT.json",
        )
    return source


def run_training(
    source: Path,
    nproc: int,
    report: Path | None,
    extra: tuple[str, ...] = (),
    folder: Path | None = None,
) -> int:
    """Train under torchrun, and wait for it.

    Parameters
    ----------
    source
        deepmd-kit's input file.
    nproc
        Ranks on this host.
    report
        Folder for the report, or None.
    extra
        More arguments for ``deepmd_prewarm.deepmd_kit.runner``.
    folder
        Where the training runs; None: the current folder.

    Returns
    -------
    int
        Exit code of torchrun.
    """
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", str(nproc)]
    command += ["-m", "deepmd_prewarm.deepmd_kit.runner", str(source)]
    if report is not None:
        command += ["--report", str(report)]
    environment = dict(os.environ)
    # torchrun would give each rank one thread and warn about it.
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    with subprocess.Popen([*command, *extra], env=environment, cwd=folder) as training:
        try:
            return training.wait()
        except KeyboardInterrupt:
            # The terminal told torchrun too; it stops its ranks itself.
            return training.wait()


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("input_file", metavar="INPUT.json")
@click.option(
    "--nproc", type=int, default=1, show_default=True, help="ranks on this host"
)
@click.option(
    "--report",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="folder for prewarm.json and prewarm.png",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def train(
    input_file: str, nproc: int, report: Path | None, options: tuple[str, ...]
) -> None:
    """Train INPUT.json with deepmd-kit (pt_expt), prewarmed, under torchrun.

    Further OPTIONS go to the training: --restart, --init-model, --finetune,
    --skip-neighbor-stat, --seed, --timeout.
    """
    source = _checked_input(input_file)
    if nproc < 1:
        raise click.BadParameter(
            f"expected at least 1 rank, got {nproc}", param_hint="--nproc"
        )
    code = run_training(source, nproc, report, options)
    if code == 0 and report is not None:
        _show(report)
    sys.exit(code)


def _show(folder: Path) -> None:
    from rich.console import Console

    from .report import PrewarmReport
    from .report_table import print_report

    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        loaded = PrewarmReport.load(folder)
    except (FileNotFoundError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="DIR") from error
    print_report(loaded, console)
    picture = folder / "prewarm.png" if folder.is_dir() else folder.with_suffix(".png")
    if not picture.exists():
        loaded.plot(picture)
    console.print(f"timeline and memory: {picture}", markup=False, highlight=False)


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def report(folder: Path) -> None:
    """Show the report in DIR: a table, and prewarm.png if it is not there yet."""
    _show(folder)


@main.command()
@click.option("--device", is_flag=True, help="also run a kernel on each CUDA device")
def doctor(device: bool) -> None:
    """Say what is installed here, and whether it fits together."""
    from .doctor import examine

    findings = examine(run_on_device=device)
    for finding in findings:
        mark = "ok  " if finding.good else "FAIL"
        click.echo(f"{mark}  {finding.subject:<16}{finding.text}")
    if not all(finding.good for finding in findings):
        sys.exit(1)


@main.command(hidden=True)
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/demo"),
    show_default=True,
)
@click.option("--nproc", type=int, default=2, show_default=True)
def demo(folder: Path, nproc: int) -> None:
    """Three metals, three graphs, two ranks: what `make demo` runs."""
    from .demo import run_demo

    code = run_demo(folder, nproc)
    if code == 0:
        _show(folder)
    sys.exit(code)


if __name__ == "__main__":
    main()
