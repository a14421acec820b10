// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/process_watch.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

namespace deepmd_prewarm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Keys = std::vector<int>;

// A child that waits to be killed.
pid_t sleeping_child() {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  return child;
}

void end(pid_t child) {
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(ProcessWatch, ReportsAWatchedProcessOnceWhenItEnds) {
  ProcessWatch watch;
  const pid_t child = sleeping_child();
  watch.watch(3, child, process_start(child));
  EXPECT_EQ(watch.wait(milliseconds(0)), Keys{});
  kill(child, SIGKILL);
  EXPECT_EQ(watch.wait(seconds(30)), Keys{3});
  EXPECT_EQ(watch.wait(milliseconds(0)), Keys{});
  waitpid(child, nullptr, 0);
}

TEST(ProcessWatch, ReportsAProcessThatEndedBefore) {
  ProcessWatch watch;
  const pid_t child = sleeping_child();
  const auto start = process_start(child);
  end(child);
  watch.watch(5, child, start);
  EXPECT_EQ(watch.wait(seconds(30)), Keys{5});
}

TEST(ProcessWatch, TakesAReusedPidForAnEndedProcess) {
  ProcessWatch watch;
  watch.watch(1, getpid(), "12");
  EXPECT_EQ(watch.wait(seconds(30)), Keys{1});
}

TEST(ProcessWatch, ForgetsTheProcessThatHadAKeyBefore) {
  ProcessWatch watch;
  const pid_t old = sleeping_child();
  const pid_t fresh = sleeping_child();
  watch.watch(1, old, process_start(old));
  watch.watch(1, fresh, process_start(fresh));
  end(old);
  EXPECT_EQ(watch.wait(milliseconds(0)), Keys{});
  end(fresh);
  EXPECT_EQ(watch.wait(seconds(30)), Keys{1});
}

TEST(ProcessWatch, WakesUpForAnotherThread) {
  ProcessWatch watch;
  std::thread other([&watch] { watch.wake(); });
  EXPECT_EQ(watch.wait(seconds(30)), Keys{});
  other.join();
}

TEST(ProcessIdentity, TellsThisProcessFromItsChild) {
  const auto self = ProcessIdentity::own();
  EXPECT_EQ(self.pid, getpid());
  EXPECT_EQ(self.start, process_start(getpid()));
  EXPECT_NE(self.place.find('-'), std::string::npos) << self.place;
  EXPECT_FALSE(self.host.empty());
  EXPECT_EQ(process_start(0), "");
}

}  // namespace
}  // namespace deepmd_prewarm
