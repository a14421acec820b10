// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/Dispatch_v2.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>

#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace deepmd_prewarm {

namespace {

struct Loss {
  std::string key;
  at::Tensor tensor;
  double value = std::numeric_limits<double>::quiet_NaN();
  bool read = false;
};

bool is_skipped(std::string_view key,
                const std::vector<std::string>& skip_prefixes) {
  for (const auto& prefix : skip_prefixes) {
    if (key.substr(0, prefix.size()) == prefix) {
      return true;
    }
  }
  return false;
}

void check(const Loss& loss) {
  const auto& tensor = loss.tensor;
  TORCH_CHECK_TYPE(
      tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
          (tensor.layout() == at::kStrided && !tensor.is_nested()),
      "scalarize_losses: expected a dense tensor for key '", loss.key,
      "', got a sparse or nested one. Take the sum() of its values().");
  TORCH_CHECK_VALUE(
      tensor.sym_numel() == 1,
      "scalarize_losses: expected one element for key '", loss.key,
      "', got a tensor of shape ", tensor.sym_sizes(),
      ". Reduce it (sum() or mean()) or skip the key by its prefix.");
  TORCH_CHECK_TYPE(!tensor.is_complex(),
                   "scalarize_losses: expected a real dtype for key '",
                   loss.key, "', got ", tensor.scalar_type(),
                   ". Take its abs() or real part.");
}

// Every real dtype converts to double with at most one rounding, to nearest.
double to_double(const void* data, c10::ScalarType dtype) {
  double value = 0;
  AT_DISPATCH_V2(
      dtype, "scalarize_losses", AT_WRAP([&] {
        scalar_t element;
        std::memcpy(&element, data, sizeof(element));
        value = static_cast<double>(element);
      }),
      AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      AT_EXPAND(AT_FLOAT8_TYPES), at::kBool, at::kHalf, at::kBFloat16);
  return value;
}

// Dense memory whose bytes mean what the dtype says. Else item() has to speak:
// for a subclass, a quantized tensor or a functorch wrapper.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         tensor.has_storage() && !tensor.is_quantized() && !tensor.is_neg();
}

// The losses of one device travel as bytes in one tensor: exact for each dtype,
// also on a device that has no double.
void read_device(std::vector<Loss>& losses, size_t first) {
  const auto device = losses[first].tensor.device();
  std::vector<at::Tensor> bytes;
  std::vector<Loss*> members;
  for (size_t i = first; i < losses.size(); ++i) {
    auto& loss = losses[i];
    if (!loss.read && loss.tensor.device() == device) {
      bytes.push_back(loss.tensor.contiguous().view({1}).view(at::kByte));
      members.push_back(&loss);
    }
  }
  const auto host = at::cat(bytes).to(at::kCPU);
  const auto* data = host.const_data_ptr<uint8_t>();
  for (auto* loss : members) {
    loss->value = to_double(data, loss->tensor.scalar_type());
    loss->read = true;
    data += loss->tensor.element_size();
  }
}

void read(std::vector<Loss>& losses) {
  const at::NoGradGuard no_graph;
  for (auto& loss : losses) {
    if (!loss.tensor.defined()) {
      loss.read = true;
    } else if (!is_plain(loss.tensor)) {
      loss.value = loss.tensor.item().toDouble();
      loss.read = true;
    } else if (loss.tensor.is_cpu()) {
      loss.value =
          to_double(loss.tensor.const_data_ptr(), loss.tensor.scalar_type());
      loss.read = true;
    }
  }
  for (size_t i = 0; i < losses.size(); ++i) {
    if (!losses[i].read) {
      read_device(losses, i);
    }
  }
}

}  // namespace

c10::Dict<std::string, double> scalarize_losses(
    const c10::Dict<std::string, at::Tensor>& losses,
    const std::optional<std::vector<std::string>>& skip_prefixes) {
  static const auto* const kDefault = new std::vector<std::string>{"l2_"};
  const auto& skip = skip_prefixes ? *skip_prefixes : *kDefault;
  std::vector<Loss> kept;
  kept.reserve(losses.size());
  for (const auto& entry : losses) {
    auto key = entry.key();
    if (!is_skipped(key, skip)) {
      kept.push_back({std::move(key), entry.value()});
    }
  }
  for (const auto& loss : kept) {
    if (loss.tensor.defined()) {
      check(loss);
    }
  }
  read(kept);
  c10::Dict<std::string, double> scalars;
  scalars.reserve(kept.size());
  for (auto& loss : kept) {
    scalars.insert(std::move(loss.key), loss.value);
  }
  return scalars;
}

}  // namespace deepmd_prewarm
