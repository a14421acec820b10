// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>
#include <deepmd_prewarm/plugin/rank_record.h>
#include <deepmd_prewarm/plugin/rank_settings.h>

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace deepmd_prewarm {

/// What the leader makes of all heartbeats: who came, who is alive, dead or
/// not there yet, and when a round ends with which text.
///
/// No Store and no clock of its own: times are handed in, so that a test plays
/// an hour in a millisecond. Not thread-safe.
class DEEPMD_PREWARM_API RollCall {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// `start`: since when ranks are expected to show up.
  RollCall(int size, const RankSettings& settings, Time start);

  /// Records that echo this leader's nonce were written for this session.
  void trust(const std::string& leader_nonce);

  /// The nonces of all ranks are known from now on ("" = not yet).
  void establish(const std::vector<std::string>& members);
  bool established() const { return !members_.empty(); }
  const std::vector<std::string>& members() const { return members_; }

  /// What beat/<rank> holds, read at `now`.
  void see(int rank, const RankRecord& record, Time now);

  /// `rank` was last heard of at `when`, by another way than see(); before the
  /// first see() of it.
  void heard(int rank, Time when);

  /// The reader itself was away: nobody's silence counts for that long.
  void forgive(std::chrono::steady_clock::duration away);

  /// A rank that the session does not know yet asks to join.
  bool newcomer(int rank) const;
  void admit(int rank);

  /// Whether anybody waits in `round`.
  bool pending(int64_t round) const;

  /// Whether `round` can end: all came, or a reason to stop is old enough for
  /// others that failed with it to be known too.
  bool decided(int64_t round, Time now);

  /// The text of the verdict after decided(); empty: all go on. `read_text`
  /// fetches text/<rank>, for few ranks only.
  std::string text(
      int64_t round,
      Time now,
      const std::function<std::optional<RankText>(int)>& read_text) const;

  /// A line about ranks that are alive but long in one phase while others wait
  /// in `round`; at settings.slow_s, twice that, four times that, ...
  std::optional<std::string> notice(int64_t round, Time now);

  /// Every rank that is alive has the verdicts up to `round`.
  bool drained(int64_t round, Time now) const;

  /// Verdicts before this one are read by nobody any more.
  int64_t oldest_needed() const;

  /// The nonce of each rank as now known, "" where none is.
  std::vector<std::string> nonces() const;

  /// The same, and of ranks that may belong here but have not yet followed.
  std::vector<std::string> candidates() const;

  /// All processes of one host, candidates included.
  std::vector<Neighbour> roster(const std::string& place) const;
  std::set<std::string> places() const;

 private:
  struct Seen {
    RankRecord record;
    Time changed;
    std::optional<Time> heard;
    bool any = false;
    double slow_limit_s = 0.;
  };

  bool known(int rank) const;
  bool candidate(int rank) const;
  bool silent(const Seen& seen, Time now) const;
  bool arrived(int rank, int64_t round) const;
  std::string problem(int rank, int64_t round, Time now) const;
  std::string who(int rank, Time now, bool with_time) const;
  std::string mismatch(
      int64_t round,
      Time now,
      const std::function<std::optional<RankText>(int)>& read_text) const;
  std::string absentees(int64_t round, Time now) const;
  bool same_fingerprints(int64_t round) const;

  const RankSettings settings_;
  const Time start_;
  std::vector<Seen> seen_;
  std::vector<std::string> members_;  // empty: not established
  std::set<std::string> trusted_;
  std::optional<Time> stop_since_;
  int64_t stop_round_ = 0;
};

}  // namespace deepmd_prewarm
