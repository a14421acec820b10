// SPDX-License-Identifier: LGPL-3.0-or-later
// Following the leader, taking its place, and what the leader does: reading
// all beats, ending rounds, telling hosts who lives on them.
#include <deepmd_prewarm/plugin/rank_watcher.h>

#include <algorithm>

namespace deepmd_prewarm {
namespace {

using std::chrono::milliseconds;
using Seconds = std::chrono::duration<double>;

constexpr const char* kLead = "lead";
// Rank 0 leads if it can: the others give it this long to come.
constexpr milliseconds kFirstLeader{1000};
constexpr milliseconds kLaterPerRank{2};
constexpr milliseconds kLatest{500};
constexpr int kBeatsAtAGrave = 2;
constexpr int kBurials = 3;

std::string beat_key(int rank) { return "beat/" + std::to_string(rank); }

std::string text_key(int rank) { return "text/" + std::to_string(rank); }

std::string host_key(const std::string& place) { return "host/" + place; }

}  // namespace

void RankWatcher::follow(const Turn& turn) {
  const bool eager = (turn.waits && !established()) || turn.draining;
  if (!turn.beat && !eager) {
    return;
  }
  // The lease is never deleted: once seen it can be read without a check.
  const auto value = lease_value_.empty() ? link_.read(kLead).value_or("")
                                          : link_.read_all({kLead}).front();
  if (value != lease_value_) {
    take_lease(value, turn.now);
  }
  if (may_take_over(turn.now)) {
    take_over(turn.now);
  }
  if (turn.beat) {
    bury_again();
  }
  read_roster();
}

void RankWatcher::take_lease(const std::string& value, Clock::time_point now) {
  const auto before = lease_;
  lease_value_ = value;
  lease_ = Lease::parse(value);
  lease_changed_ = now;
  if (!lease_) {
    return;
  }
  const bool same = before && before->nonce == lease_->nonce;
  if (same) {
    roll_.trust(lease_->nonce);  // it lives, so who echoes it is of our time
  } else if (!established()) {
    next_beat_ = now;  // echo it
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->drained = std::max(state_->drained, lease_->drained);
  if (same && lease_->notice != before->notice &&
      state_->round > state_->adopted) {
    state_->notices.push_back(lease_->notice_text);
  }
  state_->changed.notify_all();
}

bool RankWatcher::may_take_over(Clock::time_point now) const {
  const auto later = std::min(kLaterPerRank * rank_, kLatest);
  if (!lease_) {
    return rank_ == 0 || now - start_ > kFirstLeader + later;
  }
  const auto grave = graves_.find(static_cast<int>(lease_->rank));
  const bool buried = grave != graves_.end() &&
                      neighbours_.at(grave->first).nonce == lease_->nonce;
  const bool stranger =
      established() &&
      members_[static_cast<size_t>(lease_->rank)] != lease_->nonce;
  return lease_->left || buried || stranger || lease_->rank == rank_ ||
         now - lease_changed_ > Seconds(state_->settings.dead_s) + later;
}

void RankWatcher::take_over(Clock::time_point now) {
  Lease mine;
  mine.rank = rank_;
  mine.nonce = state_->nonce;
  mine.seq = 1;
  if (lease_) {
    mine.notice = lease_->notice;
    mine.notice_text = lease_->notice_text;
    mine.drained = established() ? lease_->drained : 0;
  }
  const auto value = mine.packed();
  const auto standing = link_.write_once(kLead, lease_value_, value);
  if (standing != value) {
    take_lease(standing, now);
    return;
  }
  if (lease_ && lease_->rank != rank_) {
    roll_.heard(static_cast<int>(lease_->rank), lease_changed_);
  }
  lease_ = mine;
  lease_value_ = value;
  leads_ = true;
  pending_ = true;
  seen_.clear();
  next_beat_ = now;  // the first turn as a leader shall be a whole one
  take_verdicts();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->leads = true;
}

void RankWatcher::renew_lease(bool left) {
  Lease mine = *lease_;
  ++mine.seq;
  mine.left = left;
  const auto value = mine.packed();
  const auto standing = link_.write_once(kLead, lease_value_, value);
  if (standing == value) {
    lease_ = mine;
    lease_value_ = value;
    return;
  }
  leads_ = false;  // the others thought this process dead
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->leads = false;
  }
  take_lease(standing, Clock::now());
}

void RankWatcher::lead(const Turn& turn) {
  if (!turn.beat && !turn.waits && !turn.draining && !pending_) {
    return;
  }
  read_beats(turn.now);
  const int64_t round = adopted_ + 1;
  pending_ = roll_.pending(round);
  std::optional<std::string> notice;
  if (pending_) {
    if (roll_.decided(round, turn.now)) {
      publish(round, roll_.text(round, turn.now, [this](int rank) {
        return RankText::parse(link_.read(text_key(rank)).value_or(""));
      }));
    } else {
      notice = roll_.notice(round, turn.now);
    }
  }
  for (int rank = 0; rank < size_; ++rank) {
    if (roll_.newcomer(rank)) {
      admit(rank);
    }
  }
  bool news = turn.beat;
  if (notice) {
    ++lease_->notice;
    lease_->notice_text = *notice;
    news = true;
  }
  if (adopted_ > lease_->drained && roll_.drained(adopted_, turn.now)) {
    lease_->drained = adopted_;
    news = true;
  }
  if (news) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->drained = lease_->drained;
    if (notice && state_->round > state_->adopted) {
      state_->notices.push_back(*notice);
    }
    state_->changed.notify_all();
  }
  if (news) {
    renew_lease(false);
  }
  write_rosters();
  if (turn.beat) {
    drop_old_verdicts();
    bury_again();
  }
}

