// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/util/Exception.h>
#include <deepmd_prewarm/ops/sync_ranks.h>
#include <deepmd_prewarm/plugin/python_gate.h>
#include <deepmd_prewarm/plugin/rank_agreement.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace deepmd_prewarm {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

Group resolve(const std::string& group_name) {
  Group group;
  try {
    group = c10d::resolve_process_group(group_name);
  } catch (const c10::Error&) {
    TORCH_CHECK(false,
                "sync_ranks: group_name must be the name of a process group of "
                "this process, got \"",
                group_name,
                "\". Pass torch.distributed.group.WORLD.group_name after "
                "init_process_group().");
  }
  TORCH_CHECK(group->getSize() <= 1 || group->getStore(),
              "sync_ranks: group_name must name a group with a Store, got \"",
              group_name,
              "\" which has none. Make the group with a Store, or call this "
              "on the default group.");
  return group;
}

}  // namespace

void sync_ranks(const std::string& group_name,
                const std::string& phase,
                const std::string& error,
                double timeout_s) {
  meet(group_name, Meeting{phase, error, "", timeout_s});
}

void meet(const std::string& group_name, const Meeting& meeting) {
  TORCH_CHECK_VALUE(meeting.timeout_s >= 0.,
                    "sync_ranks: timeout_s must be a number of seconds >= 0 "
                    "(0: no limit), got ",
                    meeting.timeout_s, ".");
  const auto group = resolve(group_name);
  const OutsidePython outside;
  agree(group, group_name, meeting);
}

int64_t requests_sent(const std::string& group_name) {
  return requests_sent(resolve(group_name));
}

void start_beats(const std::string& group_name) {
  start_beats(resolve(group_name), group_name);
}

}  // namespace deepmd_prewarm
