// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <string>

namespace deepmd_prewarm {

/// What a wait of this library owes to the language that embeds it. The Python
/// bridge installs both; null means the default.
struct DEEPMD_PREWARM_API WaitHooks {
  /// Throws if the wait shall end (Python: a signal handler raised). Called on
  /// the waiting thread, several times a second. Default: never.
  void (*check_interrupt)() = nullptr;
  /// Tells the user one line. Called on the waiting thread. Default: stderr.
  void (*log)(const std::string& line) = nullptr;
};

DEEPMD_PREWARM_API void set_wait_hooks(const WaitHooks& hooks);

/// Calls the hook; what it throws passes through.
DEEPMD_PREWARM_API void check_interrupt();

/// Calls the hook; what it throws passes through.
DEEPMD_PREWARM_API void log_line(const std::string& line);

}  // namespace deepmd_prewarm
