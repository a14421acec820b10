// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>
#include <deepmd_prewarm/plugin/process_watch.h>
#include <deepmd_prewarm/plugin/rank_record.h>
#include <deepmd_prewarm/plugin/rank_settings.h>
#include <deepmd_prewarm/plugin/store_link.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace deepmd_prewarm {

/// What the thread that meets and the thread that watches share about one
/// rank of one group.
struct RankState {
  /// `since_ms`: a record of this host that was written later (boot_ms()) is no
  /// rest of an earlier group.
  RankState(int rank, int size, const RankSettings& settings, int64_t since_ms);

  const int rank;
  const int size;
  const RankSettings settings;
  const ProcessIdentity self;
  const std::string nonce;
  const int64_t since_ms;

  StoreLink link;      ///< for the watching thread
  ProcessWatch watch;  ///< for the watching thread, except wake()

  std::mutex mutex;  ///< guards everything below
  std::condition_variable changed;

  // From the thread that meets.
  std::string phase;
  std::chrono::steady_clock::time_point phase_since;
  int64_t round = 0;  ///< rounds entered
  RankText text;      ///< of that round
  bool failed = false;
  bool out_of_time = false;
  bool draining = false;  ///< waits for `drained`
  bool retire = false;
  double period_s;
  int64_t news = 0;  ///< counts changes that the others have to know

  // From the thread that watches.
  int64_t adopted = 0;
  std::map<int64_t, std::string> verdicts;  ///< not yet raised or passed
  bool leads = false;
  int64_t drained = 0;
  std::vector<std::string> notices;
  std::string gone;  ///< why the Store does not answer
  bool ended = false;
};

}  // namespace deepmd_prewarm
