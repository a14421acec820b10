# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a released tensor does when it is touched: it raises by name, or tells its
shape. Each touch runs in a process that may crash without taking pytest along."""

from __future__ import annotations

import pytest
from fresh_process import run

SETUP = """
import copy, io, pickle, warnings
import numpy as np
import torch
import deepmd_prewarm
deepmd_prewarm.load()
warnings.simplefilter("ignore")
x = torch.rand(10, 4)
y = torch.rand(10, 4)
assert torch.ops.deepmd.release_trace_inputs([x]) == 160
"""

READS = [
    "x.sum()", "print(x)", "repr(x)", "x.tolist()", "x[0, 0].item()", "float(x[0, 0])",
    "x[1:3].clone()", "x.T.contiguous()", "x.expand(2, 10, 4).sum()", "x.view(-1) + 1",
    "x.detach().sum()", "x.data.sum()", "x.as_strided((2,), (1,)).sum()",
    "[float(v.sum()) for v in x]", "x.to(torch.float64)", "x.to('cpu', copy=True)",
    "x.clone()", "x.numpy()", "np.asarray(x)", "x.data_ptr()", "x.__dlpack__()",
    "torch.utils.dlpack.to_dlpack(x)", "pickle.dumps(x)", "torch.save(x, io.BytesIO())",
    "copy.deepcopy(x)", "x.add_(1)", "x.zero_()", "x.copy_(y)", "y.copy_(x)",
    "torch.add(y, 1, out=x)", "x.resize_(100)", "x.requires_grad_().sum()", "x == x",
    "torch.equal(x, y)", "x.share_memory_()", "x.is_shared()", "x.pin_memory()",
    "x.untyped_storage()[0]", "x.untyped_storage().tolist()",
    "bytes(x.untyped_storage())", "x.untyped_storage().clone()",
    "x.untyped_storage().resize_(4)", "x.untyped_storage().is_shared()",
    "x.storage()[0]", "torch.empty(3).set_(x).sum()", "torch.linalg.norm(x)",
    "torch.nn.functional.linear(x, y)", "x.matmul(y.T)", "torch.cat([x, y])",
    "x.unbind()[0].sum()", "torch.jit.script(scripted)(x)",
    "torch.compile(lambda t: (t * 2).sum(), backend='eager')(x)",
    "torch.compile(lambda t: (t * 2).sum(), backend='aot_eager')(x)",
]  # fmt: skip

QUIET = {
    "tuple(x.shape)": (10, 4),
    "str(x.dtype)": "torch.float32",
    "str(x.device)": "cpu",
    "x.stride()": (4, 1),
    "x.numel()": 40,
    "x.requires_grad": False,
    "x.view(4, 10).shape[1]": 10,
    "torch.empty_like(x).shape[0]": 10,
    "torch.ops.deepmd.release_trace_inputs([x, x[1:]])": 0,
    "torch.ops.deepmd.explain_release([x])": ["already released"],
    "len({x: 1})": 1,
}


def test_every_read_raises_by_name_and_nothing_crashes():
    code = (
        SETUP
        + f"""
import importlib.util, os, tempfile
folder = tempfile.mkdtemp()
open(os.path.join(folder, "m.py"), "w").write(
    "import torch\\ndef scripted(t: torch.Tensor):\\n    return t.sum()\\n")
spec = importlib.util.spec_from_file_location("m", os.path.join(folder, "m.py"))
m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
scripted = m.scripted
for read in {READS!r}:
    print("START", read, flush=True)
    x = torch.rand(10, 4)
    torch.ops.deepmd.release_trace_inputs([x])
    try:
        value = eval(read)
    except RuntimeError as error:
        assert "release_trace_inputs" in str(error), (read, error)
    else:
        raise AssertionError((read, value))
print("END")
"""
    )
    done = run(code, OMP_NUM_THREADS=1)
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert done.stdout.endswith("END\n")


def test_what_is_not_data_stays_readable():
    code = (
        SETUP
        + f"""
for question, answer in {QUIET!r}.items():
    assert eval(question) == answer, question
