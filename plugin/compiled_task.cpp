// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/compiled_task.h>

#include <utility>

namespace deepmd_prewarm {

CompiledTask::CompiledTask(std::string name,
                           std::shared_ptr<TaskBackend> backend)
    : name_(std::move(name)), backend_(std::move(backend)) {
  TORCH_CHECK_VALUE(!name_.empty(),
                    "CompiledTask: expected a name, got ''. Name the task as "
                    "your configuration does.");
  TORCH_INTERNAL_ASSERT(backend_);
}

c10::intrusive_ptr<CompiledTask> CompiledTask::from_script(
    std::string name, const torch::jit::Module& module, std::string method) {
  return c10::make_intrusive<CompiledTask>(
      std::move(name),
      script_backend(module, std::move(method), /*owns=*/false));
}

c10::intrusive_ptr<CompiledTask> CompiledTask::from_package(
    std::string name, const std::string& path) {
  return c10::make_intrusive<CompiledTask>(std::move(name),
                                           package_backend(path));
}

c10::intrusive_ptr<CompiledTask> CompiledTask::from_function(
    std::string name,
    TaskFunction function,
    const std::vector<at::Tensor>& state) {
  return c10::make_intrusive<CompiledTask>(
      std::move(name), function_backend(std::move(function), state));
}

std::string CompiledTask::name() const { return name_; }

std::string CompiledTask::backend() const {
  const auto backend = backend_if_open();
  return backend ? backend->kind() : "closed";
}

bool CompiledTask::is_warm() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return warm_ && backend_ && backend_->is_open();
}

c10::Dict<std::string, double> CompiledTask::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  c10::Dict<std::string, double> stats;
  stats.insert("runs", static_cast<double>(runs_));
  stats.insert("failures", static_cast<double>(failures_));
  stats.insert("eager_runs", static_cast<double>(eager_runs_));
  stats.insert("forward_s", forward_s_);
  stats.insert("backward_s", backward_s_);
  stats.insert("covers_training", covers_training_ ? 1. : 0.);
  return stats;
}

void CompiledTask::close() {
  std::shared_ptr<TaskBackend> backend;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    backend = std::exchange(backend_, nullptr);
  }
  // Outside the lock: dropping a callable may run code that asks this handle.
  if (backend) {
    backend->close();
  }
}

std::shared_ptr<TaskBackend> CompiledTask::open_backend() const {
  auto backend = backend_if_open();
  TORCH_CHECK(backend, "warmup_compiled: expected an open handle, got task '",
              name_, "' after close(). Make a new CompiledTask.");
  return backend;
}

std::shared_ptr<TaskBackend> CompiledTask::backend_if_open() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return backend_ && backend_->is_open() ? backend_ : nullptr;
}

void CompiledTask::record(const WarmRun& run) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++runs_;
  forward_s_ += run.forward_s;
  backward_s_ += run.backward_s;
  warm_ = run.eager_reason.empty();
  eager_runs_ += warm_ ? 0 : 1;
  covers_training_ = covers_training_ || (warm_ && run.covers_training);
}

void CompiledTask::record_failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++failures_;
  warm_ = false;
}

}  // namespace deepmd_prewarm
