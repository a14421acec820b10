// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/Dispatch_v2.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>
#include <deepmd_prewarm/plugin/graph_capture.h>
#include <deepmd_prewarm/plugin/pinned_memory.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace deepmd_prewarm {

namespace {

void check(const NamedLoss& loss) {
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
void read_device(const std::vector<NamedLoss>& losses,
                 const std::vector<size_t>& members,
                 std::vector<double>& values) {
  const auto device = losses[members.front()].tensor.device();
  TORCH_CHECK(!is_capturing(device),
              "scalarize_losses: expected no CUDA graph capture on ", device,
              ", got one: a captured loss has no value before the replay. Read "
              "the losses after it.");
  std::vector<at::Tensor> bytes;
  bytes.reserve(members.size());
  for (const auto i : members) {
    bytes.push_back(losses[i].tensor.contiguous().view({1}).view(at::kByte));
  }
  const auto host = copy_to_host(at::cat(bytes));
  const auto* data = host.const_data_ptr<uint8_t>();
  for (const auto i : members) {
    values[i] = to_double(data, losses[i].tensor.scalar_type());
    data += losses[i].tensor.element_size();
  }
}

}  // namespace

bool is_skipped_loss(
    std::string_view key,
    const std::optional<std::vector<std::string>>& skip_prefixes) {
  constexpr std::string_view kDefault = "l2_";
  const auto starts_with = [key](std::string_view prefix) {
    return key.substr(0, prefix.size()) == prefix;
  };
  return skip_prefixes ? std::any_of(skip_prefixes->begin(),
                                     skip_prefixes->end(), starts_with)
                       : starts_with(kDefault);
}

std::vector<double> read_losses(const std::vector<NamedLoss>& losses) {
  for (const auto& loss : losses) {
    if (loss.tensor.defined()) {
      check(loss);
    }
  }
  const at::NoGradGuard no_graph;
  std::vector<double> values(losses.size(),
                             std::numeric_limits<double>::quiet_NaN());
  std::vector<size_t> remote;
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto& tensor = losses[i].tensor;
    if (!tensor.defined()) {
      continue;
    }
    if (!is_plain(tensor)) {
      values[i] = tensor.item().toDouble();
    } else if (tensor.is_cpu()) {
      values[i] = to_double(tensor.const_data_ptr(), tensor.scalar_type());
    } else {
      remote.push_back(i);
    }
  }
  while (!remote.empty()) {
    const auto device = losses[remote.front()].tensor.device();
    const auto others = std::stable_partition(
        remote.begin(), remote.end(),
        [&](size_t i) { return losses[i].tensor.device() == device; });
    read_device(losses, {remote.begin(), others}, values);
    remote.erase(remote.begin(), others);
  }
  return values;
}

c10::Dict<std::string, double> scalarize_losses(
    const c10::Dict<std::string, at::Tensor>& losses,
    const std::optional<std::vector<std::string>>& skip_prefixes) {
  std::vector<std::string> keys;
  std::vector<NamedLoss> kept;
  keys.reserve(losses.size());  // `kept` points into it
  kept.reserve(losses.size());
  for (const auto& entry : losses) {
    auto key = entry.key();
    if (!is_skipped_loss(key, skip_prefixes)) {
      keys.push_back(std::move(key));
      kept.push_back({keys.back(), entry.value()});
    }
  }
  const auto values = read_losses(kept);
  c10::Dict<std::string, double> scalars;
  scalars.reserve(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) {
    scalars.insert(std::move(keys[i]), values[i]);
  }
  return scalars;
}

}  // namespace deepmd_prewarm
