// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace deepmd_prewarm {

/// What one rank brings to a meeting.
struct DEEPMD_PREWARM_API Meeting {
  /// What this rank did until now, e.g. a task's name.
  std::string phase;
  /// Why this rank cannot go on; empty: it can.
  std::string error;
  /// What must be equal on all ranks, e.g. a list of tasks; lines are compared
  /// one by one so that a difference can be named.
  std::string fingerprint;
  /// Seconds until the wait for others ends in an error; 0: no limit.
  double timeout_s = 0.;
};

/// Who meets: `size` ranks over one Store. `name` tells groups of this process
/// apart that use the same Store.
struct DEEPMD_PREWARM_API Members {
  c10::intrusive_ptr<c10d::Store> store;
  std::string name;
  int rank = 0;
  int size = 1;
};

/// All ranks return, or all raise the same error.
///
/// Every rank of `members` calls this the same number of times; the n-th calls
/// belong together. No collective: only the Store is used, over a connection
/// of our own. Blocks until all ranks came, one brought an error, or the time
/// is up. Keys carry TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT.
///
/// Raises c10::Error (RuntimeError) that names each failing rank with phase
/// and text, or says that the Store no longer answers; and whatever the
/// interrupt check throws, after the others were told.
DEEPMD_PREWARM_API void agree(const Members& members, const Meeting& meeting);

}  // namespace deepmd_prewarm
