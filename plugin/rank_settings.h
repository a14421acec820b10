// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

namespace deepmd_prewarm {

/// How ranks watch each other; all in seconds.
struct DEEPMD_PREWARM_API RankSettings {
  double beat_s = 1.;      ///< DP_PREWARM_BEAT_S: between two heartbeats
  double dead_s = 5.;      ///< DP_PREWARM_DEAD_S: silence that means death
  double arrive_s = 600.;  ///< DP_PREWARM_ARRIVE_S: until the first heartbeat
  double slow_s = 300.;    ///< DP_PREWARM_SLOW_S: in one phase, then one line
  double max_s = 0.;       ///< DP_PREWARM_MAX_S: in one phase; 0 = no limit

  /// Reads the environment. Where only DP_PREWARM_BEAT_S is set, dead_s is
  /// five beats.
  ///
  /// @throws c10::ValueError naming a variable that holds no usable number.
  static RankSettings from_environment();
};

}  // namespace deepmd_prewarm
