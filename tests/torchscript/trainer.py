# SPDX-License-Identifier: LGPL-3.0-or-later
"""A multi-task trainer that TorchScript can export whole.

Two heads with an energy and force loss and SGD, all in TorchScript: the saved
file trains in a C++ process, alone or as one rank of a c10d group. It calls the
plugin's operators as a trainer written for it would.
"""

from __future__ import annotations

import math

import deepmd_prewarm
import torch
from torch import Tensor

deepmd_prewarm.load()
STEPS = 6
RATE = 0.05
#: Bytes of one task's batch: 2 frames of 4 atoms.
BATCH_BYTES = 8 * (2 * 4 * 3 + 2 + 2 * 4 * 3)


class Head(torch.nn.Module):
    """One task's energy: a small net of distances, averaged over pairs."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=random, dtype=torch.float64)
            return torch.nn.Parameter(values / math.sqrt(width))

        self.w1, self.b1, self.w2 = weight(1, width), weight(width), weight(width, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @torch.jit.export
    def weights(self) -> list[Tensor]:
        return [self.w1, self.b1, self.w2]

    @torch.jit.export
    def energy(self, coord: Tensor) -> Tensor:
        between = coord.unsqueeze(1) - coord.unsqueeze(2)
        distance = (between.square().sum(-1) + 1.0).sqrt().unsqueeze(-1)
        hidden = torch.tanh(torch.matmul(distance, self.w1) + self.b1)
        return torch.matmul(hidden, self.w2).mean([1, 2, 3])

    def forward(self, coord: Tensor, energy: Tensor, force: Tensor) -> Tensor:
        """Loss of a batch: coord and force (frames, atoms, 3), energy (frames)."""
        self.calls += 1
        coord = coord.detach().requires_grad_(True)
        predicted = self.energy(coord)
        slope = torch.autograd.grad([predicted.sum()], [coord], create_graph=True)[0]
        assert slope is not None
        return (predicted - energy).square().mean() + (slope + force).square().mean()


class Trainer(torch.nn.Module):
    """Two tasks, each with a handle that `prepare` warms."""

    def __init__(self) -> None:
        super().__init__()
        self.water = torch.jit.script(Head(1, 8))
        self.metal = torch.jit.script(Head(2, 5))
        self.water_task = deepmd_prewarm.CompiledTask.from_script("water", self.water)
        self.metal_task = deepmd_prewarm.CompiledTask.from_script("metal", self.metal)
        # The same handle twice stays one handle.
        self.first_task = self.water_task

    @torch.jit.export
    def prepare(
        self,
        water: list[Tensor],
        metal: list[Tensor],
        group: str,
    ) -> int:
        """Warm every task on a copy of its batch; return the bytes given back."""
        released = 0
        for name in ["water", "metal"]:
            batch = water if name == "water" else metal
            sample = [part.clone() for part in batch]
            if name == "water":
                torch.ops.deepmd.warmup_compiled(self.water_task, sample)
            else:
                torch.ops.deepmd.warmup_compiled(self.metal_task, sample)
            released += torch.ops.deepmd.release_trace_inputs(sample)
            torch.ops.deepmd.safe_empty_cache(batch[0].device)
            if group != "":
                torch.ops.deepmd.sync_ranks(group, name)
        return released

    @torch.jit.export
    def train_steps(
        self,
        water: list[Tensor],
        metal: list[Tensor],
        steps: int,
        rate: float,
        group: str,
        world: int,
    ) -> list[dict[str, float]]:
        """Train the tasks in turn, with gradients averaged over the group."""
        log: list[dict[str, float]] = []
        for step in range(steps):
            on_water = step % 2 == 0
            if on_water:
                loss = self.water(water[0], water[1], water[2])
                weights = self.water.weights()
            else:
                loss = self.metal(metal[0], metal[1], metal[2])
                weights = self.metal.weights()
            slopes = torch.autograd.grad([loss], weights)
            for weight, slope in zip(weights, slopes):  # noqa: B905 TorchScript
                assert slope is not None
                if group != "":
                    slope = torch.ops._c10d_functional.wait_tensor(
                        torch.ops._c10d_functional.all_reduce(slope, "sum", group)
                    )
                with torch.no_grad():
                    weight.sub_(rate * (slope / world))
            name = "water" if on_water else "metal"
            log.append(
                torch.ops.deepmd.scalarize_losses(
                    {name: loss, "l2_" + name: loss.sqrt(), "steps": torch.tensor(step)}
                )
            )
        return log

    @torch.jit.export
    def train_prepared(
        self,
        water: list[Tensor],
        metal: list[Tensor],
        steps: int,
        rate: float,
        group: str,
        world: int,
    ) -> tuple[int, list[dict[str, float]]]:
        """`prepare`, then `train_steps`."""
        released = self.prepare(water, metal, group)
        return released, self.train_steps(water, metal, steps, rate, group, world)

    @torch.jit.export
    def told(self) -> list[str]:
        """What the handles and modules say of themselves."""
        return [
            self.water_task.name() + " " + self.water_task.backend(),
            "warm" if self.water_task.is_warm() else "cold",
            "warm" if self.first_task.is_warm() else "cold",
            "warm" if self.metal_task.is_warm() else "cold",
            str(int(self.water.calls)) + " " + str(int(self.metal.calls)),
        ]

    def forward(self, coord: Tensor) -> Tensor:
        """Energies of both heads, for evaluation."""
        return torch.stack([self.water.energy(coord), self.metal.energy(coord)])


@torch.jit.script
def let_go(x: Tensor) -> Tensor:
    freed = torch.ops.deepmd.release_trace_inputs([x])
    torch.ops.deepmd.safe_empty_cache(x.device)
    return torch.tensor(freed)


class Traced(torch.nn.Module):
    """`torch.jit.trace` keeps what a scripted function calls, its result unused."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ x
        let_go(y)
        return x @ x


def batch(task: str, rank: int) -> list[Tensor]:
    """Coordinates, energies and forces of one task on one rank."""
    seed = {"water": 10, "metal": 20}[task] + rank
    random = torch.Generator().manual_seed(seed)
    coord = torch.randn(2, 4, 3, generator=random, dtype=torch.float64)
    return [coord, coord.square().sum([1, 2]), -2.0 * coord]


def plain_losses(world: int) -> list[list[float]]:
    """Losses of every rank and step, in eager Python, without the plugin."""
    heads = {"water": Head(1, 8), "metal": Head(2, 5)}
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(STEPS):
        name = "water" if step % 2 == 0 else "metal"
        weights = heads[name].weights()
        slopes = []
        for rank in range(world):
            loss = heads[name](*batch(name, rank))
            losses[rank].append(loss.item())
            slopes.append(torch.autograd.grad(loss, weights))
        with torch.no_grad():
            for weight, *parts in zip(weights, *slopes, strict=True):
                weight.sub_(RATE * (sum(parts[1:], parts[0]) / world))
    return losses
