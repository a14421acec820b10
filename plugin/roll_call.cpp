// SPDX-License-Identifier: LGPL-3.0-or-later
// Who is there, alive, dead or missing, and when a round ends; its words are in
// roll_call_words.cpp.
#include <deepmd_prewarm/plugin/roll_call.h>
#include <deepmd_prewarm/plugin/verdict_text.h>

#include <algorithm>

namespace deepmd_prewarm {
namespace {

using Seconds = std::chrono::duration<double>;

// How long a verdict waits for other ranks that fail for the same reason.
constexpr Seconds kGrace{0.25};

double seconds_between(RollCall::Time from, RollCall::Time to) {
  return Seconds(to - from).count();
}

}  // namespace

RollCall::RollCall(int size, const RankSettings& settings, Time start)
    : settings_(settings), start_(start), seen_(static_cast<size_t>(size)) {}

void RollCall::trust(const std::string& leader_nonce) {
  trusted_.insert(leader_nonce);
}

void RollCall::establish(const std::vector<std::string>& members) {
  members_ = members;
  members_.resize(seen_.size());
}

void RollCall::see(int rank, const RankRecord& record, Time now) {
  Seen& seen = seen_[static_cast<size_t>(rank)];
  const bool same = seen.any && seen.record.nonce == record.nonce;
  if (same && seen.record.dead) {
    return;  // a last beat that was under way when its process ended
  }
  if (!seen.any) {
    seen.changed = seen.heard.value_or(now);
  } else if (!same || seen.record.seq != record.seq) {
    seen.changed = now;
  }
  if (!same || seen.record.phase != record.phase) {
    seen.slow_limit_s = settings_.slow_s;
  }
  seen.record = record;
  seen.any = true;
}

void RollCall::heard(int rank, Time when) {
  seen_[static_cast<size_t>(rank)].heard = when;
}

void RollCall::forgive(std::chrono::steady_clock::duration away) {
  for (auto& seen : seen_) {
    seen.changed += away;
    if (seen.heard) {
      *seen.heard += away;
    }
  }
}

// Whether the record of `rank` belongs to this session, and is not what an
// earlier one left.
bool RollCall::known(int rank) const {
  const auto i = static_cast<size_t>(rank);
  const Seen& seen = seen_[i];
  if (!seen.any) {
    return false;
  }
  if (established() && !members_[i].empty()) {
    return seen.record.nonce == members_[i];
  }
  // A rank that comes late has to be admitted; one that died on its way, never.
  return trusted_.count(seen.record.echo) != 0 &&
         (!established() || seen.record.dead);
}

// Perhaps of this session: it has not yet heard of the leader.
bool RollCall::candidate(int rank) const {
  const auto i = static_cast<size_t>(rank);
  const Seen& seen = seen_[i];
  return seen.any && !seen.record.dead && !seen.record.left &&
         (!established() || members_[i].empty());
}

bool RollCall::newcomer(int rank) const {
  const Seen& seen = seen_[static_cast<size_t>(rank)];
  return established() && seen.any && !known(rank) && !seen.record.dead &&
         !seen.record.left && trusted_.count(seen.record.echo) != 0;
}

void RollCall::admit(int rank) {
  const auto i = static_cast<size_t>(rank);
  members_[i] = seen_[i].record.nonce;
}

// A rank that beats more slowly has to be waited for longer.
bool RollCall::silent(const Seen& seen, Time now) const {
  const double stretch = std::max(1., seen.record.period_s / settings_.beat_s);
  return seconds_between(seen.changed, now) > settings_.dead_s * stretch;
}

bool RollCall::arrived(int rank, int64_t round) const {
  return known(rank) && seen_[static_cast<size_t>(rank)].record.round >= round;
}

bool RollCall::pending(int64_t round) const {
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    if (arrived(rank, round)) {
      return true;
    }
  }
  return false;
}

