// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/wait_hooks.h>

#include <atomic>
#include <iostream>

namespace deepmd_prewarm {
namespace {

std::atomic<void (*)()> interrupt_hook{nullptr};
std::atomic<void (*)(const std::string&)> log_hook{nullptr};

}  // namespace

void set_wait_hooks(const WaitHooks& hooks) {
  interrupt_hook = hooks.check_interrupt;
  log_hook = hooks.log;
}

void check_interrupt() {
  if (const auto hook = interrupt_hook.load()) {
    hook();
  }
}

void log_line(const std::string& line) {
  if (const auto hook = log_hook.load()) {
    hook(line);
  } else {
    std::cerr << "deepmd-prewarm: " + line + "\n" << std::flush;
  }
}

}  // namespace deepmd_prewarm
