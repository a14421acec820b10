// SPDX-License-Identifier: LGPL-3.0-or-later
// torch.classes.deepmd.CompiledTask: one handle for whatever a trainer
// compiled, so that operators, TorchScript and C++ can name it.
#pragma once

#include <ATen/core/Dict.h>
#include <deepmd_prewarm/plugin/export.h>
#include <deepmd_prewarm/plugin/task_backend.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace deepmd_prewarm {

/// What one warm-up run showed.
struct WarmRun {
  double forward_s = 0;
  double backward_s = 0;
  /// Forward with grad mode on, and a backward: nothing is left to compile at
  /// the first training step of this shape.
  bool covers_training = false;
  /// Why compiled code was not used; empty when it was.
  std::string eager_reason;
};

/// A handle on one compiled callable. Thread-safe. Modules are held weakly:
/// whoever trains keeps them.
class DEEPMD_PREWARM_API CompiledTask : public torch::CustomClassHolder {
 public:
  /// ValueError if `name` is empty.
  CompiledTask(std::string name, std::shared_ptr<TaskBackend> backend);

  /// A handle on `method` of a TorchScript module, which is held weakly.
  static c10::intrusive_ptr<CompiledTask> from_script(
      std::string name,
      const torch::jit::Module& module,
      std::string method = "forward");

  /// A handle on an AOTInductor package (`.pt2`); its warm-up is inference.
  /// ValueError if it is missing, damaged or does not fit this torch.
  static c10::intrusive_ptr<CompiledTask> from_package(std::string name,
                                                       const std::string& path);

  /// A handle on a C++ callable. `state`: the parameters and buffers it uses
  /// (held weakly), so that their values and `.grad` are put back.
  static c10::intrusive_ptr<CompiledTask> from_function(
      std::string name,
      TaskFunction function,
      const std::vector<at::Tensor>& state = {});

  /// The task's name, as errors and reports show it.
  std::string name() const;

  /// "python", "torchscript", "package" or "function"; "closed" after close().
  std::string backend() const;

  /// True if the last warm-up run succeeded and used compiled code as far as
  /// can be told, and the handle is open. See `covers_training` in stats().
  bool is_warm() const;

  /// runs, failures, eager_runs (fell back to eager), forward_s and backward_s
  /// (seconds, summed over runs), covers_training (1 if a run had grad mode on
  /// and a backward, else 0). Readable after close().
  c10::Dict<std::string, double> stats() const;

  /// Lets the callable go; idempotent. A later warm-up is an error.
  void close();

  /// The open backend; RuntimeError after close().
  std::shared_ptr<TaskBackend> open_backend() const;

  /// The same, null after close().
  std::shared_ptr<TaskBackend> backend_if_open() const;

  /// Counts a run that succeeded, and one that raised.
  void record(const WarmRun& run);
  void record_failure();

 private:
  const std::string name_;
  mutable std::mutex mutex_;  // guards everything below
  std::shared_ptr<TaskBackend> backend_;
  int64_t runs_ = 0;
  int64_t failures_ = 0;
  int64_t eager_runs_ = 0;
  double forward_s_ = 0;
  double backward_s_ = 0;
  bool covers_training_ = false;
  bool warm_ = false;
};

}  // namespace deepmd_prewarm
