# SPDX-License-Identifier: LGPL-3.0-or-later
"""What release_trace_inputs frees and what it keeps, on every route to it."""

from __future__ import annotations

import gc
import io
import threading
from typing import List, Optional  # noqa: UP035  TorchScript knows no other

import deepmd_prewarm
import numpy as np
import pytest
import torch
from deepmd_prewarm import explain_release, release_trace_inputs

deepmd_prewarm.load()
bare = torch.ops.deepmd.release_trace_inputs
explain = torch.ops.deepmd.explain_release


def is_released(tensor: torch.Tensor) -> bool:
    try:
        tensor.sum()
    except RuntimeError as error:
        assert str(error).startswith("release_trace_inputs: expected")
        return True
    return False


@pytest.fixture(params=["bare", "typed"])
def release(request):
    """Both routes; the typed one without its look at this module's names."""
    if request.param == "bare":
        return lambda inputs: bare(inputs)
    return lambda inputs: release_trace_inputs(inputs, look_for_holders=False)


def test_each_storage_is_given_back_once(release):
    coord, atype = torch.rand(4, 3, dtype=torch.float64), torch.zeros(4).long()
    inputs = [coord, atype, None, coord]
    assert release(inputs) == 4 * 3 * 8 + 4 * 8
    assert release(inputs) == 0
    assert is_released(coord)
    assert release([]) == release([None]) == 0


def test_the_process_gets_its_memory_back(release):
    psutil = pytest.importorskip("psutil")
    large = torch.ones(1 << 26)  # 256 MiB, mapped by itself
    before = psutil.Process().memory_info().rss
    assert release([large]) == 1 << 28
    assert before - psutil.Process().memory_info().rss > 200 << 20


def test_every_overload_takes_what_its_type_says():
    assert bare.list([torch.rand(4)]) == 16
    assert bare.default([torch.rand(4), None]) == 16
    assert bare([torch.rand(4)]) == 16


def test_explain_says_beforehand_what_release_does_in_words():
    shared, free = torch.rand(4), torch.rand(4)
    view = shared[1:]
    reasons = explain([shared, None, free])
    assert reasons == [
        "its memory is shared with a tensor outside the list: a view, detach(), "
        "a graph constant or a saved output",
        "None: nothing to release",
        "release",
    ]
    assert bare([shared, None, free]) == 16
    assert explain([free]) == ["already released"]
    assert torch.equal(view, shared[1:])


# -- webs of tensors -----------------------------------------------------------

