// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/ops/release_trace_inputs.h>

namespace deepmd_prewarm {
c10::SymInt release_trace_inputs(const c10::List<std::optional<at::Tensor>>&) {
  return 0;
}
c10::SymInt release_trace_inputs_list(const c10::List<at::Tensor>&) {
  return 0;
}
std::vector<std::string> explain_release(
    const c10::List<std::optional<at::Tensor>>&) {
  return {};
}
}  // namespace deepmd_prewarm
