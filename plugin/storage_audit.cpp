// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/core/impl/COW.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <deepmd_prewarm/plugin/device_release.h>
#include <deepmd_prewarm/plugin/functorch_wrappers.h>
#include <deepmd_prewarm/plugin/graph_capture.h>
#include <deepmd_prewarm/plugin/storage_audit.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace deepmd_prewarm {

namespace {

using c10::DispatchKey;

// Tells a storage that was released from one that never had memory (fake).
constexpr const char* kMarker = "release_trace_inputs: ";

// Kinds of tensors that own no storage we could look at, by their keys alone:
// asking a wrapper for its sizes or storage may call Python or throw.
Verdict verdict_of_kind(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto keys = impl->key_set();
  if (is_functorch_wrapper(tensor)) {
    return Verdict::kFunctorch;
  }
  if (keys.has(DispatchKey::Functionalize)) {
    return Verdict::kFunctional;
  }
  if (impl->is_python_dispatch()) {
    return Verdict::kSubclass;
  }
  if (impl->is_sparse() || impl->is_sparse_compressed()) {
    return Verdict::kSparse;
  }
  if (impl->is_nested()) {
    return Verdict::kNested;
  }
  if (impl->is_meta()) {
    return Verdict::kMeta;
  }
  return impl->has_storage() ? Verdict::kRelease : Verdict::kOpaque;
}

Verdict verdict_of_memory(c10::StorageImpl& storage) {
  // The accessors of a storage that is poisoned already throw.
  const auto& data = storage._mutable_data_ptr_no_checks();
  if (storage.sym_nbytes().is_heap_allocated()) {
    return Verdict::kMeta;
  }
  if (storage.nbytes() == 0) {
    return Verdict::kEmpty;
  }
  if (data.get() == nullptr) {
    const auto& text = storage.get_extra_meta().custom_data_ptr_error_msg_;
    return text && text->rfind(kMarker, 0) == 0 ? Verdict::kReleased
                                                : Verdict::kMeta;
  }
  if (c10::impl::cow::is_cow_data_ptr(data)) {
    return Verdict::kCopyOnWrite;
  }
  const auto* allocator = storage.allocator();
  if (!storage.resizable() || allocator == nullptr || storage.received_cuda()) {
    return Verdict::kBorrowed;
  }
  // E.g. CUDA memory that was sent to another process has another deleter.
  const auto deleter = allocator->raw_deleter();
  if (deleter != nullptr && data.get_deleter() != deleter) {
    return Verdict::kBorrowed;
  }
  // Its replays would read what somebody else got by then.
  return is_capturing(data.device()) ? Verdict::kCapturing : Verdict::kRelease;
}

template <class Impl>
bool has_python_object(const Impl* impl) {
  return impl->pyobj_slot()->load_pyobj() != nullptr;
}

// References from Python to the Python object of `impl`; its C++ side holds one
// of the object's counts as long as anything but that object holds `impl`.
template <class Impl>
int64_t python_references(const Impl* impl, int64_t use_count) {
  auto* object = impl->pyobj_slot()->load_pyobj();
  if (object == nullptr) {
    return 0;
  }
  const auto count = static_cast<int64_t>(
      (*c10::impl::getGlobalPyInterpreter())->refcnt(object));
  return count - (use_count > 1 ? 1 : 0);
}

bool in_torchscript() { return !torch::jit::currentCallstack().empty(); }

}  // namespace

