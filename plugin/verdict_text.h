// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

// The words of a verdict. `who` names a rank with phase, host and pid.

namespace deepmd_prewarm {

using RankTexts = std::vector<std::pair<int, std::string>>;
using Who = std::function<std::string(int)>;

/// "2 of 4 ranks failed, ..." and a paragraph for each; at most 4 MiB.
DEEPMD_PREWARM_API std::string failure_text(const RankTexts& failed,
                                            int size,
                                            const Who& who);

/// Ranks that do something else than the others, at most 8 of them.
DEEPMD_PREWARM_API std::string mismatch_text(const RankTexts& odd,
                                             const Who& who);

/// Ranks that did not come while `waiting_rank` waited `seconds` in `phase`.
DEEPMD_PREWARM_API std::string absentee_text(const std::vector<int>& missing,
                                             int size,
                                             int waiting_rank,
                                             const std::string& phase,
                                             double seconds,
                                             const Who& who);

/// One line about ranks that are alive but slow, at most 4 of them.
DEEPMD_PREWARM_API std::string slow_line(const std::vector<std::string>& slow);

/// The first line in which `found` and `expected` differ.
DEEPMD_PREWARM_API std::string difference(const std::string& found,
                                          const std::string& expected);

/// "1-3, 7" for {1, 2, 3, 7}.
DEEPMD_PREWARM_API std::string rank_list(const std::vector<int>& ranks);

/// "0.05", "5.1", "300": two digits below 1, one below 100, else none.
DEEPMD_PREWARM_API std::string short_seconds(double seconds);

}  // namespace deepmd_prewarm
