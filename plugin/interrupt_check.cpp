// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/interrupt_check.h>

#include <atomic>

namespace deepmd_prewarm {
namespace {

std::atomic<InterruptCheck> installed{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) { installed = check; }

void check_interrupt() {
  if (const InterruptCheck check = installed.load()) {
    check();
  }
}

}  // namespace deepmd_prewarm