void RankWatcher::read_beats(Clock::time_point now) {
  if (static_cast<int>(seen_.size()) < size_) {
    std::vector<std::string> unseen;
    for (int rank = 0; rank < size_; ++rank) {
      if (seen_.count(rank) == 0) {
        unseen.push_back(beat_key(rank));
      }
    }
    const bool all = unseen.size() > 1 && link_.has(unseen);
    for (int rank = 0; rank < size_; ++rank) {
      if (seen_.count(rank) == 0 && (all || link_.has({beat_key(rank)}))) {
        seen_.insert(rank);
      }
    }
  }
  std::vector<std::string> keys;
  for (const int rank : seen_) {
    keys.push_back(beat_key(rank));
  }
  const auto values = link_.read_all(keys);
  size_t i = 0;
  for (const int rank : seen_) {
    if (const auto record = RankRecord::parse(values[i++])) {
      roll_.see(rank, *record, now);
    }
  }
}

void RankWatcher::write_rosters() {
  auto nonces = roll_.candidates();
  if (nonces == roster_nonces_) {
    return;
  }
  roster_nonces_ = std::move(nonces);
  for (const auto& place : roll_.places()) {
    const auto roster = roll_.roster(place);
    const auto value = pack_roster(roster);
    if (roster.size() > 1 && rosters_[place] != value) {
      link_.write(host_key(place), value);
      rosters_[place] = value;
    }
    if (place == state_->self.place) {
      watch_neighbours(value);
    }
  }
}

void RankWatcher::read_roster() {
  if (state_->self.place.empty()) {
    return;
  }
  const auto key = host_key(state_->self.place);
  const auto value = roster_value_.empty() ? link_.read(key).value_or("")
                                           : link_.read_all({key}).front();
  if (value != roster_value_) {
    watch_neighbours(value);
  }
}

void RankWatcher::watch_neighbours(const std::string& roster) {
  roster_value_ = roster;
  for (const auto& one : parse_roster(roster)) {
    const int rank = static_cast<int>(one.rank);
    if (one.pid == state_->self.pid || neighbours_[rank].nonce == one.nonce) {
      continue;
    }
    neighbours_[rank] = one;
    graves_.erase(rank);
    state_->watch.watch(rank, one.pid, one.start);
  }
}

void RankWatcher::drop_old_verdicts() {
  const int64_t needed = std::min(roll_.oldest_needed(), adopted_);
  for (; oldest_verdict_ < needed; ++oldest_verdict_) {
    link_.erase("verdict/" + std::to_string(oldest_verdict_));
  }
}

// A neighbour's process ended: its own key says so to the leader from now on.
// One that had not yet heard of the leader is vouched for, if it is no rest of
// an earlier job.
void RankWatcher::bury(int rank) {
  auto value = link_.read(beat_key(rank)).value_or("");
  for (int attempt = 0; attempt < kBurials; ++attempt) {
    auto record = RankRecord::parse(value);
    if (!record || record->nonce != neighbours_[rank].nonce ||
        !is_of_our_time(*record, rank)) {
      return;
    }
    if (graves_.count(rank) == 0) {
      graves_[rank] = kBeatsAtAGrave;
      next_beat_ = Clock::now();
    }
    if (record->left || record->dead) {
      return;
    }
    record->dead = true;
    ++record->seq;
    record->echo = lease_ ? lease_->nonce : record->echo;
    const auto tombstone = record->packed();
    const auto standing = link_.write_once(beat_key(rank), value, tombstone);
    if (standing == tombstone) {
      return;
    }
    value = standing;  // its last beat, or the first one of its successor
  }
}

bool RankWatcher::is_of_our_time(const RankRecord& record, int rank) const {
  const auto i = static_cast<size_t>(rank);
  if (established() && !members_[i].empty()) {
    return members_[i] == record.nonce;
  }
  return (lease_ && record.echo == lease_->nonce) ||
         record.written_ms >= state_->since_ms;
}

// Its last beat may have been under way when the first tombstone was set.
void RankWatcher::bury_again() {
  for (auto& [rank, beats] : graves_) {
    if (beats > 0) {
      --beats;
      bury(rank);
    }
  }
}

}  // namespace deepmd_prewarm