const char* describe(Verdict verdict) {
  switch (verdict) {
    case Verdict::kRelease:
      return "release";
    case Verdict::kNone:
      return "None: nothing to release";
    case Verdict::kReleased:
      return "already released";
    case Verdict::kEmpty:
      return "zero bytes: nothing to release";
    case Verdict::kMeta:
      return "meta or fake tensor: it has no memory";
    case Verdict::kFunctional:
      return "functional tensor: a wrapper that stands for another tensor "
             "while tracing";
    case Verdict::kFunctorch:
      return "functorch wrapper (vmap, grad, jvp): it stands for another "
             "tensor inside a transform";
    case Verdict::kSubclass:
      return "tensor subclass with a dispatch of its own (FakeTensor, DTensor, "
             "...): release the tensors that it wraps";
    case Verdict::kSparse:
      return "sparse tensor: it has no storage of its own; release its "
             "indices and values";
    case Verdict::kNested:
      return "nested tensor: its memory belongs to several tensors; release "
             "its values()";
    case Verdict::kOpaque:
      return "tensor without a storage (opaque backend)";
    case Verdict::kBorrowed:
      return "borrowed or shared memory (NumPy, a buffer, DLPack, a file, "
             "another process)";
    case Verdict::kCopyOnWrite:
      return "copy-on-write memory that another tensor may share";
    case Verdict::kCapturing:
      return "its device captures a CUDA graph now: release it afterwards";
    case Verdict::kAccumulator:
      return "a live graph accumulates a gradient for it";
    case Verdict::kHeld:
      return "held by more than the list: saved for a backward pass, a DLPack "
             "capsule, a TorchScript variable or a C++ object";
    case Verdict::kUncertain:
      return "held by more than the list: other inputs were moved into it, "
             "this one has one more owner";
    case Verdict::kStorageShared:
      return "its memory is shared with a tensor outside the list: a view, "
             "detach(), a graph constant or a saved output";
    case Verdict::kStorageObject:
      return "a storage object (untyped_storage()) still refers to its memory";
    case Verdict::kCompanion:
      return "shares its memory with another input that is kept";
  }
  return "unknown";
}

StorageAudit::Positions::Positions(size_t expected) {
  first_.reserve(std::min(expected, kScanned));
}

std::pair<size_t, bool> StorageAudit::Positions::find_or_add(const void* key) {
  const auto found = std::find(first_.begin(), first_.end(), key);
  const auto position = static_cast<size_t>(found - first_.begin());
  if (found != first_.end()) {
    return {position, false};
  }
  if (position < kScanned) {
    first_.push_back(key);
    return {position, true};
  }
  const auto [entry, is_new] =
      others_.try_emplace(key, kScanned + others_.size());
  return {entry->second, is_new};
}

StorageAudit::StorageAudit(size_t expected)
    : node_positions_(expected), storage_positions_(expected) {
  nodes_.reserve(expected);
  storages_.reserve(expected);
  elements_.reserve(expected);
}

size_t StorageAudit::node_of(const at::Tensor& tensor) {
  const auto [position, is_new] =
      node_positions_.find_or_add(tensor.unsafeGetTensorImpl());
  if (is_new) {
    nodes_.emplace_back();
    nodes_.back().tensor = tensor;
  }
  return position;
}

void StorageAudit::add(const at::Tensor& element) {
  if (!element.defined()) {
    elements_.push_back(kNoStorage);
    return;
  }
  const auto node = node_of(element);
  ++nodes_[node].list_references;
  elements_.push_back(node);
}

// The base of a view is held by the view: when the view is given up, that
// reference goes too. A base that nobody else knows is given up with its view.
void StorageAudit::follow_views() {
  const auto note = [this](const at::Tensor& base) {
    ++nodes_[node_of(base)].view_references;
  };
  for (size_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i].verdict = verdict_of_kind(nodes_[i].tensor);
    if (nodes_[i].verdict != Verdict::kRelease) {
      continue;
    }
    const at::Tensor tensor = nodes_[i].tensor;  // note() moves nodes
    const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
    if (meta == nullptr) {
      continue;
    }
    if (meta->has_bw_view()) {
      note(meta->get_backward_view().base_);
    }
    if (meta->has_fw_view() && !meta->shared_view_info()) {
      note(meta->get_forward_view().base_);
    }
  }
}

void StorageAudit::place_in_storage(Node& node) {
  auto* impl = node.tensor.storage().unsafeGetStorageImpl();
  const auto [position, is_new] = storage_positions_.find_or_add(impl);
  if (is_new) {
    storages_.emplace_back();
    storages_.back().impl = impl;
    storages_.back().verdict = verdict_of_memory(*impl);
  }
  node.storage = position;
  ++storages_[node.storage].members;
}

int64_t StorageAudit::unexplained_references(const Node& node) const {
  const auto* impl = node.tensor.unsafeGetTensorImpl();
  const auto own = 1;
  return static_cast<int64_t>(node.tensor.use_count()) - own -
         node.list_references - node.view_references -
         (has_python_object(impl) ? 1 : 0);
}

// How many handles of its own a caller is taken to have on each input that has
// no Python object. A C++ caller usually keeps the variables that it put into
// the list: one. Not so if any input shows none (the list owns them), and not
// in TorchScript, which moves a variable into the list at its last use.
int64_t StorageAudit::caller_handles() const {
  bool needed = false;
  for (const auto& node : nodes_) {
    if (node.storage == kNoStorage || node.list_references == 0 ||
        has_python_object(node.tensor.unsafeGetTensorImpl())) {
      continue;
    }
    const auto unexplained = unexplained_references(node);
    if (unexplained <= 0) {
      return 0;
    }
    needed = needed || unexplained == 1;
  }
  return needed && !in_torchscript() ? 1 : 0;
}

