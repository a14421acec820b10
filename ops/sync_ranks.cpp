// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/ops/sync_ranks.h>

namespace deepmd_prewarm {
void sync_ranks(const std::string&,
                const std::string&,
                const std::string&,
                double) {}
}  // namespace deepmd_prewarm
