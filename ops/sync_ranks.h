// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>
#include <deepmd_prewarm/plugin/rank_agreement.h>

#include <cstdint>
#include <string>

namespace deepmd_prewarm {

/// Meeting point of all ranks of a process group, over the group's Store.
///
/// Blocks, is no collective and needs no device. All ranks return, or all
/// raise one RuntimeError with the same text that names each failing rank, its
/// phase and its error. A slow rank is waited for.
///
/// @param group_name As `ProcessGroup.group_name`; must be registered.
/// @param phase What this rank did until now, e.g. the name of its task.
/// @param error Why this rank cannot go on; empty: it can.
/// @param timeout_s Seconds this rank waits for the others; 0: no limit.
/// @throws c10::ValueError for a negative or NaN time-out, c10::Error for an
///   unknown group, a group without a Store, and the verdict.
DEEPMD_PREWARM_API void sync_ranks(const std::string& group_name,
                                   const std::string& phase,
                                   const std::string& error,
                                   double timeout_s);

/// sync_ranks with a fingerprint that must be equal on all ranks.
DEEPMD_PREWARM_API void meet(const std::string& group_name,
                             const Meeting& meeting);

/// Store requests that this process's agreement sent for a group so far.
DEEPMD_PREWARM_API int64_t requests_sent(const std::string& group_name);

/// Starts this rank's heartbeats in a group, meets nobody, returns at once.
DEEPMD_PREWARM_API void start_beats(const std::string& group_name);

}  // namespace deepmd_prewarm
