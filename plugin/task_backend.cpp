// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/task_backend.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

#include <mutex>
#include <new>
#include <stdexcept>
#include <typeinfo>
#include <utility>

namespace deepmd_prewarm {
namespace {

// Every tensor in a TorchScript value, in order.
void collect_tensors(const c10::IValue& value, std::vector<at::Tensor>& out) {
  value.visit([&out](const c10::IValue& part) {
    if (part.isTensor()) {
      if (part.toTensor().defined()) {
        out.push_back(part.toTensor());
      }
      return true;
    }
    return false;
  });
}

class ScriptBackend final : public TaskBackend {
 public:
  ScriptBackend(const torch::jit::Module& module, std::string method, bool owns)
      : weak_(module._ivalue()),
        method_(std::move(method)),
        class_name_(module.type()->name()->name()) {
    TORCH_CHECK_VALUE(module.find_method(method_),
                      "CompiledTask: expected a method of ", class_name_,
                      ", got '", method_, "'. Name a scripted method.");
    if (owns) {
      owned_ = module._ivalue();
    }
  }

  std::string kind() const override { return "torchscript"; }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override {
    std::vector<c10::IValue> stack;
    stack.reserve(inputs.size());
    for (const auto& input : inputs) {
      stack.emplace_back(input.defined() ? c10::IValue(input) : c10::IValue());
    }
    std::vector<at::Tensor> outputs;
    collect_tensors(module().get_method(method_)(std::move(stack)), outputs);
    return outputs;
  }

  std::vector<at::Tensor> state() override {
    std::vector<at::Tensor> tensors;
    if (!is_alive()) {
      return tensors;  // run() says so
    }
    for (const auto& submodule : module().modules()) {
      for (const auto& slot : slots_of(submodule)) {
        if (slot.isTensor() && slot.toTensor().defined()) {
          tensors.push_back(slot.toTensor());
        }
      }
    }
    return tensors;
  }

  std::function<void()> remember() override {
    // Slots, not only tensors: `self.count += 1` puts a new value there.
    if (!is_alive()) {
      return nullptr;
    }
    std::vector<std::pair<torch::jit::ObjectPtr, std::vector<c10::IValue>>> all;
    for (const auto& submodule : module().modules()) {
      all.emplace_back(submodule._ivalue(), slots_of(submodule));
    }
    return [all = std::move(all)] {
      for (const auto& [object, slots] : all) {
        for (size_t i = 0; i < slots.size(); ++i) {
          if (!slots[i].isModule() && !object->getSlot(i).is(slots[i])) {
            object->setSlot(i, slots[i]);
          }
        }
      }
    };
  }

  std::optional<std::pair<torch::jit::Module, std::string>> portable()
      override {
    if (!is_alive()) {
      return std::nullopt;
    }
    return std::make_pair(module(), method_);
  }

  bool is_open() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_;
  }

  void close() noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
    owned_.reset();
    weak_.reset();
  }

 private:
  static std::vector<c10::IValue> slots_of(const torch::jit::Module& module) {
    const auto object = module._ivalue();
    std::vector<c10::IValue> slots;
    for (size_t i = 0; i < object->type()->numAttributes(); ++i) {
      slots.push_back(object->getSlot(i));
    }
    return slots;
  }

  bool is_alive() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return weak_.lock() != nullptr;
  }

  torch::jit::Module module() {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto object = weak_.lock();
    TORCH_CHECK(object, "warmup_compiled: expected the module (", class_name_,
                ") to be alive, but it was deleted. Handles hold modules "
                "weakly: keep the module until training starts.");
    return torch::jit::Module(std::move(object));
  }

  mutable std::mutex mutex_;  // guards the three below
  bool open_ = true;
  c10::weak_intrusive_ptr<c10::ivalue::Object> weak_;
  torch::jit::ObjectPtr owned_;
  const std::string method_;
  const std::string class_name_;
};

class FunctionBackend final : public TaskBackend {
 public:
  FunctionBackend(TaskFunction function, const std::vector<at::Tensor>& state)
      : function_(std::make_shared<TaskFunction>(std::move(function))) {
    TORCH_CHECK_VALUE(*function_,
                      "CompiledTask: expected a callable, got an empty "
                      "std::function. Pass a lambda.");
    for (const auto& tensor : state) {
      if (tensor.defined()) {
        state_.emplace_back(tensor.getIntrusivePtr());
      }
    }
  }

  std::string kind() const override { return "function"; }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override {
    const auto function = held();
    TORCH_CHECK(function, "warmup_compiled: the handle was closed meanwhile");
    return (*function)(inputs);
  }

  std::vector<at::Tensor> state() override {
    std::vector<at::Tensor> tensors;
    for (const auto& weak : state_) {
      if (auto strong = weak.lock()) {
        tensors.emplace_back(std::move(strong));
      }
    }
    return tensors;
  }

  bool is_open() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return function_ != nullptr;
  }

  void close() noexcept override {
    std::shared_ptr<TaskFunction> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(function_);
  }

 private:
  std::shared_ptr<TaskFunction> held() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return function_;
  }

  mutable std::mutex mutex_;  // guards function_
  std::shared_ptr<TaskFunction> function_;
  std::vector<
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>
      state_;
};

}  // namespace

TaskBackend::~TaskBackend() = default;

std::vector<at::Tensor> TaskBackend::state() { return {}; }

std::function<void()> TaskBackend::remember() { return nullptr; }

std::string TaskBackend::eager_reason() { return ""; }

void TaskBackend::warn_eager(const std::string& task,
                             const std::string& reason) {
  TORCH_WARN("warmup_compiled: task '", task,
             "' ran eagerly, not compiled: ", reason);
}

std::optional<std::pair<torch::jit::Module, std::string>>
TaskBackend::portable() {
  return std::nullopt;
}

// what() of a foreign exception cannot be changed, so the standard ones become
// the c10 error of the same Python class; any other type goes on as it is.
std::exception_ptr TaskBackend::explain(const std::string& task,
                                        std::exception_ptr error) {
  const std::string note = "while warming task '" + task + "'";
  const auto with_note = [&note](const std::exception& known) {
    return std::string(known.what()) + " (" + note + ")";
  };
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& known) {
    known.add_context(note);
  } catch (const torch::jit::JITException& raised) {
    return std::make_exception_ptr(
        torch::jit::JITException(with_note(raised), raised.getPythonClassName(),
                                 raised.getOriginalMsg()));
  } catch (const std::out_of_range& index) {
    return std::make_exception_ptr(c10::IndexError(here, with_note(index)));
  } catch (const std::logic_error& value) {
    return std::make_exception_ptr(c10::ValueError(here, with_note(value)));
  } catch (const std::runtime_error& plain) {
    if (typeid(plain) == typeid(std::runtime_error)) {
      return std::make_exception_ptr(c10::Error(here, with_note(plain)));
    }
  } catch (const std::exception&) {
  }
  return error;
}

std::shared_ptr<TaskBackend> script_backend(const torch::jit::Module& module,
                                            std::string method,
                                            bool owns) {
  return std::make_shared<ScriptBackend>(module, std::move(method), owns);
}

std::shared_ptr<TaskBackend> function_backend(
    TaskFunction function, const std::vector<at::Tensor>& state) {
  return std::make_shared<FunctionBackend>(std::move(function), state);
}

}  // namespace deepmd_prewarm