void StorageAudit::judge_holders() {
  const auto handles = caller_handles();
  for (auto& node : nodes_) {
    if (node.storage == kNoStorage) {
      continue;
    }
    const auto* impl = node.tensor.unsafeGetTensorImpl();
    const bool in_list = node.list_references > 0;
    const bool only_cpp = in_list && !has_python_object(impl);
    const auto unexplained = unexplained_references(node);
    if (torch::autograd::impl::try_get_grad_accumulator(node.tensor)) {
      node.verdict = Verdict::kAccumulator;
    } else if (unexplained > (only_cpp ? handles : 0)) {
      node.verdict =
          only_cpp && unexplained == 1 ? Verdict::kUncertain : Verdict::kHeld;
    } else if (!in_list &&
               python_references(
                   impl, static_cast<int64_t>(node.tensor.use_count())) > 0) {
      node.verdict = Verdict::kStorageShared;  // x._base under another name
    }
  }
}

void StorageAudit::judge_storages() {
  for (auto& storage : storages_) {
    const auto count =
        static_cast<int64_t>(c10::raw::intrusive_ptr::use_count(storage.impl));
    storage.expected_references =
        storage.members + (has_python_object(storage.impl) ? 1 : 0);
    if (storage.verdict != Verdict::kRelease) {
      continue;
    }
    if (count > storage.expected_references) {
      storage.verdict = Verdict::kStorageShared;
    } else if (python_references(storage.impl, count) > 0) {
      storage.verdict = Verdict::kStorageObject;
    }
  }
  for (const auto& node : nodes_) {
    if (node.storage == kNoStorage) {
      continue;
    }
    auto& storage = storages_[node.storage];
    if (storage.verdict == Verdict::kRelease &&
        node.verdict != Verdict::kRelease) {
      // A kept base that is not in the list is "a tensor outside the list".
      storage.verdict = node.list_references > 0 ? Verdict::kCompanion
                                                 : Verdict::kStorageShared;
    }
  }
}

void StorageAudit::decide() {
  follow_views();
  for (auto& node : nodes_) {
    if (node.verdict == Verdict::kRelease) {
      place_in_storage(node);
    }
  }
  judge_holders();
  judge_storages();
}

Verdict StorageAudit::verdict(size_t element) const {
  if (elements_[element] == kNoStorage) {
    return Verdict::kNone;
  }
  const auto& node = nodes_[elements_[element]];
  if (node.storage == kNoStorage) {
    return node.verdict;
  }
  const auto& storage = storages_[node.storage];
  // The memory's own reason is the lasting one; then the tensor's; then what
  // another tensor of the same storage met. A view outside the list holds its
  // base as well: "shared" says more than "held".
  switch (storage.verdict) {
    case Verdict::kStorageShared:
      return node.verdict == Verdict::kAccumulator ? node.verdict
                                                   : storage.verdict;
    case Verdict::kCompanion:
    case Verdict::kStorageObject:
      return node.verdict == Verdict::kRelease ? storage.verdict : node.verdict;
    default:
      return storage.verdict;
  }
}

size_t StorageAudit::release(const std::string& message) {
  size_t bytes = 0;
  const auto text = kMarker + message;
  for (const auto& storage : storages_) {
    if (storage.verdict != Verdict::kRelease) {
      continue;
    }
    auto& impl = *storage.impl;
    // Poison first: a view that another thread takes from here on raises when
    // it is read. One that it took since decide() may be in use right now.
    impl.release_data_and_set_meta_custom_data_ptr_error_msg_(text);
    if (static_cast<int64_t>(c10::raw::intrusive_ptr::use_count(&impl)) >
        storage.expected_references) {
      continue;
    }
    auto memory = std::move(impl._mutable_data_ptr_no_checks());
    bytes += impl.nbytes();
    // The size in bytes stays: a view of a freed tensor must fail by name when
    // it is read, not for being out of bounds when it is made.
    impl.set_data_ptr_noswap(at::DataPtr(nullptr, memory.device()));
    free_on_its_device(std::move(memory));
  }
  return bytes;
}

}  // namespace deepmd_prewarm
