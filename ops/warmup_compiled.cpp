// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cxxabi.h>
#include <deepmd_prewarm/ops/warmup_compiled.h>
#include <deepmd_prewarm/plugin/discarded_backward.h>
#include <deepmd_prewarm/plugin/graph_capture.h>
#include <deepmd_prewarm/plugin/python_gate.h>
#include <deepmd_prewarm/plugin/side_effect_guard.h>
#include <deepmd_prewarm/plugin/wait_hooks.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

namespace deepmd_prewarm {
namespace {

using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;

// Random streams and buffers belong to the process: two overlapping warm-ups
// would put back each other's half-way state. Recursive, because a callable or
// an autograd hook may itself warm another task.
std::unique_lock<std::recursive_timed_mutex> wait_for_turn() {
  static auto* mutex = new std::recursive_timed_mutex;
  std::unique_lock<std::recursive_timed_mutex> turn(*mutex, std::defer_lock);
  while (!turn.try_lock_for(std::chrono::milliseconds(100))) {
    check_interrupt();
  }
  return turn;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void add_devices(const Tensors& tensors,
                 std::unordered_set<c10::Device>& devices) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() &&
        at::accelerator::isAccelerator(tensor.device().type())) {
      devices.insert(tensor.device());
    }
  }
}

void synchronize(const std::unordered_set<c10::Device>& devices) {
  for (const auto& device : devices) {
    c10::impl::VirtualGuardImpl(device.type())
        .synchronizeDevice(device.index());
  }
}

// One forward and backward; the outputs are gone when it returns.
WarmRun run_once(TaskBackend& backend,
                 const std::string& name,
                 const Tensors& inputs,
                 bool backward,
                 std::unordered_set<c10::Device>& devices) {
  // Ranges for profilers; NVTX ranges under emit_nvtx().
  RECORD_USER_SCOPE(c10::str("deepmd_prewarm::warmup ", name));
  WarmRun run;
  const bool training_modes =
      c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  const GraphMark mark;
  const Tensors samples = cut_graph(inputs);
  auto start = Clock::now();
  Tensors outputs;
  {
    RECORD_USER_SCOPE("deepmd_prewarm::forward");
    outputs = backend.run(samples);
  }
  run.forward_s = seconds_since(start);
  TORCH_CHECK_TYPE(
      !outputs.empty(), "warmup_compiled: expected the callable of task '",
      name,
      "' to return a tensor or a structure with tensors, got none. "
      "Return the loss or the model's outputs.");
  add_devices(outputs, devices);
  if (backward) {
    RECORD_USER_SCOPE("deepmd_prewarm::backward");
    start = Clock::now();
    run.covers_training =
        discarded_backward(outputs, samples, mark) && training_modes;
    run.backward_s = seconds_since(start);
  }
  return run;
}

void warm_up(const c10::intrusive_ptr<CompiledTask>& task,
             const Tensors& samples,
             bool backward) {
  TORCH_CHECK_VALUE(task,
                    "warmup_compiled: expected a CompiledTask, got none. Make "
                    "one with CompiledTask.from_callable or from_script.");
  const OutsidePython no_interpreter_lock;
  const auto backend = task->open_backend();
  const auto turn = wait_for_turn();

  const Tensors state = backend->state();
  std::unordered_set<c10::Device> devices;
  add_devices(samples, devices);
  add_devices(state, devices);
  for (const auto& device : devices) {
    TORCH_CHECK(!is_capturing(device),
                "warmup_compiled: expected no CUDA graph capture on ", device,
                " while task '", task->name(),
                "' warms up, got one. Warm up before the capture.");
  }

  std::exception_ptr error;
  WarmRun run;
  {
    SideEffectGuard guard(state, samples);
    const auto put_back_rest = backend->remember();
    try {
      run = run_once(*backend, task->name(), samples, backward, devices);
      run.eager_reason = backend->eager_reason();
    } catch (const abi::__forced_unwind&) {
      throw;  // this thread is being ended; swallowing that aborts the process
    } catch (...) {
      error = backend->explain(task->name(), std::current_exception());
    }
    // Before values are put back, so that no other stream writes them after.
    try {
      synchronize(devices);
    } catch (const c10::Error&) {
      error = error ? error : std::current_exception();
    }
    if (put_back_rest) {
      put_back_rest();
    }
    guard.put_back();
  }
  // Autocast keeps casts of the weights, and these the graph of this run.
  at::autocast::clear_cache();
  if (error) {
    task->record_failure();
    std::rethrow_exception(error);
  }
  task->record(run);
  if (!run.eager_reason.empty()) {
    backend->warn_eager(task->name(), run.eager_reason);
  }
}

}  // namespace

void warmup_compiled(const c10::intrusive_ptr<CompiledTask>& task,
                     const c10::List<std::optional<at::Tensor>>& inputs,
                     bool backward) {
  Tensors samples;
  for (size_t i = 0; i < inputs.size(); ++i) {
    samples.push_back(inputs.get(i).value_or(at::Tensor()));
  }
  warm_up(task, samples, backward);
}

void warmup_compiled_list(const c10::intrusive_ptr<CompiledTask>& task,
                          const c10::List<at::Tensor>& inputs,
                          bool backward) {
  warm_up(task, inputs.vec(), backward);
}

}  // namespace deepmd_prewarm
