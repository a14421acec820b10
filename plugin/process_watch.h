// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace deepmd_prewarm {

/// Who a process is, for others that may share its host.
struct DEEPMD_PREWARM_API ProcessIdentity {
  std::string host;   ///< host name, for people
  std::string place;  ///< boot id and pid namespace; "" if unknown
  int64_t pid = 0;
  std::string start;  ///< start time in kernel ticks: tells a reused pid apart

  int64_t start_ms = 0;  ///< the same time as boot_ms() counts it

  static ProcessIdentity own();
};

/// Start time of process `pid` in kernel ticks, "" if there is none.
DEEPMD_PREWARM_API std::string process_start(int64_t pid);

/// Milliseconds since this host booted (CLOCK_BOOTTIME): the same clock for all
/// its processes.
DEEPMD_PREWARM_API int64_t boot_ms();

/// Waits for the end of processes on this host (pidfd_open(2), Linux >= 5.3;
/// they need not be children), and for a wake-up from another thread.
///
/// wake() is safe from any thread, the rest belongs to one thread. The file
/// descriptors are close-on-exec.
class DEEPMD_PREWARM_API ProcessWatch {
 public:
  ProcessWatch();
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  /// Watches the process that had `pid` and started at `start`. One that has
  /// ended already is reported by the next wait(). Does nothing where the
  /// kernel cannot watch.
  void watch(int key, int64_t pid, const std::string& start);

  /// Blocks until a watched process ended, wake() was called, or `limit` is
  /// over; the keys of those that ended, each reported once.
  std::vector<int> wait(std::chrono::milliseconds limit);

  void wake();

 private:
  int wake_fd_;
  std::map<int, int> fds_;  // key -> pidfd
  std::vector<int> ended_;
};

}  // namespace deepmd_prewarm
