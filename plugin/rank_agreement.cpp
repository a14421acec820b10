// SPDX-License-Identifier: LGPL-3.0-or-later
// The sessions of this process, and what happens to them at fork and at exit.
#include <c10/util/Exception.h>
#include <deepmd_prewarm/plugin/process_watch.h>
#include <deepmd_prewarm/plugin/rank_agreement.h>
#include <deepmd_prewarm/plugin/rank_session.h>
#include <pthread.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace deepmd_prewarm {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
// Rank and size too: with ranks as threads, all have a group of that name.
using Key = std::tuple<std::string, int, int>;
using Sessions = std::map<Key, std::shared_ptr<RankSession>>;

constexpr double kExitPatience = 1.;
constexpr double kReplacePatience = 1.;

struct Registry {
  std::mutex mutex;  // guards the rest; never held during a wait
  Sessions sessions;
  std::string phase = "start";
};

// Never destroyed: threads and exit handlers may outlive static objects.
Registry& registry() {
  static auto* all = [] {
    auto* made = new Registry();
    // A child must not find the mutex locked by a thread that it does not
    // have. Its sessions stay, and refuse to meet.
    pthread_atfork([] { registry().mutex.lock(); },
                   [] { registry().mutex.unlock(); },
                   [] { registry().mutex.unlock(); });
    std::atexit([] { leave_all(kExitPatience); });
    return made;
  }();
  return *all;
}

std::vector<std::shared_ptr<RankSession>> current_sessions() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::shared_ptr<RankSession>> sessions;
  for (const auto& [key, session] : all.sessions) {
    if (session->of_this_process()) {
      sessions.push_back(session);
    }
  }
  return sessions;
}

std::shared_ptr<RankSession> session_of(const Group& group,
                                        const std::string& name) {
  Registry& all = registry();
  const Key key{name, group->getRank(), group->getSize()};
  std::shared_ptr<RankSession> old;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (const auto found = all.sessions.find(key);
        found != all.sessions.end()) {
      if (found->second->is_for(group.get())) {
        return found->second;
      }
      old = found->second;
    }
  }
  // Both would write the same keys.
  if (old && old->of_this_process()) {
    old->retire();
    old->ended_within(kReplacePatience);
  }
  const auto settings = RankSettings::from_environment();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& session = all.sessions[key];
  if (!session || !session->is_for(group.get())) {
    // What a process of this host wrote while this one lived is of our time,
    // unless an earlier group of the same name was the reason.
    const int64_t since_ms = old ? boot_ms() : ProcessIdentity::own().start_ms;
    session =
        std::make_shared<RankSession>(group, settings, all.phase, since_ms);
  }
  return session;
}

}  // namespace

void agree(const Group& group,
           const std::string& name,
           const Meeting& meeting) {
  if (group->getSize() <= 1) {
    TORCH_CHECK(meeting.error.empty(), "sync_ranks: ", meeting.phase, ": ",
                meeting.error);
    return;
  }
  session_of(group, name)->meet(meeting);
}

void start_beats(const Group& group, const std::string& name) {
  if (group->getSize() > 1) {
    session_of(group, name);
  }
}

void enter_phase(const std::string& phase) {
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    registry().phase = phase;
  }
  for (const auto& session : current_sessions()) {
    session->enter_phase(phase);
  }
}

void rest() {
  for (const auto& session : current_sessions()) {
    session->rest();
  }
}

void leave_all(double patience_s) {
  const auto sessions = current_sessions();
  for (const auto& session : sessions) {
    session->retire();
  }
  for (const auto& session : sessions) {
    session->ended_within(patience_s);
  }
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.sessions.clear();
}

int64_t requests_sent(const Group& group) {
  int64_t sum = 0;
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [key, session] : all.sessions) {
    if (session->is_for(group.get())) {
      sum += session->requests();
    }
  }
  return sum;
}

}  // namespace deepmd_prewarm
