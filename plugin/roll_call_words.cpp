// SPDX-License-Identifier: LGPL-3.0-or-later
// What a roll call says: the text of a verdict, and lines about slow ranks.
#include <deepmd_prewarm/plugin/roll_call.h>
#include <deepmd_prewarm/plugin/verdict_text.h>

#include <algorithm>
#include <map>

namespace deepmd_prewarm {
namespace {

double seconds_between(RollCall::Time from, RollCall::Time to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

std::string RollCall::text(
    int64_t round,
    Time now,
    const std::function<std::optional<RankText>(int)>& read_text) const {
  std::vector<std::pair<int, std::string>> failed;
  bool out_of_time = false;
  bool open = false;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    auto why = problem(rank, round, now);
    const bool came = arrived(rank, round);
    const RankRecord& record = seen_[static_cast<size_t>(rank)].record;
    if (!why.empty()) {
      if (came && record.failed) {
        const auto own = read_text(rank);
        if (own && own->nonce == record.nonce && own->round == round) {
          why = own->error;
        }
      }
      failed.emplace_back(rank, why);
    }
    out_of_time = out_of_time || (came && record.out_of_time);
    open = open || !came;
  }
  if (!failed.empty()) {
    return failure_text(failed, static_cast<int>(seen_.size()),
                        [&](int rank) { return who(rank, now, true); });
  }
  if (!same_fingerprints(round)) {
    return mismatch(round, now, read_text);
  }
  return open && out_of_time ? absentees(round, now) : "";
}

std::string RollCall::mismatch(
    int64_t round,
    Time now,
    const std::function<std::optional<RankText>(int)>& read_text) const {
  // Compare with what most ranks say: one odd rank shall be one line.
  std::map<std::string, std::vector<int>> groups;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    if (arrived(rank, round)) {
      groups[seen_[static_cast<size_t>(rank)].record.fingerprint].push_back(
          rank);
    }
  }
  const auto most = std::max_element(
      groups.begin(), groups.end(), [](const auto& a, const auto& b) {
        return std::make_pair(a.second.size(), -a.second.front()) <
               std::make_pair(b.second.size(), -b.second.front());
      });
  const auto read = [&](int rank) {
    const auto own = read_text(rank);
    return own ? own->fingerprint : std::string();
  };
  const int reference = most->second.front();
  const std::string expected = read(reference);
  std::vector<std::pair<int, std::string>> odd;
  for (const auto& [fingerprint, ranks] : groups) {
    if (fingerprint == most->first) {
      continue;
    }
    const std::string found = difference(read(ranks.front()), expected);
    for (const int rank : ranks) {
      odd.emplace_back(rank, "differs from rank " + std::to_string(reference) +
                                 ": " + found);
    }
  }
  std::sort(odd.begin(), odd.end());
  return mismatch_text(odd, [&](int rank) { return who(rank, now, false); });
}

std::string RollCall::absentees(int64_t round, Time now) const {
  std::vector<int> missing;
  std::vector<int> waited;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    if (!arrived(rank, round)) {
      missing.push_back(rank);
    } else if (seen_[static_cast<size_t>(rank)].record.out_of_time) {
      waited.push_back(rank);
    }
  }
  const auto& first = seen_[static_cast<size_t>(waited.front())].record;
  return absentee_text(missing, static_cast<int>(seen_.size()), waited.front(),
                       first.phase, first.phase_s,
                       [&](int rank) { return who(rank, now, true); });
}

std::string RollCall::who(int rank, Time now, bool with_time) const {
  std::string name = "rank " + std::to_string(rank);
  if (!known(rank)) {
    return name + " (never seen)";
  }
  const Seen& seen = seen_[static_cast<size_t>(rank)];
  name += " in \"" + seen.record.phase + "\"";
  const double in_phase =
      seen.record.phase_s + seconds_between(seen.changed, now);
  if (with_time && in_phase >= 1.) {
    name += " for " + short_seconds(in_phase) + " s";
  }
  return name + " (host " + seen.record.host + ", pid " +
         std::to_string(seen.record.pid) + ")";
}

std::optional<std::string> RollCall::notice(int64_t round, Time now) {
  if (settings_.slow_s <= 0.) {
    return std::nullopt;
  }
  std::vector<std::string> slow;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    Seen& seen = seen_[static_cast<size_t>(rank)];
    if (!known(rank) || arrived(rank, round) || silent(seen, now)) {
      continue;
    }
    const double in_phase =
        seen.record.phase_s + seconds_between(seen.changed, now);
    if (in_phase >= seen.slow_limit_s) {
      while (seen.slow_limit_s <= in_phase) {
        seen.slow_limit_s *= 2.;
      }
      slow.push_back(who(rank, now, true));
    }
  }
  if (slow.empty()) {
    return std::nullopt;
  }
  return slow_line(slow);
}

}  // namespace deepmd_prewarm
