// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/ops/sync_ranks.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace deepmd_prewarm {
namespace {

template <typename Raised>
std::string raised_by(const std::string& group, double timeout_s) {
  try {
    sync_ranks(group, "warm", "", timeout_s);
  } catch (const Raised& error) {
    return error.what_without_backtrace();
  }
  return "";
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(SyncRanks, RefusesAGroupThatIsNotRegistered) {
  const auto text = raised_by<c10::Error>("no such group", 0.);
  EXPECT_TRUE(holds(text, "sync_ranks: group_name must be")) << text;
  EXPECT_TRUE(holds(text, "got \"no such group\"")) << text;
}

TEST(SyncRanks, RefusesATimeoutThatIsNoTime) {
  for (const double time : {-1., std::numeric_limits<double>::quiet_NaN()}) {
    const auto text = raised_by<c10::ValueError>("no such group", time);
    EXPECT_TRUE(holds(text, "sync_ranks: timeout_s must be")) << text;
  }
}

TEST(SyncRanks, RefusesAGroupWithoutAStore) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  c10d::register_process_group("storeless", group);
  const auto text = raised_by<c10::Error>("storeless", 0.);
  EXPECT_TRUE(holds(text, "sync_ranks: group_name must name a group with"))
      << text;
  c10d::unregister_process_group("storeless");
}

TEST(SyncRanks, MeetsTheMembersOfARegisteredGroup) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  // The registry keeps weak pointers only.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  for (int rank = 0; rank < 2; ++rank) {
    groups.push_back(c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2));
    c10d::register_process_group("rank " + std::to_string(rank), groups.back());
  }
  std::thread other([] { sync_ranks("rank 1", "warm", "", 0.); });
  EXPECT_NO_THROW(sync_ranks("rank 0", "warm", "", 0.));
  other.join();
  std::thread failing([] {
    EXPECT_THROW(sync_ranks("rank 1", "warm", "bad", 0.), c10::Error);
  });
  const auto text = raised_by<c10::Error>("rank 0", 0.);
  failing.join();
  EXPECT_TRUE(holds(text, "bad")) << text;
  c10d::unregister_process_group("rank 0");
  c10d::unregister_process_group("rank 1");
}

}  // namespace
}  // namespace deepmd_prewarm
