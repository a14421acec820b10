// SPDX-License-Identifier: LGPL-3.0-or-later
// One turn: beat if it is time or there is news, take verdicts, then follow the
// leader or lead; then sleep until the next beat, or a moment if somebody
// waits.
#include <deepmd_prewarm/plugin/rank_watcher.h>
#include <deepmd_prewarm/plugin/store_record.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace deepmd_prewarm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Seconds = std::chrono::duration<double>;

constexpr milliseconds kFirstPoll{1};
// How long one poll may be apart from the next while somebody waits: a request
// each 50 ms where ranks are few, and no more than about 3,000 a second at the
// Store where they are many.
constexpr milliseconds kFewRanksPoll{50};
constexpr milliseconds kManyRanksPoll{400};
constexpr microseconds kPollPerRank{300};
constexpr size_t kMaxPhase = 512;
constexpr int kMaxStalls = 3;

std::chrono::steady_clock::duration as_duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      Seconds(seconds));
}

}  // namespace

RankWatcher::RankWatcher(std::shared_ptr<RankState> state,
                         std::function<bool()> expired)
    : state_(std::move(state)),
      expired_(std::move(expired)),
      link_(state_->link),
      rank_(state_->rank),
      size_(state_->size),
      start_(Clock::now()),
      last_turn_(start_),
      next_beat_(start_),
      poll_(kFirstPoll),
      lease_changed_(start_),
      roll_(state_->size, state_->settings, start_) {
  roll_.trust(state_->nonce);
}

void RankWatcher::run(c10::intrusive_ptr<c10d::Store> store) {
  std::string gone;
  try {
    link_.connect(store);
    store.reset();  // a process group that ends shall take its Store along
    loop();
  } catch (const c10::Error& error) {
    gone = error.what_without_backtrace();
  } catch (const std::exception& error) {
    gone = error.what();
  }
  if (!gone.empty()) {
    for (const int rank : state_->watch.wait(milliseconds(100))) {
      gone += "\n  On this host, rank " + std::to_string(rank) + " (pid " +
              std::to_string(neighbours_[rank].pid) + ") has ended.";
    }
    for (const auto& [rank, beats] : graves_) {
      gone += "\n  On this host, rank " + std::to_string(rank) + " (pid " +
              std::to_string(neighbours_[rank].pid) + ") has ended.";
    }
  }
  link_.disconnect();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->gone = gone;
  state_->ended = true;
  state_->changed.notify_all();
}

void RankWatcher::loop() {
  while (true) {
    Turn turn = take_turn();
    if (turn.leave) {
      leave(turn);
      return;
    }
    if (turn.beat) {
      write_beat(turn);
    }
    if (turn.beat || (turn.waits && !leads_)) {
      take_verdicts();
    }
    if (leads_) {
      lead(turn);
    } else {
      follow(turn);
    }
    for (const int rank :
         state_->watch.wait(std::chrono::ceil<milliseconds>(pause(turn)))) {
      bury(rank);
    }
  }
}

RankWatcher::Turn RankWatcher::take_turn() {
  Turn turn;
  turn.now = Clock::now();
  const bool gone = expired_();
  RankRecord& record = turn.record;
  record.nonce = state_->nonce;
  record.host = state_->self.host;
  record.place = state_->self.place;
  record.pid = state_->self.pid;
  record.start = state_->self.start;
  record.adopted = adopted_;
  record.written_ms = boot_ms();
  if (!established()) {
    record.echo = leads_ ? state_->nonce : (lease_ ? lease_->nonce : "");
  }
  double period_s = 0.;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    turn.leave = gone || state_->retire;
    turn.news = state_->news;
    turn.waits = state_->round > adopted_;
    turn.draining = state_->draining;
    turn.text = state_->text;
    record.phase = shorten(state_->phase, kMaxPhase);
    record.phase_s = Seconds(turn.now - state_->phase_since).count();
    record.round = state_->round;
    record.failed = state_->failed;
    record.out_of_time = state_->out_of_time;
    period_s = state_->period_s;
  }
  record.period_s = period_s;
  record.fingerprint = digest(turn.text.fingerprint);
  turn.beat = turn.news != news_written_ || turn.now >= next_beat_;
  if (turn.news != news_written_) {
    poll_ = kFirstPoll;
  }

  // This thread itself was away (a stopped job, a machine without air): others
  // may have been as well, so their silence proves nothing yet.
  const auto away = turn.now - last_turn_;
  const auto usual = as_duration(period_s + 0.25 * state_->settings.dead_s);
  stalls_ = away > usual ? stalls_ + 1 : 0;
  if (stalls_ > 0 && stalls_ <= kMaxStalls) {
    roll_.forgive(away);
    lease_changed_ += away;
  }
  last_turn_ = turn.now;
  return turn;
}

void RankWatcher::write_beat(Turn& turn) {
  const bool new_text =
      turn.record.round != text_round_ || turn.record.failed != text_failed_;
  if (new_text && (turn.record.failed || !turn.text.fingerprint.empty())) {
    turn.text.nonce = state_->nonce;
    turn.text.round = turn.record.round;
    link_.write("text/" + std::to_string(rank_), turn.text.packed());
    text_round_ = turn.record.round;
    text_failed_ = turn.record.failed;
  }
  turn.record.seq = ++seq_;
  link_.write("beat/" + std::to_string(rank_), turn.record.packed());
  news_written_ = turn.news;
  next_beat_ = turn.now + as_duration(turn.record.period_s);
}

void RankWatcher::leave(Turn& turn) {
  turn.record.left = true;
  write_beat(turn);
  if (leads_) {
    renew_lease(true);
  }
}

RankWatcher::Clock::duration RankWatcher::pause(const Turn& turn) {
  const auto until_beat =
      std::max(Clock::duration::zero(), next_beat_ - Clock::now());
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->news != news_written_) {
      return Clock::duration::zero();
    }
  }
  if (!turn.waits && !turn.draining && !(leads_ && pending_)) {
    poll_ = kFirstPoll;
    return until_beat;
  }
  const Clock::duration longest = std::clamp<Clock::duration>(
      kPollPerRank * size_, kFewRanksPoll, kManyRanksPoll);
  const auto now = std::min(poll_, longest);
  poll_ = std::min(poll_ + poll_ / 2, longest);
  return std::min(now, until_beat);
}

}  // namespace deepmd_prewarm
