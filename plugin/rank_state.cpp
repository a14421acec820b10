// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/rank_state.h>

#include <cstdlib>

namespace deepmd_prewarm {
namespace {

std::string env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// One Store may serve several jobs, and groups of several sizes.
std::string key_prefix(int size) {
  return "deepmd_prewarm/" + env("TORCHELASTIC_RUN_ID") + "/" +
         std::to_string(size) + "/";
}

}  // namespace

RankState::RankState(int own_rank,
                     int group_size,
                     const RankSettings& how,
                     int64_t first_ms)
    : rank(own_rank),
      size(group_size),
      settings(how),
      self(ProcessIdentity::own()),
      nonce(make_nonce()),
      since_ms(first_ms),
      link(key_prefix(group_size)),
      phase_since(std::chrono::steady_clock::now()),
      period_s(how.beat_s) {}

}  // namespace deepmd_prewarm
