// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <string>

namespace deepmd_prewarm {

DEEPMD_PREWARM_API void sync_ranks(const std::string& group_name,
                                   const std::string& phase,
                                   const std::string& error,
                                   double timeout_s);

}  // namespace deepmd_prewarm
