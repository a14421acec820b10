# SPDX-License-Identifier: LGPL-3.0-or-later
"""The library alone, as an existing pipeline loads it; its shims never imported."""

from __future__ import annotations

from pathlib import Path

from fresh_process import output
from library_copies import LIBRARY

SAVE_TRAINER = """
import torch, deepmd_prewarm
class Net(torch.nn.Module):
    def forward(self, x):
        return x @ x
class Trainer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.jit.script(Net())
        self.task = deepmd_prewarm.CompiledTask.from_script("net", self.net)
    def forward(self, x):
        torch.ops.deepmd.warmup_compiled(self.task, [x])
        return self.net(x)
trainer = torch.jit.script(Trainer().eval())
trainer.save({whole!r})
torch.jit.freeze(trainer, preserved_attrs=["task"]).save({kept!r})
"""
ALONE = f"""
import sys, torch
torch.ops.load_library({str(LIBRARY)!r})
x, ops = torch.ones(4, 4), torch.ops.deepmd
"""


def test_eager_and_torchscript_are_right_and_compilers_say_what_to_import(
    tmp_path: Path,
) -> None:
    path = {name: str(tmp_path / f"{name}.pt") for name in ("whole", "kept")}
    output(SAVE_TRAINER.format(**path))
    code = f"""{ALONE}
for path in {list(path.values())!r}:
    trainer = torch.jit.load(path)
    print(trainer(x).sum().item(), trainer.task.is_warm(), trainer.task.stats()["runs"])
print(ops.explain_release([torch.ones(2), None]), ops.cache_bytes(x.device))
print(ops.release_trace_inputs([torch.ones(2)]))
print(ops.scalarize_losses({{"a": x.sum(), "l2_a": x.sum()}}))
def warm(x):
    ops.warmup_compiled(trainer.task, [x])
    return x @ x
def release(x):
    ops.release_trace_inputs([x])
    return x @ x
class Release(torch.nn.Module):
    def forward(self, x):
        return release(x)
for route in (
    lambda: torch.compile(warm, backend="aot_eager")(x),
    lambda: torch.compile(release, backend="aot_eager", fullgraph=True)(x),
    lambda: torch.compile(release, backend="inductor")(x),
    lambda: torch.export.export(Release(), (x,)),
):
    try:
        route()
    except Exception as error:
        print("import deepmd_prewarm" in str(error), x.sum().item())
    else:
        print("ran", trainer.task.stats()["runs"])
assert not any(name.startswith("deepmd_prewarm") for name in sys.modules)
"""
    assert output(code, TORCHINDUCTOR_CACHE_DIR=tmp_path).splitlines() == [
        *["64.0 True 1.0"] * 2,
        "['release', 'None: nothing to release'] (0, 0)",
        "8",
        "{'a': 16.0}",
        # Without a fake class for handles Dynamo leaves this call to Python.
        "ran 2.0",
        *["True 16.0"] * 3,
    ]
