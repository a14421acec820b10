// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

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

/// All ranks of `group` return, or all raise the same error.
///
/// Every rank calls this the same number of times; the n-th calls belong
/// together. No collective: only the group's Store is used, over a connection
/// and from a thread of our own, which beats once a second from the first call
/// on. A rank that is alive is waited for, however slow; one that is not is
/// named within seconds. Blocks until all ranks came, one brought an error or
/// died, or the time is up. One call at a time for each group of a process.
///
/// @param name The group's name; a group that is made anew under the same name
///   replaces the old one.
/// @throws c10::Error (RuntimeError) that names each failing rank with phase,
///   host, pid and text, or says that the Store no longer answers; and whatever
///   the interrupt hook throws, after the others were told.
DEEPMD_PREWARM_API void agree(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& name,
    const Meeting& meeting);

/// Starts the heartbeats of this rank without meeting anybody yet, so that a
/// death before the first meeting is noticed too. Returns at once.
DEEPMD_PREWARM_API void start_beats(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& name);

/// What this process does from now on, for all its groups: heartbeats say so.
DEEPMD_PREWARM_API void enter_phase(const std::string& phase);

/// Between meetings from now on, e.g. while training: ten times fewer
/// heartbeats, until the next meeting.
DEEPMD_PREWARM_API void rest();

/// Says good-bye to all groups and ends their threads; waits at most
/// `patience_s` for them. Called at exit; another meeting starts anew.
DEEPMD_PREWARM_API void leave_all(double patience_s);

/// Store requests sent so far for `group` by this process, 0 if none.
DEEPMD_PREWARM_API int64_t
requests_sent(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace deepmd_prewarm
