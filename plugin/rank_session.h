// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/rank_agreement.h>
#include <deepmd_prewarm/plugin/rank_state.h>

#include <memory>
#include <string>

namespace deepmd_prewarm {

/// This process's part in the meetings of one process group: the state and the
/// thread that keeps it, and the wait of the thread that meets.
class RankSession {
 public:
  /// Starts the (detached) thread. `phase`: what this process does now.
  /// `since_ms`: as for RankState.
  RankSession(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
              const RankSettings& settings,
              const std::string& phase,
              int64_t since_ms);

  /// Whether `group` is the very object this session was made for. Its address
  /// cannot be used again while the session lives.
  bool is_for(const c10d::ProcessGroup* group) const;

  void meet(const Meeting& meeting);
  void enter_phase(const std::string& phase);
  void rest();

  /// Asks the thread to say good-bye and to end.
  void retire();
  /// Whether it has ended, after at most `patience_s`.
  bool ended_within(double patience_s);

  bool of_this_process() const;
  int64_t requests() const { return state_->link.requests(); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void enter(Lock& lock, const Meeting& meeting);
  void wait_for_verdict(Lock& lock, const Meeting& meeting);
  void wait_until_taken(Lock& lock);
  void serve_hooks(Lock& lock, const Meeting& meeting);
  void check_store(const Meeting& meeting) const;
  void tell();

  // Leaked: the last weak reference would delete the group on our thread. What
  // stays is a shell of a few hundred bytes for each group that met.
  const c10::weak_intrusive_ptr<c10d::ProcessGroup>& group_;
  std::shared_ptr<RankState> state_;
  bool meeting_ = false;  // guarded by state_->mutex
};

}  // namespace deepmd_prewarm