// Why `round` cannot end well because of `rank`; "" if it still can. A failed
// rank's own text is put in by text().
std::string RollCall::problem(int rank, int64_t round, Time now) const {
  const auto i = static_cast<size_t>(rank);
  const Seen& seen = seen_[i];
  if (!known(rank)) {
    if (established() && seen.any && !members_[i].empty()) {
      return "another process has taken its place";
    }
    return seconds_between(start_, now) > settings_.arrive_s
               ? "no heartbeat yet after " + short_seconds(settings_.arrive_s) +
                     " s (DP_PREWARM_ARRIVE_S)"
               : "";
  }
  const RankRecord& record = seen.record;
  if (record.dead) {
    return "its process ended";
  }
  if (record.left) {
    return "it left: its process exits or gave this process group up";
  }
  if (silent(seen, now)) {
    return "no heartbeat for " +
           short_seconds(seconds_between(seen.changed, now)) +
           " s: its process is stopped, or its host or the link to it is down";
  }
  if (record.round >= round) {
    return record.failed && record.round == round ? "it failed" : "";
  }
  const double in_phase = record.phase_s + seconds_between(seen.changed, now);
  return settings_.max_s > 0. && in_phase > settings_.max_s
             ? "it took longer than " + short_seconds(settings_.max_s) +
                   " s (DP_PREWARM_MAX_S)"
             : "";
}

bool RollCall::same_fingerprints(int64_t round) const {
  const std::string* first = nullptr;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    if (!arrived(rank, round)) {
      continue;
    }
    const auto& mine = seen_[static_cast<size_t>(rank)].record.fingerprint;
    if (first == nullptr) {
      first = &mine;
    } else if (*first != mine) {
      return false;
    }
  }
  return true;
}

bool RollCall::decided(int64_t round, Time now) {
  bool stop = !same_fingerprints(round);
  bool open = false;  // somebody may still come, or fail
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    if (!problem(rank, round, now).empty()) {
      stop = true;
    } else if (!arrived(rank, round)) {
      open = true;
    } else if (seen_[static_cast<size_t>(rank)].record.out_of_time) {
      stop = true;
    }
  }
  if (!open) {
    return true;
  }
  if (!stop) {
    stop_since_.reset();
    return false;
  }
  if (!stop_since_ || stop_round_ != round) {
    stop_since_ = now;
    stop_round_ = round;
  }
  return now - *stop_since_ >= kGrace;
}

bool RollCall::drained(int64_t round, Time now) const {
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    const Seen& seen = seen_[static_cast<size_t>(rank)];
    if (known(rank) && !seen.record.dead && !seen.record.left &&
        !silent(seen, now) && seen.record.adopted < round) {
      return false;
    }
  }
  return true;
}

int64_t RollCall::oldest_needed() const {
  int64_t oldest = INT64_MAX;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    const RankRecord& record = seen_[static_cast<size_t>(rank)].record;
    if (known(rank) && !record.dead && !record.left) {
      oldest = std::min(oldest, record.adopted + 1);
    }
  }
  return oldest == INT64_MAX ? 0 : oldest;
}

std::vector<std::string> RollCall::nonces() const {
  std::vector<std::string> all;
  all.reserve(seen_.size());
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    all.push_back(known(rank) ? seen_[static_cast<size_t>(rank)].record.nonce
                              : std::string());
  }
  return all;
}

std::vector<std::string> RollCall::candidates() const {
  auto all = nonces();
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    if (candidate(rank)) {
      const auto i = static_cast<size_t>(rank);
      all[i] = seen_[i].record.nonce;
    }
  }
  return all;
}

std::vector<Neighbour> RollCall::roster(const std::string& place) const {
  std::vector<Neighbour> all;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    const RankRecord& record = seen_[static_cast<size_t>(rank)].record;
    if ((known(rank) || candidate(rank)) && record.place == place) {
      all.push_back({rank, record.nonce, record.pid, record.start});
    }
  }
  return all;
}

std::set<std::string> RollCall::places() const {
  std::set<std::string> all;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    const auto& place = seen_[static_cast<size_t>(rank)].record.place;
    if ((known(rank) || candidate(rank)) && !place.empty()) {
      all.insert(place);
    }
  }
  return all;
}

}  // namespace deepmd_prewarm
