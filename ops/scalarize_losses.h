// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <deepmd_prewarm/plugin/export.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace deepmd_prewarm {

/// Tensors of one element (any shape with numel 1, any real dtype, any devices)
/// to doubles, in the order of `losses`, with keys that start with one of
/// `skip_prefixes` (default {"l2_"}) left out. Integers are correctly rounded;
/// an undefined tensor becomes NaN, as a loss that was not computed.
///
/// One device-to-host copy per device, through page-locked memory, which waits
/// for that device's current stream. Holds no graph. Raises ValueError naming
/// the key for a tensor of another number of elements, TypeError for a complex
/// one, RuntimeError while a CUDA graph is captured there.
DEEPMD_PREWARM_API c10::Dict<std::string, double> scalarize_losses(
    const c10::Dict<std::string, at::Tensor>& losses,
    const std::optional<std::vector<std::string>>& skip_prefixes);

/// A loss and its key, for callers with containers of their own.
struct NamedLoss {
  std::string_view key;
  at::Tensor tensor;
};

/// The operator without its dictionaries: checks each loss, then reads them
/// all. Returns one value for each, in order.
DEEPMD_PREWARM_API std::vector<double> read_losses(
    const std::vector<NamedLoss>& losses);

/// Whether the operator leaves `key` out.
DEEPMD_PREWARM_API bool is_skipped_loss(
    std::string_view key,
    const std::optional<std::vector<std::string>>& skip_prefixes);

}  // namespace deepmd_prewarm
