// SPDX-License-Identifier: LGPL-3.0-or-later
// How a verdict is published once, and taken by everyone it is meant for.
#include <deepmd_prewarm/plugin/rank_watcher.h>

namespace deepmd_prewarm {
namespace {

std::string verdict_key(int64_t round) {
  return "verdict/" + std::to_string(round);
}

std::string admit_key(int rank) { return "admit/" + std::to_string(rank); }

}  // namespace

void RankWatcher::take_verdicts() {
  while (true) {
    const auto key = verdict_key(adopted_ + 1);
    if (!link_.has({key})) {
      break;
    }
    const auto verdict =
        valid_verdict(link_.read_all({key}).front(), adopted_ + 1);
    if (!verdict) {
      break;
    }
    adopt(*verdict);
  }
  if (!established() && lease_) {
    take_admission();
  }
}

// A verdict that an earlier group left under the same key is none of ours.
std::optional<VerdictRecord> RankWatcher::valid_verdict(
    const std::string& value, int64_t round) const {
  auto verdict = VerdictRecord::parse(value);
  if (!verdict || verdict->round != round) {
    return std::nullopt;
  }
  const auto me = static_cast<size_t>(rank_);
  const bool ours = established() ? verdict->session == session_
                                  : verdict->members.size() > me &&
                                        verdict->members[me] == state_->nonce;
  return ours ? verdict : std::nullopt;
}

void RankWatcher::adopt(const VerdictRecord& verdict) {
  if (!established()) {
    session_ = verdict.session;
    members_ = verdict.members;
    roll_.establish(members_);
  }
  adopted_ = verdict.round;
  if (!verdict.text.empty()) {
    last_failure_ = verdict.text;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->adopted = adopted_;
  state_->verdicts[adopted_] = verdict.text;
  ++state_->news;
  state_->changed.notify_all();
}

// A rank that came after the first round ended joins here: its first meeting
// gets the text, its next ones belong to the next rounds of the others.
void RankWatcher::take_admission() {
  const auto value = link_.read(admit_key(rank_));
  if (!value) {
    return;
  }
  const auto admission = VerdictRecord::parse(*value);
  const auto me = static_cast<size_t>(rank_);
  if (!admission || admission->members.size() <= me ||
      admission->members[me] != state_->nonce) {
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->round = admission->round - (state_->round == 0 ? 1 : 0);
  }
  adopt(*admission);
}

void RankWatcher::publish(int64_t round, const std::string& text) {
  const auto key = verdict_key(round);
  const auto standing = link_.read(key).value_or("");
  if (const auto earlier = valid_verdict(standing, round)) {
    adopt(*earlier);  // of a leader that did not live to see it taken
    return;
  }
  VerdictRecord verdict;
  verdict.session = established() ? session_ : make_nonce();
  verdict.round = round;
  verdict.text = text;
  if (!established()) {
    verdict.members = roll_.nonces();
  }
  const auto value = verdict.packed();
  if (link_.write_once(key, standing, value) == value) {
    adopt(verdict);
  }  // else another leader was quicker: the next turn takes its verdict
}

void RankWatcher::admit(int rank) {
  const bool known_before = !members_[static_cast<size_t>(rank)].empty();
  roll_.admit(rank);
  members_ = roll_.members();
  VerdictRecord admission;
  admission.session = session_;
  admission.round = adopted_;
  admission.members = members_;
  admission.text =
      known_before || last_failure_.empty()
          ? "this process came as rank " + std::to_string(rank) +
                " after the others had met " + std::to_string(adopted_) +
                " times, so it cannot go on with them. Make a new process "
                "group after a process was replaced."
          : last_failure_;
  link_.write(admit_key(rank), admission.packed());
}

}  // namespace deepmd_prewarm
