// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/util/Exception.h>
#include <deepmd_prewarm/plugin/rank_session.h>
#include <deepmd_prewarm/plugin/rank_watcher.h>
#include <deepmd_prewarm/plugin/store_record.h>
#include <deepmd_prewarm/plugin/verdict_text.h>
#include <deepmd_prewarm/plugin/wait_hooks.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace deepmd_prewarm {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// How often a waiting thread looks for Ctrl-C and lines to log.
constexpr std::chrono::milliseconds kHookPeriod{50};
// A TCPStore client retries a connection for a while; a request is answered or
// never.
constexpr double kConnectLimit = 60.;
constexpr double kLeastRequestLimit = 5.;
// A Store that serves many ranks from one busy core answers late, yet answers.
constexpr double kRequestLimitPerRank = 0.02;
// How long the leader stays after a verdict, so that all can take it even if
// its process hosts the Store and ends now.
constexpr double kDrainLimit = 2.;
constexpr double kRestFactor = 10.;
constexpr size_t kMaxRankText = 256UL << 10U;

}  // namespace

RankSession::RankSession(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         const RankSettings& settings,
                         const std::string& phase,
                         int64_t since_ms)
    : group_(*new c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)),
      state_(std::make_shared<RankState>(
          group->getRank(), group->getSize(), settings, since_ms)) {
  state_->phase = phase;
  auto watcher = std::make_shared<RankWatcher>(
      state_, [&weak = group_] { return weak.expired(); });
  // Detached: a thread that sits in a request to a dead host could never be
  // joined.
  std::thread([watcher = std::move(watcher),
               store = group->getStore()]() mutable {
    watcher->run(std::move(store));
  }).detach();
}

bool RankSession::is_for(const c10d::ProcessGroup* group) const {
  return !group_.expired() && group_._unsafe_get_target() == group;
}

bool RankSession::of_this_process() const {
  return state_->self.pid == getpid();
}

void RankSession::tell() {
  ++state_->news;
  state_->watch.wake();
}

void RankSession::enter_phase(const std::string& phase) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->phase = phase;
  state_->phase_since = Clock::now();
  state_->period_s = state_->settings.beat_s;
  tell();
}

void RankSession::rest() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->period_s = kRestFactor * state_->settings.beat_s;
  tell();
}

void RankSession::retire() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->retire = true;
  state_->watch.wake();
}

bool RankSession::ended_within(double patience_s) {
  Lock lock(state_->mutex);
  return state_->changed.wait_for(lock, Seconds(patience_s),
                                  [this] { return state_->ended; });
}

void RankSession::meet(const Meeting& meeting) {
  TORCH_CHECK(of_this_process(),
              "sync_ranks: must be called in the process that made the group "
              "(pid ",
              state_->self.pid, "), got a call in its forked child ", getpid(),
              ". Meet before forking, or in the parent.");
  Lock lock(state_->mutex);
  TORCH_CHECK(!meeting_,
              "sync_ranks: one call at a time may wait on a group of this "
              "process, got \"",
              meeting.phase, "\" while \"", state_->phase,
              "\" still waits. Make a group for each thread.");
  check_store(meeting);
  enter(lock, meeting);
  wait_for_verdict(lock, meeting);
  const auto verdict = state_->verdicts.find(state_->round);
  const std::string text = verdict->second;
  // Verdicts of rounds that this rank left by an exception stay behind.
  state_->verdicts.erase(state_->verdicts.begin(), std::next(verdict));
  wait_until_taken(lock);
  meeting_ = false;
  state_->phase = "after " + meeting.phase;
  state_->phase_since = Clock::now();
  tell();
  lock.unlock();
  TORCH_CHECK(text.empty(), "sync_ranks: ", text);
}

void RankSession::enter(Lock& /* lock */, const Meeting& meeting) {
  meeting_ = true;
  ++state_->round;
  state_->phase = meeting.phase;
  state_->phase_since = Clock::now();
  state_->period_s = state_->settings.beat_s;
  state_->text.error = shorten(meeting.error, kMaxRankText);
  state_->text.fingerprint = shorten(meeting.fingerprint, kMaxRankText);
  state_->failed = !meeting.error.empty();
  state_->out_of_time = false;
  tell();
}

void RankSession::wait_for_verdict(Lock& lock, const Meeting& meeting) {
  const auto start = Clock::now();
  while (state_->verdicts.count(state_->round) == 0) {
    try {
      check_store(meeting);
      serve_hooks(lock, meeting);
    } catch (...) {
      meeting_ = false;
      throw;
    }
    const double waited = Seconds(Clock::now() - start).count();
    if (meeting.timeout_s > 0. && waited >= meeting.timeout_s) {
      if (!state_->out_of_time) {
        state_->out_of_time = true;
        tell();
      }
      // Normally the leader's verdict comes now. It is for nobody to wait for
      // a leader that does not answer either.
      if (waited > meeting.timeout_s + 2. * state_->settings.dead_s) {
        meeting_ = false;
        TORCH_CHECK(false, "sync_ranks: ranks must come within ",
                    short_seconds(meeting.timeout_s), " s, got no verdict in ",
                    short_seconds(waited), " s of \"", meeting.phase,
                    "\". No rank leads: look for the first error of rank 0.");
      }
    }
    state_->changed.wait_for(lock, kHookPeriod);
  }
}

// Calls out with the lock released: a hook may take the GIL.
void RankSession::serve_hooks(Lock& lock, const Meeting& meeting) {
  std::vector<std::string> lines;
  lines.swap(state_->notices);
  lock.unlock();
  try {
    for (const auto& line : lines) {
      log_line(line);
    }
    check_interrupt();
  } catch (...) {
    lock.lock();
    if (state_->verdicts.count(state_->round) == 0) {
      state_->failed = true;
      state_->text.error =
          "it left the wait: interrupted, e.g. by Ctrl-C" +
          (meeting.error.empty() ? "" : "; before that: " + state_->text.error);
      tell();
      // Give the others a chance to hear of it before this process may end.
      state_->changed.wait_for(lock, Seconds(1.), [this] {
        return state_->verdicts.count(state_->round) != 0 ||
               !state_->gone.empty();
      });
    }
    throw;
  }
  lock.lock();
}

void RankSession::wait_until_taken(Lock& lock) {
  if (!state_->leads && state_->rank != 0) {
    return;
  }
  state_->draining = true;
  tell();
  state_->changed.wait_for(lock, Seconds(kDrainLimit), [this] {
    return state_->drained >= state_->round || state_->ended;
  });
  state_->draining = false;
}

void RankSession::check_store(const Meeting& meeting) const {
  std::string why = state_->gone;
  const double limit =
      state_->link.connected()
          ? std::max(kLeastRequestLimit, state_->settings.dead_s) +
                kRequestLimitPerRank * state_->size
          : kConnectLimit;
  const double busy = state_->link.busy_for();
  if (why.empty() && busy > limit) {
    why = "No answer for " + short_seconds(busy) + " s.";
  }
  if (why.empty() && state_->ended) {
    why = "This process has left the group.";
  }
  TORCH_CHECK(why.empty(),
              "sync_ranks: the Store of this group must answer, it no longer "
              "does (rank ",
              state_->rank, " in \"", meeting.phase, "\", host ",
              state_->self.host,
              "). The process that hosts it (rank 0 or the launcher) has "
              "ended, or the link to it is down: look for its first error. ",
              why);
}

}  // namespace deepmd_prewarm
