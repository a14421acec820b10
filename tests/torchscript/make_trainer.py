# SPDX-License-Identifier: LGPL-3.0-or-later
"""Write what trainer_test.cpp runs: `make_trainer.py FOLDER`.

`trainer.pt`, `frozen.pt`, `traced.pt`, the batches `batches.pt`, and
`losses.txt`: the losses of a run in Python without the plugin, one rank of one
world a line, as exact hexadecimal numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from trainer import Traced, Trainer, batch, plain_losses


class Batches(torch.nn.Module):
    """Carries tensors into C++ by name."""

    def __init__(self) -> None:
        super().__init__()
        for task in ("water", "metal"):
            for rank in range(2):
                for part, tensor in enumerate(batch(task, rank)):
                    self.register_buffer(f"{task}_{rank}_{part}", tensor)


def main(folder: Path) -> None:
    """Make all files."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = torch.jit.script(Trainer().eval())
    trainer.save(folder / "trainer.pt")
    # Freezing turns what it does not keep into constants: a handle would then be
    # saved without the class of its module.
    handles = ["water_task", "metal_task", "first_task"]
    kept = ["train_prepared", "told", *handles]
    torch.jit.freeze(trainer, preserved_attrs=kept).save(folder / "frozen.pt")
    torch.jit.trace(Traced(), torch.ones(4, 4)).save(folder / "traced.pt")
    torch.jit.script(Batches()).save(folder / "batches.pt")
    lines = [
        " ".join([str(world), str(rank), *(loss.hex() for loss in losses)])
        for world in (1, 2)
        for rank, losses in enumerate(plain_losses(world))
    ]
    (folder / "losses.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
