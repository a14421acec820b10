// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/process_watch.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sstream>

namespace deepmd_prewarm {
namespace {

int open_pidfd(int64_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
#else
  errno = ENOSYS;
  return -1;
#endif
}

}  // namespace

ProcessIdentity ProcessIdentity::own() {
  ProcessIdentity self;
  std::array<char, HOST_NAME_MAX + 1> name{};
  gethostname(name.data(), name.size() - 1);
  self.host = name.data();
  self.pid = getpid();
  self.start = process_start(self.pid);
  self.start_ms = std::strtoll(self.start.c_str(), nullptr, 10) * 1000 /
                  sysconf(_SC_CLK_TCK);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> space{};
  const auto size =
      readlink("/proc/self/ns/pid", space.data(), space.size() - 1);
  if (!boot.empty() && size > 0) {
    self.place = boot + "-" + std::string(space.data());
  }
  return self;
}

std::string process_start(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The second field may hold spaces and parentheses; the rest follows the
  // last ')': state is field 3, the start time field 22.
  const size_t end = line.rfind(')');
  if (end == std::string::npos) {
    return "";
  }
  std::istringstream rest(line.substr(end + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) {
    rest >> field;
  }
  return field;
}

int64_t boot_ms() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1000000;
}

ProcessWatch::ProcessWatch()
    : wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

ProcessWatch::~ProcessWatch() {
  for (const auto& [key, fd] : fds_) {
    close(fd);
  }
  if (wake_fd_ >= 0) {
    close(wake_fd_);
  }
}

void ProcessWatch::watch(int key, int64_t pid, const std::string& start) {
  if (const auto old = fds_.find(key); old != fds_.end()) {
    close(old->second);
    fds_.erase(old);
  }
  const int fd = open_pidfd(pid);
  if (fd < 0) {
    if (errno == ESRCH) {
      ended_.push_back(key);
    }
    return;
  }
  // Only now that the fd pins the process: is it the one that was meant?
  const std::string found = process_start(pid);
  if (!found.empty() && found == start) {
    fds_[key] = fd;
    return;
  }
  close(fd);
  ended_.push_back(key);
}

std::vector<int> ProcessWatch::wait(std::chrono::milliseconds limit) {
  std::vector<int> ended;
  ended.swap(ended_);
  std::vector<pollfd> files{{wake_fd_, POLLIN, 0}};
  std::vector<int> keys{-1};
  for (const auto& [key, fd] : fds_) {
    files.push_back({fd, POLLIN, 0});
    keys.push_back(key);
  }
  const auto patience = std::clamp<int64_t>(limit.count(), 0, INT_MAX);
  const int ready = poll(files.data(), files.size(),
                         ended.empty() ? static_cast<int>(patience) : 0);
  if (ready <= 0) {
    return ended;
  }
  if (files[0].revents != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const auto got = read(wake_fd_, &count, sizeof(count));
  }
  for (size_t i = 1; i < files.size(); ++i) {
    if (files[i].revents != 0) {
      close(files[i].fd);
      fds_.erase(keys[i]);
      ended.push_back(keys[i]);
    }
  }
  return ended;
}

void ProcessWatch::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto sent = write(wake_fd_, &one, sizeof(one));
}

}  // namespace deepmd_prewarm
