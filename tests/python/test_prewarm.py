# SPDX-License-Identifier: LGPL-3.0-or-later
"""prewarm() in one process: what it takes, what it puts back, what it frees."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import logging
import weakref

import pytest
import torch
from deepmd_prewarm.compile_counters import CompileMeter
from deepmd_prewarm.prewarm import PrewarmTask
from deepmd_prewarm.prewarm import prewarm as real_prewarm


def prewarm(tasks, **options):
    return real_prewarm(tasks, **{"progress": False, **options})


@pytest.fixture(autouse=True)
def clean_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, **{"backend": "aot_eager", **options})


def a_model(width=3, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Tanh()
    )


X = torch.ones(4, 3)

# -- what it takes ---------------------------------------------------------------


def test_five_lines_are_enough():
    models = {"a": compiled(a_model(3)), "b": compiled(a_model(5))}
    report = prewarm(
        {
            "a": (models["a"], [torch.randn(4, 3)]),
            "b": (models["b"], [torch.randn(4, 5)]),
        }
    )
    watch = report.watch()
    for name, width in (("a", 3), ("b", 5)):
        models[name](torch.randn(4, width)).sum().backward()
    assert watch.finish() == 0
    assert report.compiled_after_start == 0
    assert [task.name for task in report.ranks[0].tasks] == ["a", "b"]


@dataclasses.dataclass
class Result:
    energy: torch.Tensor
    note: str


@pytest.mark.parametrize(
    ("args", "kwargs", "sample"),
    [
        ((X,), {}, (X,)),
        ((X,), {}, X),
        ((), {"coord": X}, {"coord": X}),
        ((), {"coord": X}, ((), {"coord": X})),
        ((X,), {"scale": 2.0}, ((X,), {"scale": 2.0})),
        (({"nested": [X]},), {}, ({"nested": [X]},)),
    ],
    ids=["tuple", "tensor", "dict", "pair", "both", "nested"],
)
def test_a_sample_is_warmed_as_training_will_call_it(args, kwargs, sample):
    model = a_model()

    def call(coord, scale=1.0):
        x = coord["nested"][0] if isinstance(coord, dict) else coord
        return model(x).sum() * scale

    task = PrewarmTask("a", compiled(call), [sample])
    record = prewarm([task]).task("a")
    assert (record.graphs_forward, record.graphs_backward) == (1, 1)
    assert record.covers_training and not record.eager
    meter = CompileMeter().start()
    task.fn(*args, **kwargs).backward()
    assert meter.stop().total == 0


@pytest.mark.parametrize("wrap", [dict, Result, tuple])
def test_any_result_that_holds_tensors_can_be_warmed(wrap):
    model = a_model()

    def call(coord):
        energy = model(coord).sum()
        if wrap is tuple:
            return (None, "text", [energy])
        return wrap(energy=energy, note="text")

    task = PrewarmTask("a", compiled(call), [(X,)])
    record = prewarm([task]).task("a")
    assert (record.graphs_forward, record.graphs_backward) == (1, 1)
    result = task.fn(X)
    meter = CompileMeter().start()
    energy = (
        result[2][0]
        if wrap is tuple
        else result["energy"]
        if wrap is dict
        else result.energy
    )
    energy.backward()
    assert meter.stop().total == 0


def test_inputs_are_handed_on_with_strides_and_requires_grad():
    seen = []
    sample = torch.randn(3, 4).t().requires_grad_()

    def call(x):
        seen.append((x is sample, x.stride(), x.requires_grad))
        return x.sum()

    prewarm({"a": (call, [(sample,)])})
    assert seen == [(True, (1, 4), True)]
    assert sample.grad is None


def test_a_plain_module_runs_eager_and_the_report_says_so():
    report = prewarm({"a": (a_model(), [(X,)])})
    record = report.task("a")
    assert record.graphs_forward == record.graphs_backward == 0
    assert record.compile_s == record.load_s == 0.0
    assert record.eager and record.covers_training
    assert report.warnings() == ["not compiled, runs in eager mode: a"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_train_and_eval_handles_leave_nothing_to_compile(dynamic):
    model = a_model()
    # dynamic=True leaves a mark on the tensor: not the one that others use.
    sample = X.clone()
    call = compiled(model, dynamic=dynamic)

    def evaluation(x):
        model.eval()
        try:
            with torch.no_grad():
                return call(x)
        finally:
            model.train()

    report = prewarm(
        [
            PrewarmTask("train", call, [(sample,)]),
            PrewarmTask("eval", evaluation, [(sample,)], mode="eval"),
        ]
    )
    assert report.task("train").graphs_forward == 1
    assert report.task("eval").graphs_forward == 1
    assert report.task("eval").graphs_backward == 0
    assert model.training
    watch = report.watch()
    call(sample).sum().backward()
    evaluation(sample)
    assert watch.finish() == 0


def test_each_shape_class_is_warmed_and_a_missing_one_is_counted_later():
    call = compiled(a_model(), dynamic=False)
    report = prewarm({"a": (call, lambda: [(torch.ones(n, 3),) for n in (2, 7)])})
    assert report.task("a").samples == 2
    watch = report.watch()
    call(torch.ones(2, 3)).sum().backward()
    call(torch.ones(7, 3)).sum().backward()
    assert watch.counts().total == 0
    call(torch.ones(9, 3)).sum().backward()  # no sample covered this
    assert watch.finish() == 2
    assert watch.counts().backward == 1
    assert report.compiled_after_start == 2
    assert "2 graphs compiled after step 1" in report.warnings()[0]


def test_only_the_named_tasks_are_warmed():
    called = []
    tasks = [
        PrewarmTask(name, lambda x, name=name: called.append(name) or x.sum(), [(X,)])
        for name in "abc"
    ]
    report = prewarm(tasks, only=["c", "a"])
    assert called == ["a", "c"]
    assert [task.name for task in report.ranks[0].tasks] == ["a", "c"]


def test_a_train_task_warmed_without_gradients_is_reported(caplog):
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        report = prewarm({"a": (compiled(a_model()), [(X,)])})
    assert not report.task("a").covers_training
    assert "without gradients" in caplog.text


# -- a graph that two tasks share ------------------------------------------------


def test_a_shared_graph_is_told_by_its_digest_or_by_compiling_nothing():
    call = compiled(a_model())
    report = prewarm(
        [
            PrewarmTask("a", call, [(X,)], graph=lambda: "digest"),
            PrewarmTask("b", compiled(a_model(4)), [(torch.ones(2, 4),)]),
            PrewarmTask(
                "c", compiled(a_model(5)), [(torch.ones(2, 5),)], graph="digest"
            ),
            PrewarmTask("d", call, [(X,)]),
        ]
    )
    told = [(task.source, task.graph) for task in report.ranks[0].tasks]
    assert told == [
        ("compiled", "digest"),
        ("compiled", None),
        ("shared", "digest"),
        ("shared", None),
    ]


def test_a_compiled_function_in_a_closure_is_shared_and_not_eager():
    function = compiled(a_model())

    def first(x):
        return function(x).sum()

    def second(x):
        return first(x) * 2

    report = prewarm({"a": (first, [(X,)]), "b": (second, [(X,)])})
    assert [t.source for t in report.ranks[0].tasks] == ["compiled", "shared"]
    assert not report.task("b").eager


def test_beyond_the_recompile_limit_a_task_is_reported_as_eager(caplog):
    """Field case B6: torch falls back to eager mode in silence."""

    class Task(torch.nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind
            self.inner = torch.nn.Linear(3, 1)

        def forward(self, x):
            return self.inner(x) if self.kind else x

    models = [Task(f"kind {n}") for n in range(12)]
    with torch._dynamo.config.patch(recompile_limit=8):
        report = prewarm({m.kind: (compiled(m, dynamic=False), [(X,)]) for m in models})
    eager = [task.eager for task in report.ranks[0].tasks]
    assert eager == [False] * 8 + [True] * 4
    assert any("kind 11" in said for said in report.warnings())


def test_tasks_with_one_head_and_different_buffers_each_keep_their_own_result():
    """Field case A2: also when a new model gets the id of a deleted one."""

    class Task(torch.nn.Module):
        def __init__(self, head, mean):
            super().__init__()
            self.head = head
            self.register_buffer("mean", torch.full((3,), mean))

        def forward(self, x):
            return self.head(x - self.mean)

    head = torch.nn.Linear(3, 1)
    ids = set()
    reused = False
    first = Task(head, 0.5)
    calls = {"first": compiled(first)}
    prewarm({"first": (calls["first"], [(X,)])})
    for mean in range(1, 30):
        # The allocator gives a freed address back sooner or later.
        made = [Task.__new__(Task)]
        while ids and id(made[-1]) not in ids and len(made) < 100_000:
            made.append(Task.__new__(Task))
        task = made.pop()
        del made
        task.__init__(head, float(mean))
        reused = reused or id(task) in ids
        ids.add(id(task))
        call = compiled(task)
        prewarm({f"task {mean}": (call, [(X,)])})
        torch.testing.assert_close(call(X), task(X))
        torch.testing.assert_close(calls["first"](X), first(X))
        del task, call
        torch._dynamo.reset()
        gc.collect()
        if reused:
            break
    assert reused


# -- what it puts back -----------------------------------------------------------


def test_parameters_gradients_buffers_and_modes_are_as_before():
    model = a_model()
    model[0].weight.grad = torch.full((3, 3), 7.0)
    before = copy.deepcopy(model.state_dict())
    keys = list(model.state_dict())
    call = compiled(model)
    prewarm({"a": (call, [(X,)])})
    assert list(model.state_dict()) == keys
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(model[0].weight.grad, torch.full((3, 3), 7.0))
    assert model[0].bias.grad is None
    assert model.training and torch.is_grad_enabled()


def test_training_after_prewarming_is_bitwise_the_same():
    def trained(warm):
        torch._dynamo.reset()
        model = torch.nn.Sequential(a_model(), torch.nn.Dropout(0.5))
        call = compiled(model)
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(42)
        if warm:
            prewarm({"a": (call, lambda: [(torch.randn(4, 3),)])})
        for _ in range(4):
            optimizer.zero_grad()
            call(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        return model.state_dict()

    with_it, without = trained(True), trained(False)
    for name, value in without.items():
        assert torch.equal(value, with_it[name]), name


def test_hooks_see_task_and_record_also_when_the_task_fails():
    seen = []

    def before(task, record):
        seen.append(("before", task.name, record.name))

    def after(task, record):
        record.trace_s = 1.5
        record.bytes_released += 100
        seen.append(("after", task.name, record.samples))

    good = {"a": (lambda x: x.sum(), [(X,)])}
    report = prewarm(good, before_task=before, after_task=after)
    assert seen == [("before", "a", "a"), ("after", "a", 1)]
    assert report.task("a").trace_s == 1.5
    assert report.task("a").bytes_released == 100
    seen.clear()

    def broken(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prewarm({"a": (broken, [(X,)])}, before_task=before, after_task=after)
    assert [what for what, *_ in seen] == ["before", "after"]


def test_a_failing_hook_is_an_error_of_its_task():
    def before(task, record):
        raise LookupError("no rewind")

    with pytest.raises(LookupError, match="no rewind") as caught:
        prewarm({"a": (lambda x: x.sum(), [(X,)])}, before_task=before)
    if hasattr(caught.value, "__notes__"):
        assert any("task 'a' on rank 0" in note for note in caught.value.__notes__)


# -- what it frees ---------------------------------------------------------------


def test_samples_made_on_the_task_s_turn_are_gone_and_counted():
    alive = []
    large = 1_000_000

    def samples():
        for _ in range(2):
            made = torch.randn(large // 4)
            alive.append(weakref.ref(made))
            yield (made,)
            del made

    report = prewarm({"a": (lambda x: x.sum(), samples)})
    assert [ref() for ref in alive] == [None, None]
    assert report.task("a").bytes_released == 2 * large


def test_samples_that_something_else_holds_stay_as_they_are():
    data_set = torch.arange(12.0).reshape(4, 3)
    kept = []

    def samples():
        whole = data_set.clone()
        kept.append(whole)
        yield (data_set[1:],)  # a view of live data
        yield (whole,)

    given = [(torch.ones(4, 3),)]
    report = prewarm(
        {"lazy": (lambda x: x.sum(), samples), "given": (lambda x: x.sum(), given)}
    )
    assert torch.equal(data_set, torch.arange(12.0).reshape(4, 3))
    assert torch.equal(kept[0], data_set)
    assert torch.equal(given[0][0], torch.ones(4, 3))
    assert report.task("lazy").bytes_released == 0
    assert report.task("given").bytes_released == 0


def test_twenty_failing_tasks_leave_nothing_alive():
    """Field case A7: the trace function raises half-way."""
    alive = []

    def samples():
        made = torch.randn(100_000)
        alive.append(weakref.ref(made))
        yield (made,)

    def broken(x):
        y = x * 2
        alive.append(weakref.ref(y))
        raise ValueError("half-way")

    for _ in range(20):
        with pytest.raises(ValueError, match="half-way"):
            prewarm({"a": (broken, samples)})
    gc.collect()
    assert len(alive) == 40
    assert [ref for ref in alive if ref() is not None] == []


def test_a_disabled_garbage_collector_stays_out_of_it():
    collected = []
    gc.callbacks.append(lambda phase, info: collected.append(phase))
    gc.disable()
    try:
        prewarm({"a": (lambda x: x.sum(), [(X,)])})
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.callbacks.pop()
    assert collected == []


def test_models_are_not_kept_alive():
    model = a_model()
    report = prewarm({"a": (compiled(model), [(X,)])})
    gone = weakref.ref(model)
    torch._dynamo.reset()
    del model
    gc.collect()
    assert gone() is None
    assert report.task("a").samples == 1


# -- what it says ----------------------------------------------------------------


def call(x):
    return x.sum()


@pytest.mark.parametrize(
    ("tasks", "options", "kind", "said"),
    [
        ([], {}, ValueError, "at least one task, got none"),
        ({}, {}, ValueError, "at least one task, got none"),
        ({"": (call, [X])}, {}, ValueError, "have a name"),
        (
            [PrewarmTask("a", call, [X]), PrewarmTask("a", call, [X])],
            {},
            ValueError,
            "different task names, got 'a' 2 times",
        ),
        ({"a": (call, [])}, {}, ValueError, "at least one sample for task 'a'"),
        ({"a": (call, list)}, {}, ValueError, "at least one sample for task 'a'"),
        ({"a": (call, X)}, {}, TypeError, "samples of task 'a' to be a list"),
        ({"a": (call, [[X]])}, {}, TypeError, r"got list. A single .* \(x,\)"),
        ({"a": (call, [3])}, {}, TypeError, "got int"),
        ({"a": (3, [X])}, {}, TypeError, "fn of task 'a' to be callable, got int"),
        ({"a": call}, {}, TypeError, r"\(fn, samples\) below a name"),
        ([call], {}, TypeError, "expected a PrewarmTask"),
        (call, {}, TypeError, "a list of PrewarmTask or a mapping"),
        (
            [PrewarmTask("a", call, [X], mode="both")],
            {},
            ValueError,
            "mode 'train' or 'eval' of task 'a', got 'both'",
        ),
        (
            {"a": (call, [X])},
            {"only": ["b"]},
            ValueError,
            "only to name tasks among a, got b",
        ),
        ({"a": (call, [X])}, {"only": []}, ValueError, "got none"),
        ({"a": (call, [X])}, {"group": "0"}, TypeError, "ProcessGroup"),
        ({"a": (lambda x: "text", [X])}, {}, TypeError, "return a tensor"),
    ],
)
def test_bad_input_is_named_with_what_was_expected(tasks, options, kind, said):
    with pytest.raises(kind, match=said):
        prewarm(tasks, **options)


def test_an_error_in_the_middle_puts_everything_back():
    model = a_model()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()

    def broken(x):
        model(x + torch.rand(4, 3))
        raise ArithmeticError("no convergence")

    with pytest.raises(ArithmeticError, match="no convergence"):
        prewarm({"a": (compiled(model), [(X,)]), "b": (broken, lambda: [(X,)])})
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_report_folder_gets_json_and_picture_and_both_again_at_the_end(tmp_path):
    task = compiled(a_model(), dynamic=False)
    report = prewarm({"a": (task, [(X,)])}, report_dir=tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "prewarm.json").read_text())
    assert saved["compiled_after_start"] is None
    assert (tmp_path / "out" / "prewarm.png").stat().st_size > 10_000
    watch = report.watch()
    task(torch.ones(2, 3)).sum().backward()
    watch.finish()
    saved = json.loads((tmp_path / "out" / "prewarm.json").read_text())
    assert saved["compiled_after_start"] == 2
    assert saved["ranks"][0]["compiled_after_start"] == 2


def test_lines_go_to_stderr_where_it_is_no_terminal(capsys):
    real_prewarm({"[b]a": (call, [X]), "b": (call, [X])})
    lines = capsys.readouterr()
    assert lines.out == ""
    assert "prewarm 1/2 '[b]a': compiling" in lines.err
    assert "prewarm 2/2 'b': " in lines.err
    real_prewarm({"a": (call, [X])}, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_shown_on_a_terminal(monkeypatch):
    import io

    from deepmd_prewarm import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    real_prewarm({"[b]a": (call, [X]), "b": (call, [X])})
    shown = screen.getvalue()
    assert "1/2" in shown and "2/2" in shown
    assert "[b]a: compiling" in shown
    assert "prewarm 'b':" in shown
