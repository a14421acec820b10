// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cxxabi.h>
#include <deepmd_prewarm/ops/warmup_compiled.h>
#include <deepmd_prewarm/plugin/discarded_backward.h>
#include <deepmd_prewarm/plugin/python_gate.h>
#include <deepmd_prewarm/plugin/side_effect_guard.h>

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
std::recursive_mutex& one_at_a_time() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Tensors as_vector(const c10::List<std::optional<at::Tensor>>& inputs) {
  Tensors tensors;
  tensors.reserve(inputs.size());
  for (const std::optional<at::Tensor> input : inputs) {
    tensors.push_back(input.value_or(at::Tensor()));
  }
  return tensors;
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

// One forward and backward; the outputs are gone when it returns.
WarmRun run_once(TaskBackend& backend,
                 const std::string& name,
                 const Tensors& inputs,
                 bool backward,
                 std::unordered_set<c10::Device>& devices) {
  WarmRun run;
  const bool training_modes =
      c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  const GraphMark mark;
  const Tensors samples = cut_graph(inputs);
  auto start = Clock::now();
  const Tensors outputs = backend.run(samples);
  run.forward_s = seconds_since(start);
  TORCH_CHECK_TYPE(
      !outputs.empty(), "warmup_compiled: expected the callable of task '",
      name,
      "' to return a tensor or a structure with tensors, got none. "
      "Return the loss or the model's outputs.");
  add_devices(outputs, devices);
  if (backward) {
    start = Clock::now();
    run.covers_training =
        discarded_backward(outputs, samples, mark) && training_modes;
    run.backward_s = seconds_since(start);
  }
  return run;
}

}  // namespace

void warmup_compiled(const c10::intrusive_ptr<CompiledTask>& task,
                     const c10::List<std::optional<at::Tensor>>& inputs,
                     bool backward) {
  TORCH_CHECK_VALUE(task,
                    "warmup_compiled: expected a CompiledTask, got none. Make "
                    "one with CompiledTask.from_callable or from_script.");
  const OutsidePython no_interpreter_lock;
  const auto backend = task->open_backend();
  const std::lock_guard<std::recursive_mutex> lock(one_at_a_time());

  const Tensors samples = as_vector(inputs);
  const Tensors state = backend->state();
  std::unordered_set<c10::Device> devices;
  add_devices(samples, devices);
  add_devices(state, devices);

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
      error = std::current_exception();
    }
    if (put_back_rest) {
      put_back_rest();
    }
    guard.put_back();
  }
  // Autocast keeps casts of the weights, and these the graph of this run.
  at::autocast::clear_cache();
  for (const auto& device : devices) {
    c10::impl::VirtualGuardImpl(device.type())
        .synchronizeDevice(device.index());
  }
  if (error) {
    task->record_failure();
    backend->rethrow(task->name(), std::move(error));
  }
  if (!run.eager_reason.empty()) {
    TORCH_WARN("warmup_compiled: task '", task->name(),
               "' ran eagerly, not compiled: ", run.eager_reason);
  }
  task->record(run);
}

}  // namespace deepmd_prewarm