import gc
del x
gc.collect()
print("END")
"""
    )
    done = run(code, OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("END\n")


# Who else holds x, and what reading there must give: the sum of its ones.
HELD = {
    "x.view(-1)": "held.sum()",
    "x[::2]": "2 * held.sum()",
    "x.detach()": "held.sum()",
    "(x * w).sum()": "held.backward() or w.grad.sum()",
    "((x := w) * w).sum()": "held.backward() or w.grad.sum() / 2",
    "torch.utils.dlpack.to_dlpack(x)": "torch.utils.dlpack.from_dlpack(held).sum()",
    "torch.utils.dlpack.from_dlpack(x)": "held.sum()",
    "x.numpy()": "held.sum()",
    "x.untyped_storage()": "torch.empty(0).set_(held).sum()",
    "torch.nn.Parameter(x)": "held.sum()",
}


@pytest.mark.parametrize("held", HELD)
def test_large_memory_that_something_else_reads_is_never_unmapped(held):
    code = f"""
import torch, deepmd_prewarm
deepmd_prewarm.load()
x = torch.ones(1 << 22)  # mapped by itself: reading it once unmapped is SIGSEGV
w = torch.ones(1 << 22, requires_grad=True)
held = {held}
assert torch.ops.deepmd.release_trace_inputs([x]) == 0
assert torch.ops.deepmd.release_trace_inputs([x, x, None]) == 0
assert abs(float({HELD[held]}) - (1 << 22)) < 1
print("END")
"""
    done = run(code, OMP_NUM_THREADS=1)
    assert (done.returncode, done.stdout) == (0, "END\n"), done.stderr[-2000:]


@pytest.mark.parametrize("route", ["bare", "typed"])
def test_a_traced_graph_with_a_closure_tensor_never_reads_unmapped_memory(route):
    """The graph holds the very object: only the typed route can see that."""
    code = f"""
import torch, deepmd_prewarm
from torch.fx.experimental.proxy_tensor import make_fx
deepmd_prewarm.load()
x = torch.ones(1 << 22)
graph = make_fx(lambda y: y + x)(torch.zeros(1))
if {route!r} == "typed":
    assert deepmd_prewarm.release_trace_inputs([x]) == 0
    assert graph(torch.zeros(1)).sum() == 1 << 22
else:
    assert torch.ops.deepmd.release_trace_inputs([x]) == 1 << 24
    try:
        graph(torch.zeros(1))
    except RuntimeError as error:
        assert "release_trace_inputs" in str(error)
print("END")
"""
    done = run(code, OMP_NUM_THREADS=1)
    assert (done.returncode, done.stdout) == (0, "END\n"), done.stderr[-2000:]


# E4: optional lists that alias, with torch's check of aliasing an error.
OPCHECK = """
import torch, deepmd_prewarm
from torch._functorch import config
deepmd_prewarm.load()
config.check_custom_op_aliasing = config.error_on_custom_op_aliasing = True
release = torch.ops.deepmd.release_trace_inputs
t = torch.ones(16, 16)
for inputs in ([t, None], [], [t, t]):
    torch.library.opcheck(release.default, (inputs,))
    if None not in inputs:
        torch.library.opcheck(release.list, (inputs,))
def program(x):
    y = x @ x
    release([y, None])
    release([y, y])
    return x + 1
result = torch.compile(program, backend="aot_eager", fullgraph=True)(t)
assert result.sum() == 512 and t.sum() == 256
print("END")
"""


def test_optional_and_repeated_tensors_pass_torchs_checks_where_ci_is_set():
    done = run(OPCHECK, timeout_s=500, OMP_NUM_THREADS=1, CI=1)
    assert (done.returncode, done.stdout) == (0, "END\n"), done.stderr[-2000:]


def test_a_released_tensor_may_outlive_the_interpreter():
    code = """
import builtins, torch, deepmd_prewarm
deepmd_prewarm.load()
builtins.kept = torch.ones(1 << 20)
assert torch.ops.deepmd.release_trace_inputs([builtins.kept]) == 4 << 20
"""
    assert run(code).returncode == 0