VIEWS = {
    "slice": lambda x: x[1:3],
    "view of a view": lambda x: x[1:3][1:],
    "expand": lambda x: x[:1].expand(5, 4),
    "as_strided overlap": lambda x: x.as_strided((3, 3), (1, 1)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "T": lambda x: x.T,
    "unsqueeze": lambda x: x[None],
    "view": lambda x: x.view(-1),
    "dtype": lambda x: x.view(torch.int32),
    "alias": lambda x: torch.ops.aten.alias(x),
    "chunk": lambda x: x.chunk(2)[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_outside_the_list_protects_its_storage(release, name):
    base = torch.rand(4, 4)
    view = VIEWS[name](base)
    values, expected = view.clone(), base.clone()
    assert release([base]) == 0
    assert release([view]) == 0
    assert torch.equal(view, values) and torch.equal(base, expected)


@pytest.mark.parametrize("name", VIEWS)
def test_both_ends_of_a_view_in_one_list_are_one_release(release, name):
    base = torch.rand(4, 4)
    view = VIEWS[name](base)
    assert release([base, view, view]) == 64
    assert is_released(base) and is_released(view)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_base_that_nobody_knows_is_released(release, name):
    view = VIEWS[name](torch.rand(4, 4))
    assert release([view]) == 64


def test_a_complex_view_of_a_real_tensor_is_kept_for_good(release):
    """torch keeps a copy of the base where nothing can count it."""
    base = torch.rand(4, 2)
    view = torch.view_as_complex(base)
    assert release([base, view]) == 0
    assert torch.equal(view.real, base[:, 0])


def test_a_base_that_python_reaches_through_its_view_is_protected(release):
    view = torch.rand(4)[1:]
    base = view._base
    assert release([view]) == 0
    assert torch.equal(base[1:], view)
    del base
    assert release([view]) == 16


def test_a_storage_object_protects_its_memory(release):
    tensor = torch.rand(4)
    storage = tensor.untyped_storage()
    assert release([tensor]) == 0
    assert explain([tensor])[0].startswith("a storage object")
    del storage
    assert release([tensor]) == 16


def test_looking_at_the_storage_once_does_not_protect_it(release):
    tensor = torch.rand(4)
    tensor.untyped_storage().nbytes()
    assert release([tensor]) == 16


def test_a_tensor_of_two_dtypes_is_told_from_its_copy(release):
    tensor = torch.rand(4)
    same, copy = tensor.to(torch.float32), tensor.to(torch.float64)
    assert same is tensor
    assert release([tensor]) == 16
    assert torch.isfinite(copy).all()


# -- autograd -------------------------------------------------------------------


def test_an_input_that_autograd_saved_is_kept_and_the_backward_is_right(release):
    coord, weight = torch.rand(5), torch.rand(5, requires_grad=True)
    energy = (coord * weight).sum()
    assert release([coord]) == 0
    assert explain([coord])[0].startswith("held by more than the list")
    energy.backward()
    assert torch.equal(weight.grad, coord)
    del energy
    assert release([coord]) == 20


def test_an_output_that_autograd_saved_is_kept(release):
    coord = torch.rand(5, requires_grad=True)
    output = coord.exp()
    assert release([output]) == 0
    output.sum().backward()
    assert torch.allclose(coord.grad, coord.detach().exp())


def test_a_leaf_with_a_live_graph_is_kept_until_the_graph_is_gone(release):
    coord = torch.rand(5, requires_grad=True)
    energy = coord.sum()  # saves nothing
    assert release([coord]) == 0
    assert explain([coord]) == ["a live graph accumulates a gradient for it"]
    energy.backward()
    assert torch.equal(coord.grad, torch.ones(5))
    assert release([coord]) == 0  # the graph is spent, not gone
    del energy
    assert release([coord]) == 20


def test_a_second_order_graph_protects_what_it_saved(release):
    coord = torch.rand(5, dtype=torch.float64, requires_grad=True)
    energy = (coord**3).sum()
    (force,) = torch.autograd.grad(energy, coord, create_graph=True)
    assert release([coord, force]) in (0, 40)  # the force itself isn't saved
    (second,) = (
        torch.autograd.grad(force.sum(), coord)
        if not is_released(force)
        else (6 * coord.detach(),)
    )
    assert torch.allclose(second, 6 * coord.detach())


def test_a_custom_function_protects_what_it_saved(release):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(scale)
            return x * scale

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

    coord, scale = torch.rand(5, requires_grad=True), torch.rand(5)
    energy = Scale.apply(coord, scale).sum()
    assert release([scale]) == 0
    energy.backward()
    assert torch.equal(coord.grad, scale)


def test_what_a_checkpoint_saved_is_kept(release):
    coord, weight = torch.rand(5), torch.rand(5, requires_grad=True)
    energy = torch.utils.checkpoint.checkpoint(
        lambda a, w: (a * w).sum(), coord, weight, use_reentrant=True
    )
    assert release([coord]) == 0
    energy.backward()
    assert torch.equal(weight.grad, coord)


def test_a_result_that_nothing_saved_is_released_and_its_graph_lives(release):
    coord = torch.rand(5, requires_grad=True)
    shifted = coord + 1
    energy = (shifted * 2).sum()
    assert release([shifted]) == 20
    energy.backward()
    assert torch.equal(coord.grad, torch.full((5,), 2.0))


# -- memory that is not the tensor's own ----------------------------------------


def test_numpy_memory_is_kept_in_both_directions(release):
    array = np.arange(4.0)
    borrowed = torch.from_numpy(array)
    lent = torch.ones(4)
    reader = lent.numpy()
    assert release([borrowed, lent]) == 0
    assert set(explain([borrowed, lent])) == {
        "borrowed or shared memory (NumPy, a buffer, DLPack, a file, another process)"
    }
    assert array.tolist() == [0, 1, 2, 3] and reader.tolist() == [1] * 4


def test_a_refused_tensor_in_the_middle_is_untouched_and_the_others_go(release):
    array = np.arange(4.0)
    first, middle, last = torch.rand(4), torch.from_numpy(array), torch.rand(4)
    assert release([first, middle, None, last]) == 32
    assert middle.shape == (4,) and middle.stride() == (1,)
    assert middle.tolist() == array.tolist() == [0, 1, 2, 3]


def test_buffers_files_and_array_interfaces_are_kept(release, tmp_path):
    class Exporter:
        array = np.arange(4.0)
        __array_interface__ = array.__array_interface__

    raw = bytearray(np.arange(4.0).tobytes())
    path = tmp_path / "coord.raw"
    path.write_bytes(raw)
    borrowed = [
        torch.frombuffer(raw, dtype=torch.float64),
        torch.from_numpy(np.asarray(Exporter())),
        torch.from_file(str(path), size=4, dtype=torch.float64),
        torch.from_file(str(path), shared=True, size=4, dtype=torch.float64),
    ]
    assert release(borrowed) == 0
    assert [tensor.tolist() for tensor in borrowed] == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("consumed", [True, False])
def test_a_dlpack_capsule_protects_its_memory(release, consumed):
    tensor = torch.ones(4)
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    reader = torch.utils.dlpack.from_dlpack(capsule) if consumed else None
    assert release([tensor]) == 0
    assert tensor.tolist() == [1] * 4
    del capsule, reader
    assert release([tensor]) == 16


def test_memory_from_another_librarys_dlpack_is_kept(release):
    array = np.arange(4.0)
    tensor = torch.from_dlpack(array)
    assert release([tensor]) == 0
    assert array.tolist() == [0, 1, 2, 3]


def _read_on(shared, queue):
    queue.put(shared.sum().item())


def test_shared_memory_is_kept_and_a_spawned_child_reads_on(release):
    shared = torch.ones(8).share_memory_()
    assert release([shared]) == 0
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=_read_on, args=(shared, queue))
    child.start()
    child.join(60)
    assert queue.get() == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins with CUDA only")
def test_pinned_memory_is_released_or_stays_as_explained(release):
    pinned = torch.ones(4).pin_memory()
    reason = explain([pinned])[0]
    assert release([pinned]) == (16 if reason == "release" else 0)
    assert is_released(pinned) or pinned.tolist() == [1] * 4


def test_copy_on_write_memory_is_kept(release):
    tensor = torch.ones(4)
    lazy = torch._lazy_clone(tensor)
    assert release([tensor]) == release([lazy]) == 0
    assert torch.equal(tensor, lazy)


def test_a_storage_that_was_resized_to_nothing_is_left_alone(release):
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    assert release([tensor]) == 0
    assert explain([tensor]) == ["zero bytes: nothing to release"]
    tensor.untyped_storage().resize_(16)
    assert release([tensor]) == 16


# -- kinds of tensors -----------------------------------------------------------

KINDS = {
    "coo": (lambda: torch.eye(3).to_sparse(), "sparse tensor"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse tensor"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested tensor",
    ),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "tensor without a storage"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta or fake tensor"),
    "zero size": (lambda: torch.empty(0, 3), "zero bytes"),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_kinds_without_memory_of_their_own_are_explained(release, kind, inference):
    make, reason = KINDS[kind]
    with torch.inference_mode(inference):
        tensor, plain = make(), torch.rand(4)
        reasons = explain([tensor, plain])
        assert reasons[0].startswith(reason) and reasons[1] == "release"
        assert release([tensor, plain]) == 16


def test_quantized_complex_and_half_tensors_are_released(release):
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    channels = torch.quantize_per_channel(
        torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8
    )
    others = [torch.ones(3, dtype=d) for d in (torch.cfloat, torch.half, torch.bool)]
    assert release([quantized, channels, *others]) == 3 + 6 + 24 + 6 + 3


def test_inference_tensors_are_judged_like_others(release):
    with torch.inference_mode():
        alone, shared = torch.ones(4), torch.ones(4)
        view = shared[1:]
        assert release([alone, shared]) == 16
        assert release([shared, view]) == 16


@pytest.mark.parametrize("layer", ["grad", "jvp", "vmap", "functionalize"])
def test_inside_a_functorch_transform_nothing_is_released(release, layer):
    seen = []

    def function(x):
        scaled = x * 2
        out = (scaled * x).sum()
        seen.append(release([scaled, x]))
        return out

    x = torch.ones(3, 3)
    if layer == "grad":
        assert torch.equal(torch.func.grad(function)(x), 4 * x)
    elif layer == "jvp":
        assert torch.func.jvp(function, (x,), (x,))[1] == 36
    elif layer == "vmap":
        assert torch.vmap(function)(x).tolist() == [6] * 3
    else:
        assert torch.func.functionalize(function)(x) == 18
    assert seen == [0]
    assert torch.equal(x, torch.ones(3, 3))


def test_functorch_wrappers_are_named_whatever_is_in_the_list():
    seen = []
    plain = torch.rand(4)  # the transform wraps it, too

    def function(x):
        seen.extend(explain([x * 2, None, plain]))
        seen.append(bare.list([x * 2, plain]))
        return x.sum()

    torch.func.grad(torch.func.grad(function))(torch.tensor(1.0))
    assert seen[0].startswith("functorch wrapper") and seen[0] == seen[2]
    assert seen[1:4:2] == ["None: nothing to release", 0]
    assert torch.isfinite(plain).all()


def test_subclasses_with_a_dispatch_of_their_own_are_left_out_by_name():
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.rand(4)
    pair = two_tensor.TwoTensor(torch.rand(4), torch.rand(4))
    inputs = [fake, pair, torch.rand(4)]
    reasons = explain_release(inputs)
    assert reasons[0].startswith("FakeTensor: a tensor subclass")
    assert reasons[1].startswith("TwoTensor: a tensor subclass")
    assert release_trace_inputs(inputs) == 16
    assert torch.isfinite(pair.a).all() and torch.isfinite(pair.b).all()


def test_a_dtensor_is_refused_by_name_and_stays_readable():
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode  # noqa: F401

    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        spread = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        assert release_trace_inputs([spread]) == 0
        assert explain_release([spread])[0].startswith("DTensor: a tensor subclass")
        with pytest.raises(NotImplementedError, match="release_trace_inputs"):
            bare([spread])
        assert spread.to_local().sum() == 4
    finally:
        torch.distributed.destroy_process_group()


def test_a_plain_subclass_is_a_tensor_like_any(release):
    class Named(torch.Tensor):
        pass

    tensor = torch.rand(4).as_subclass(Named)
    assert release([tensor]) == 16


# -- bad input ------------------------------------------------------------------


def test_wrong_arguments_are_named_before_anything_is_released():
    good = torch.rand(4)
    for inputs, words in (
        ([good, 3.0], "tensor or None at index 1, got float"),
        (good, "list of tensors or None, got Tensor"),
        ({"coord": good}, "list of tensors or None, got dict"),
    ):
        for call in (release_trace_inputs, explain_release):
            with pytest.raises(TypeError, match=words):
                call(inputs)
    assert torch.isfinite(good).all()


# -- TorchScript ----------------------------------------------------------------


@torch.jit.script
def script_last_use(x: torch.Tensor, y: Optional[torch.Tensor]) -> int:  # noqa: UP045
    return torch.ops.deepmd.release_trace_inputs([x, y])


@torch.jit.script
def script_later_use(x: torch.Tensor):
    released = torch.ops.deepmd.release_trace_inputs([x])
    return released, x.sum()


@torch.jit.script
def script_local(n: int) -> int:
    x = torch.ones(n)
    return torch.ops.deepmd.release_trace_inputs([x, x[1:]])


@torch.jit.script
def script_saved(w: torch.Tensor):
    x = torch.full([4], 3.0)
    y = (x * w).sum()
    released = torch.ops.deepmd.release_trace_inputs([x])
    return released, y


@torch.jit.script
def script_view(n: int):
    x = torch.ones(n)
    v = x[1:]
    released = torch.ops.deepmd.release_trace_inputs([x])
    return released, v.sum()


@torch.jit.script
def script_explain(x: torch.Tensor) -> List[str]:  # noqa: UP006
    inputs: List[Optional[torch.Tensor]] = [x]  # noqa: UP006, UP045
    return torch.ops.deepmd.explain_release(inputs)


class Trainer(torch.nn.Module):
    """A scripted trainer that owns a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, coord: torch.Tensor):
        energy = self.layer(coord).sum()
        released: int = torch.ops.deepmd.release_trace_inputs([coord])
        return released, energy

    @torch.jit.export
    def release_weight(self) -> int:
        return torch.ops.deepmd.release_trace_inputs([self.layer.weight])


@pytest.mark.parametrize("call", range(3))
def test_torchscript_releases_at_the_last_use(call):  # profiled, then optimized
    assert script_last_use(torch.rand(4), None) == 16
    assert script_last_use(torch.rand(4), torch.rand(2)) == 24
    assert script_local(4) == 16
    assert script_explain(torch.rand(4)) == ["release"]


@pytest.mark.parametrize("call", range(3))
def test_torchscript_keeps_what_the_script_or_its_graph_still_reads(call):
    released, total = script_later_use(torch.ones(4))
    assert (released, total.item()) == (0, 4)
    released, total = script_view(4)
    assert (released, total.item()) == (0, 3)
    weight = torch.ones(4, requires_grad=True)
    released, energy = script_saved(weight)
    assert released == 0
    energy.backward()
    assert weight.grad.tolist() == [3] * 4


def test_a_scripted_module_keeps_its_own_and_survives_saving():
    trainer = torch.jit.script(Trainer())
    file = io.BytesIO()
    torch.jit.save(trainer, file)
    file.seek(0)
    for module in (trainer, torch.jit.load(file)):
        assert module.release_weight() == 0
        released, energy = module(torch.ones(2, 4))
        assert released == 0  # Linear saved it
        energy.backward()
        with torch.no_grad():
            assert module(torch.ones(2, 4))[0] == 32


# -- threads and failures -------------------------------------------------------


def test_threads_with_overlapping_lists_free_each_tensor_at_most_once():
    for _ in range(50):
        a, b, c = (torch.ones(1000) for _ in range(3))
        barrier = threading.Barrier(2)
        freed = []

        def work(inputs, barrier=barrier, freed=freed):
            barrier.wait()
            freed.append(bare(inputs))

        threads = [threading.Thread(target=work, args=(i,)) for i in ([a, b], [b, c])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(freed) == 4000 * sum(map(is_released, (a, b, c)))


def test_a_view_taken_by_another_thread_meanwhile_reads_ones_or_raises_by_name():
    for _ in range(50):
        coord = torch.ones(1 << 16)
        barrier = threading.Barrier(2)
        seen = []

        def read(coord=coord, barrier=barrier, seen=seen):
            barrier.wait()
            try:
                seen.append(coord[1:].sum().item())
            except RuntimeError as error:
                seen.append(str(error)[:21])

        reader = threading.Thread(target=read)
        reader.start()
        barrier.wait()
        bare([coord])
        reader.join()
        assert seen[0] in ((1 << 16) - 1, "release_trace_inputs:")


def live_bytes() -> int:
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return sum(t.nbytes for t in tensors if type(t) is torch.Tensor and not t.is_sparse)


def test_a_trace_that_raises_leaves_its_inputs_whole_and_nothing_else_alive():
    before = live_bytes()
    for _ in range(20):
        coord, atype = torch.ones(8), torch.zeros(8).long()

        def broken(coord, atype):
            (coord * 2).sum()
            raise NotImplementedError("half-way")

        with pytest.raises(NotImplementedError):
            torch.fx.experimental.proxy_tensor.make_fx(broken)(coord, atype)
        assert coord.sum() == 8 and atype.sum() == 0
        assert bare([coord, atype]) == 8 * 4 + 8 * 8
        del coord, atype, broken
    assert live_bytes() == before
