// SPDX-License-Identifier: LGPL-3.0-or-later
// What a CompiledTask runs: one interface, one class for each kind of callable.
// The Python callable lives in python_bridge.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <deepmd_prewarm/plugin/export.h>
#include <torch/csrc/jit/api/module.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace deepmd_prewarm {

/// A compiled callable as C++ sees it: takes the sample inputs (an undefined
/// tensor stands for None), returns every tensor of its result.
using TaskFunction =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// One kind of callable. Every method may be called from any thread; none may
/// expect the interpreter lock to be held or free.
class DEEPMD_PREWARM_API TaskBackend {
 public:
  virtual ~TaskBackend();

  /// "python", "torchscript", "package" or "function".
  virtual std::string kind() const = 0;

  /// Runs the callable once, in the grad, inference and autocast mode of the
  /// calling thread. Returns the tensors of its result, in order.
  virtual std::vector<at::Tensor> run(
      const std::vector<at::Tensor>& inputs) = 0;

  /// Parameters and buffers that a run may write to. Values and `.grad` of
  /// these are put back.
  virtual std::vector<at::Tensor> state();

  /// Remembers what only this backend can see (Python's random streams, which
  /// tensor a buffer name stands for); calling the result puts it back. An
  /// empty function: nothing to put back.
  virtual std::function<void()> remember();

  /// Why the last run did not use compiled code; empty when it did, or when
  /// that cannot be told.
  virtual std::string eager_reason();

  /// Tells the user that a run of `task` was not compiled, and why.
  virtual void warn_eager(const std::string& task, const std::string& reason);

  /// The TorchScript module and method that a handle is pickled with; nothing
  /// for a callable that cannot leave its process.
  virtual std::optional<std::pair<torch::jit::Module, std::string>> portable();

  /// `error` with its type kept, `task` named, and the outputs of the run that
  /// it holds let go. Called at once where the run ended.
  virtual std::exception_ptr explain(const std::string& task,
                                     std::exception_ptr error);

  /// False once the callable was let go: by close(), or at the end of the
  /// interpreter that it needs.
  virtual bool is_open() const = 0;

  /// Lets the callable go. Never blocks, never throws; a run in another thread
  /// keeps what it needs.
  virtual void close() noexcept = 0;
};

/// A TorchScript module, held weakly unless `owns`.
DEEPMD_PREWARM_API std::shared_ptr<TaskBackend> script_backend(
    const torch::jit::Module& module, std::string method, bool owns);

/// An AOTInductor package (`.pt2`), which runs inference. ValueError if it is
/// missing, damaged or does not fit this torch or device.
DEEPMD_PREWARM_API std::shared_ptr<TaskBackend> package_backend(
    const std::string& path);

/// A C++ callable. `state` (parameters, buffers) is held weakly.
DEEPMD_PREWARM_API std::shared_ptr<TaskBackend> function_backend(
    TaskFunction function, const std::vector<at::Tensor>& state);

}  // namespace deepmd_prewarm
