// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

namespace deepmd_prewarm {

/// Throws if the embedding language wants the current wait to end (Python: a
/// signal handler raised, e.g. KeyboardInterrupt).
using InterruptCheck = void (*)();

/// Installs the check that waits of this library call on the waiting thread,
/// several times a second. Null removes it. The Python bridge installs one.
DEEPMD_PREWARM_API void set_interrupt_check(InterruptCheck check);

/// Calls the installed check, if any; what it throws passes through.
DEEPMD_PREWARM_API void check_interrupt();

}  // namespace deepmd_prewarm
