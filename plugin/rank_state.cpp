// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/rank_state.h>

#include <cstdlib>

namespace deepmd_prewarm {
namespace {

std::string env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The Store of an elastic job outlives an attempt: its keys must not.
std::string key_prefix(int size) {
  return "deepmd_prewarm/" + env("TORCHELASTIC_RUN_ID") + "/" +
         env("TORCHELASTIC_RESTART_COUNT") + "/" + std::to_string(size) + "/";
}

}  // namespace

RankState::RankState(int own_rank, int group_size, const RankSettings& how)
    : rank(own_rank),
      size(group_size),
      settings(how),
      self(ProcessIdentity::own()),
      nonce(make_nonce()),
      link(key_prefix(group_size)),
      phase_since(std::chrono::steady_clock::now()),
      period_s(how.beat_s) {}

}  // namespace deepmd_prewarm
