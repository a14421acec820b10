// SPDX-License-Identifier: LGPL-3.0-or-later
// deepmd_prewarm._bridge: the one object that knows Python. It gives the C++
// library a backend that calls a Python object, and Python a handle type whose
// reference to that object the garbage collector can see. Needs libtorch_python
// for the tensor casters; the library itself must load without it.
#include <cxxabi.h>
#include <deepmd_prewarm/plugin/compiled_task.h>
#include <deepmd_prewarm/plugin/python_gate.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/extension.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

namespace deepmd_prewarm {

void bind_agreement(pybind11::module_& m);  // python_bridge_agreement.cpp
void bind_device(pybind11::module_& m);     // python_bridge_device.cpp
void bind_losses(pybind11::module_& m);     // python_bridge_losses.cpp

namespace {

class PythonBackend;

// The interpreter's end. After it nobody may wait for the interpreter lock:
// the thread that asks would never return.
struct Interpreter {
  std::mutex mutex;  // guards everything below
  std::condition_variable idle;
  bool gone = false;
  int64_t visitors = 0;
  std::unordered_set<PythonBackend*> backends;
};

Interpreter& interpreter() {
  static auto* self = new Interpreter;  // outlives every static destructor
  return *self;
}

// Holds the interpreter lock, if there still is an interpreter. The end of the
// interpreter waits for visitors, so that none is caught half-way.
class Visit {
 public:
  Visit() {
    auto& python = interpreter();
    const std::lock_guard<std::mutex> lock(python.mutex);
    allowed_ = !python.gone && Py_IsInitialized();
    python.visitors += allowed_ ? 1 : 0;
  }
  void enter() { gil_.emplace(); }
  ~Visit() {
    gil_.reset();
    if (allowed_) {
      auto& python = interpreter();
      const std::lock_guard<std::mutex> lock(python.mutex);
      --python.visitors;
      python.idle.notify_all();
    }
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  explicit operator bool() const { return allowed_; }

 private:
  bool allowed_ = false;
  std::optional<py::gil_scoped_acquire> gil_;
};

// Drops a reference from any thread; after the interpreter's end it leaks,
// since the memory goes with the process.
void drop(PyObject* object) noexcept {
  if (!object) {
    return;
  }
  Visit visit;
  if (visit) {
    visit.enter();
    Py_DECREF(object);
  }
}

// Calls Python. Python 3.11 ends a daemon thread that outlives the interpreter
// by unwinding it, wherever it asks for the lock; the frames above would then
// touch Python objects without the lock. This thread stays here instead, as
// Python 3.14 does it.
template <typename... Arguments>
py::object call(const py::object& method, Arguments&&... arguments) {
  const py::tuple packed =
      py::make_tuple(std::forward<Arguments>(arguments)...);
  PyObject* result = nullptr;
  try {
    result = PyObject_CallObject(method.ptr(), packed.ptr());
  } catch (const abi::__forced_unwind&) {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  if (!result) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

// A Python object with no owner that needs the lock to be copied.
class Owned {
 public:
  explicit Owned(py::object object) : object_(object.release().ptr()) {}
  ~Owned() { drop(object_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// Calls an object with the methods of deepmd_prewarm._callee.Callee.
class PythonBackend final : public TaskBackend {
 private:
  template <typename Question>
  auto ask(const Question& question) {
    const auto held = callee();
    Visit visit;
    TORCH_CHECK(held && visit,
                "warmup_compiled: expected an open handle, but it was closed "
                "meanwhile (close() or the end of the interpreter)");
    visit.enter();
    return question(py::reinterpret_borrow<py::object>(held->get()));
  }

 public:
  explicit PythonBackend(py::object callee)
      : callee_(std::make_shared<Owned>(std::move(callee))) {
    auto& python = interpreter();
    const std::lock_guard<std::mutex> lock(python.mutex);
    TORCH_CHECK(!python.gone,
                "CompiledTask: expected no new handle while the "
                "interpreter ends. Make handles earlier.");
    python.backends.insert(this);
  }
  ~PythonBackend() override {
    auto& python = interpreter();
    const std::lock_guard<std::mutex> lock(python.mutex);
    python.backends.erase(this);
  }

  std::string kind() const override { return "python"; }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override {
    return ask([&](const py::object& callee) {
      py::list arguments;
      for (const auto& input : inputs) {
        arguments.append(input.defined() ? py::cast(input) : py::none());
      }
      return call(callee.attr("run"), std::move(arguments))
          .cast<std::vector<at::Tensor>>();
    });
  }

  std::vector<at::Tensor> state() override {
    return ask([](const py::object& callee) {
      return call(callee.attr("state")).cast<std::vector<at::Tensor>>();
    });
  }

  std::function<void()> remember() override {
    return ask([](const py::object& callee) -> std::function<void()> {
      auto put_back = std::make_shared<Owned>(call(callee.attr("remember")));
      return [put_back] {
        Visit visit;
        if (visit) {
          visit.enter();
          call(py::reinterpret_borrow<py::object>(put_back->get()));
        }
      };
    });
  }

  std::string eager_reason() override {
    return ask([](const py::object& callee) {
      return callee.attr("eager_reason").cast<std::string>();
    });
  }

  void warn_eager(const std::string& task, const std::string& reason) override {
    ask([&](const py::object& callee) {
      call(callee.attr("warn_eager"), task, reason);
    });
  }

  std::exception_ptr explain(const std::string& task,
                             std::exception_ptr error) override {
    try {
      std::rethrow_exception(error);
    } catch (py::error_already_set& raised) {
      explain(task, raised);
    } catch (python_error& raised) {
      return explain_engine(task, raised, error);
    } catch (...) {
      return TaskBackend::explain(task, error);
    }
    return error;
  }

  bool is_open() const override { return callee() != nullptr; }

  void close() noexcept override {
    std::shared_ptr<Owned> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(callee_);
  }

  std::shared_ptr<Owned> callee() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return callee_;
  }

  // For the garbage collector: the callee if this backend alone holds it.
  PyObject* only_mine() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return callee_.use_count() == 1 ? callee_->get() : nullptr;
  }

 private:
  static void explain(const std::string& task, py::error_already_set& raised) {
    Visit visit;
    if (visit) {
      visit.enter();
      py::module_::import("deepmd_prewarm._callee")
          .attr("explain")(task, raised.value());
    }
  }

  // The autograd engine throws a python_error whose exception is already back
  // in the thread's error indicator; no Python code may run before it is taken
  // from there.
  static std::exception_ptr explain_engine(const std::string& task,
                                           python_error& raised,
                                           const std::exception_ptr& error) {
    Visit visit;
    if (!visit) {
      return error;
    }
    visit.enter();
    if (raised.value) {
      raised.restore();
    }
    if (!PyErr_Occurred()) {
      return error;
    }
    py::error_already_set taken;
    explain(task, taken);
    return std::make_exception_ptr(std::move(taken));
  }

  mutable std::mutex mutex_;  // guards callee_
  std::shared_ptr<Owned> callee_;
};

bool has_other_threads() {
  PyThreadState* first =
      PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  return first && PyThreadState_Next(first);
}

// Runs in atexit, with the lock held: closes every handle while references can
// still be dropped, then lets nobody in any more.
void end_interpreter() {
  python_ends();
  auto& python = interpreter();
  std::vector<std::shared_ptr<Owned>> dropped;
  {
    py::gil_scoped_release released;
    std::unique_lock<std::mutex> lock(python.mutex);
    for (auto* backend : python.backends) {
      dropped.push_back(backend->callee());
      backend->close();
    }
    // A daemon thread may sit in a callable for ever; the end does not wait
    // longer than a callable that is about to return needs.
    python.idle.wait_for(lock, std::chrono::seconds(1),
                         [&] { return python.visitors == 0; });
  }
  dropped.clear();
  if (has_other_threads()) {
    // They may stand between our operator and the lock; let them have it, so
    // that they come back to an operator and stay there.
    const py::gil_scoped_release released;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const std::lock_guard<std::mutex> lock(python.mutex);
  python.gone = true;
}

// What Python holds: a torch.ScriptObject, so that torch.ops takes it.
struct Handle : public torch::jit::Object {
  explicit Handle(const c10::intrusive_ptr<CompiledTask>& task)
      : torch::jit::Object(c10::IValue(task).toObject()) {}

  // The task if this handle is its only owner, else null.
  CompiledTask* sole_task() const {
    const auto object = _ivalue();  // a second owner while this runs
    const auto& capsule = object->getSlot(0);
    return object.use_count() == 2 && capsule.use_count() == 1
               ? c10::IValue(object).toCustomClass<CompiledTask>().get()
               : nullptr;
  }
};

// Garbage collection: a handle shows its callee as long as nobody in C++ or
// TorchScript shares the task, so module -> handle -> closure -> module can be
// collected.
Handle* constructed(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  return static_cast<Handle*>(instance->get_value_and_holder().value_ptr());
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (const Handle* handle = constructed(self)) {
    if (const CompiledTask* task = handle->sole_task()) {
      const auto backend = task->backend_if_open();
      if (auto* python = dynamic_cast<PythonBackend*>(backend.get())) {
        Py_VISIT(python->only_mine());
      }
    }
  }
  return 0;
}

int clear(PyObject* self) {
  if (const Handle* handle = constructed(self)) {
    if (CompiledTask* task = handle->sole_task()) {
      task->close();
    }
  }
  return 0;
}

void make_collectable(PyHeapTypeObject* type) {
  type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->ht_type.tp_traverse = traverse;
  type->ht_type.tp_clear = clear;
}

const PythonGate gate{
    [] {
      return Py_IsInitialized() && PyGILState_Check()
                 ? static_cast<void*>(PyEval_SaveThread())
                 : nullptr;
    },
    [](void* state) {
      PyEval_RestoreThread(static_cast<PyThreadState*>(state));
    },
    [] {
#if PY_VERSION_HEX >= 0x030D0000
      return Py_IsFinalizing() != 0 || !Py_IsInitialized();
#else
      return _Py_IsFinalizing() != 0 || !Py_IsInitialized();
#endif
    }};

}  // namespace
}  // namespace deepmd_prewarm

PYBIND11_MODULE(_bridge, m) {
  using namespace deepmd_prewarm;  // NOLINT(google-build-using-namespace)
  m.doc() = "What deepmd_prewarm.tasks stands on; not for direct use.";
  bind_agreement(m);
  bind_device(m);
  bind_losses(m);
  set_python_gate(&gate);
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&end_interpreter));

  struct Task {
    c10::intrusive_ptr<CompiledTask> task;
  };
  py::class_<Task>(m, "Task");
  m.def("python_task", [](std::string name, py::object callee) {
    return Task{c10::make_intrusive<CompiledTask>(
        std::move(name), std::make_shared<PythonBackend>(std::move(callee)))};
  });
  m.def("script_task",
        [](std::string name, const py::object& module, std::string method) {
          const auto script = torch::jit::as_module(module);
          TORCH_CHECK_TYPE(
              script, "CompiledTask.from_script: expected a ScriptModule, got ",
              Py_TYPE(module.ptr())->tp_name,
              ". Pass what torch.jit.script or torch.jit.load returned.");
          return Task{CompiledTask::from_script(std::move(name), *script,
                                                std::move(method))};
        });
  m.def("package_task", [](std::string name, const std::string& path) {
    const py::gil_scoped_release loading;  // unpacks and links
    return Task{CompiledTask::from_package(std::move(name), path)};
  });
  py::class_<Handle, torch::jit::Object>(
      m, "Handle", py::custom_type_setup(&make_collectable))
      .def(py::init([](const Task& made) { return Handle(made.task); }));
}
