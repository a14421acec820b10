// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/rank_state.h>
#include <deepmd_prewarm/plugin/roll_call.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>

namespace deepmd_prewarm {

/// The native thread of one rank of one group: beats, follows the leader or
/// leads, takes verdicts, buries neighbours. Needs no GIL. All Store traffic of
/// the group's agreement is its.
class RankWatcher {
 public:
  /// `expired`: the process group is gone, nobody will meet any more.
  RankWatcher(std::shared_ptr<RankState> state, std::function<bool()> expired);

  /// The thread's body. Never throws; sets state->gone if the Store fails and
  /// state->ended at the end.
  void run(c10::intrusive_ptr<c10d::Store> store);

 private:
  using Clock = std::chrono::steady_clock;

  // What this turn has to do, copied from the state under its lock.
  struct Turn {
    Clock::time_point now;
    RankRecord record;
    RankText text;
    int64_t news = 0;
    bool waits = false;  // the other thread waits for something
    bool draining = false;
    bool beat = false;
    bool leave = false;
  };

  void loop();
  Turn take_turn();
  void write_beat(Turn& turn);
  void leave(Turn& turn);
  Clock::duration pause(const Turn& turn);
  bool established() const { return !session_.empty(); }

  // Verdicts (rank_watcher_verdicts.cpp)
  void take_verdicts();
  std::optional<VerdictRecord> valid_verdict(const std::string& value,
                                             int64_t round) const;
  void adopt(const VerdictRecord& verdict);
  void take_admission();
  void publish(int64_t round, const std::string& text);
  void admit(int rank);

  // Leader and follower (rank_watcher_lead.cpp)
  void follow(const Turn& turn);
  void take_lease(const std::string& value, Clock::time_point now);
  void read_roster();
  void watch_neighbours(const std::string& roster);
  bool may_take_over(Clock::time_point now) const;
  void take_over(Clock::time_point now);
  void lead(const Turn& turn);
  void renew_lease(bool left);
  void read_beats(Clock::time_point now);
  void write_rosters();
  void drop_old_verdicts();
  void bury(int rank);
  bool is_of_our_time(const RankRecord& record, int rank) const;
  void bury_again();

  std::shared_ptr<RankState> state_;
  std::function<bool()> expired_;
  StoreLink& link_;
  const int rank_;
  const int size_;
  const Clock::time_point start_;

  Clock::time_point last_turn_;
  Clock::time_point next_beat_;
  Clock::duration poll_;
  int stalls_ = 0;  // turns in a row that came late
  int64_t seq_ = 0;
  int64_t news_written_ = 0;
  int64_t text_round_ = 0;
  bool text_failed_ = false;

  std::string session_;               // "": not established
  std::vector<std::string> members_;  // nonces, once established
  int64_t adopted_ = 0;

  bool leads_ = false;
  bool pending_ = false;     // somebody waits for the next verdict
  std::string lease_value_;  // as last read or written; "": none
  std::optional<Lease> lease_;
  Clock::time_point lease_changed_;
  RollCall roll_;
  std::set<int> seen_;                          // ranks whose beat exists
  std::map<std::string, std::string> rosters_;  // place -> as written
  std::vector<std::string> roster_nonces_;      // of that time
  int64_t oldest_verdict_ = 1;
  std::string last_failure_;

  std::string roster_value_;
  std::map<int, Neighbour> neighbours_;
  std::map<int, int> graves_;  // rank -> beats until it is left alone
};

}  // namespace deepmd_prewarm
