// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/ops/release_trace_inputs.h>
#include <deepmd_prewarm/plugin/storage_audit.h>

#include <mutex>

namespace deepmd_prewarm {

namespace {

constexpr const char* kMessage =
    "expected no further reading of a released tensor, got an access to its "
    "data. Its memory went back to the allocator; leave it out of the list, or "
    "clone() it first.";

// One audit at a time: two lists with the same tensor must not both find that
// it is theirs to free.
std::mutex& audit_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

c10::SymInt release(StorageAudit& audit) {
  audit.decide();
  return static_cast<int64_t>(audit.release(kMessage));
}

}  // namespace

c10::SymInt release_trace_inputs(
    const c10::List<std::optional<at::Tensor>>& inputs) {
  const std::lock_guard<std::mutex> lock(audit_mutex());
  StorageAudit audit(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    audit.add(inputs.get(i).value_or(at::Tensor()));
  }
  return release(audit);
}

c10::SymInt release_trace_inputs_list(const c10::List<at::Tensor>& inputs) {
  const std::lock_guard<std::mutex> lock(audit_mutex());
  StorageAudit audit(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    audit.add(inputs.get(i));
  }
  return release(audit);
}

std::vector<std::string> explain_release(
    const c10::List<std::optional<at::Tensor>>& inputs) {
  const std::lock_guard<std::mutex> lock(audit_mutex());
  StorageAudit audit(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    audit.add(inputs.get(i).value_or(at::Tensor()));
  }
  audit.decide();
  std::vector<std::string> reasons;
  reasons.reserve(audit.size());
  for (size_t i = 0; i < audit.size(); ++i) {
    reasons.emplace_back(describe(audit.verdict(i)));
  }
  return reasons;
}

}  // namespace deepmd_prewarm
