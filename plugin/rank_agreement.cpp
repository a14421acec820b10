// SPDX-License-Identifier: LGPL-3.0-or-later
// One round: each rank writes its own key, whoever sees all of them (or sees a
// reason to stop) publishes the verdict by compare-and-set, everyone takes the
// verdict that stands. So no rank can pass while another raises.
#include <c10/util/Exception.h>
#include <deepmd_prewarm/plugin/interrupt_check.h>
#include <deepmd_prewarm/plugin/rank_agreement.h>
#include <deepmd_prewarm/plugin/store_link.h>
#include <deepmd_prewarm/plugin/store_record.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

namespace deepmd_prewarm {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// A TCPStore value may be 8 MiB, one byte more kills the connection.
constexpr size_t kMaxRankText = 256UL << 10U;
constexpr size_t kMaxVerdict = 4UL << 20U;
constexpr std::chrono::milliseconds kFirstPoll{2};
constexpr std::chrono::milliseconds kLastPoll{50};
constexpr const char* kPassed = "passed";

std::string env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

// The Store of an elastic job outlives an attempt: its keys must not.
std::string scope(int size) {
  return "deepmd_prewarm/" + env("TORCHELASTIC_RUN_ID") + "/" +
         env("TORCHELASTIC_RESTART_COUNT") + "/" + std::to_string(size) + "/";
}

int64_t next_round(const Members& members) {
  static std::mutex mutex;  // guards rounds
  static auto* rounds =
      new std::map<std::tuple<std::string, int, int>, int64_t>();
  const std::lock_guard<std::mutex> lock(mutex);
  return (*rounds)[{members.name, members.rank, members.size}]++;
}

struct Arrival {
  std::string phase;
  std::string error;
  std::string fingerprint;
  std::string where;  // host and process
};

std::string packed(const Meeting& meeting, const std::string& error) {
  return pack({shorten(meeting.phase, kMaxRankText),
               shorten(error, kMaxRankText),
               shorten(meeting.fingerprint, kMaxRankText),
               "host " + host_name() + ", pid " + std::to_string(getpid())});
}

Arrival parsed(const std::string& value) {
  const auto fields = unpack(value);
  if (!fields || fields->size() != 4) {
    return {"", "wrote a record that this version cannot read", "", ""};
  }
  return {(*fields)[0], (*fields)[1], (*fields)[2], (*fields)[3]};
}

std::string indented(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c;
    if (c == '\n') {
      out += "    ";
    }
  }
  return out;
}

std::string named(int rank, const Arrival& who) {
  return "\n  rank " + std::to_string(rank) + " in \"" + who.phase + "\" (" +
         who.where + "): ";
}

// The first line in which the two differ, as "a" against "b".
std::string difference(const std::string& mine, const std::string& other) {
  size_t a = 0;
  size_t b = 0;
  while (a <= mine.size() && b <= other.size()) {
    const size_t a_end = std::min(mine.find('\n', a), mine.size());
    const size_t b_end = std::min(other.find('\n', b), other.size());
    const std::string x = mine.substr(a, a_end - a);
    const std::string y = other.substr(b, b_end - b);
    if (x != y) {
      return "\"" + x + "\" against \"" + y + "\"";
    }
    a = a_end + 1;
    b = b_end + 1;
  }
  return a <= mine.size() ? "\"" + mine.substr(a) + "\" against nothing more"
                          : "nothing more against \"" + other.substr(b) + "\"";
}

std::string failures(const std::map<int, Arrival>& came, int size) {
  std::vector<int> failed;
  for (const auto& [rank, who] : came) {
    if (!who.error.empty()) {
      failed.push_back(rank);
    }
  }
  std::string text;
  if (!failed.empty()) {
    const size_t share = kMaxVerdict / failed.size();
    text = std::to_string(failed.size()) + " of " + std::to_string(size) +
           " ranks failed, so none goes on.";
    for (const int rank : failed) {
      const Arrival& who = came.at(rank);
      text += named(rank, who) + shorten(indented(who.error), share);
    }
    return text;
  }
  const auto& first = *came.begin();
  size_t listed = 0;
  for (const auto& [rank, who] : came) {
    if (who.fingerprint == first.second.fingerprint) {
      continue;
    }
    if (text.empty()) {
      text = "the ranks do not agree on what they are doing.";
    }
    if (++listed <= 8) {
      text += named(rank, who) + "differs from rank " +
              std::to_string(first.first) + ": " +
              shorten(difference(who.fingerprint, first.second.fingerprint),
                      kMaxRankText);
    }
  }
  return text;
}

class Round {
 public:
  Round(const Members& members, const Meeting& meeting)
      : members_(members),
        meeting_(meeting),
        number_(next_round(members)),
        link_(members.store, scope(members.size)),
        start_(Clock::now()) {
    for (int rank = 0; rank < members.size; ++rank) {
      missing_.push_back(rank);
    }
  }

  // The text of the verdict; empty: all ranks go on.
  std::string verdict() {
    link_.write(arrival_key(number_, members_.rank),
                packed(meeting_, meeting_.error));
    auto pause = kFirstPoll;
    while (true) {
      if (auto text = link_.read(verdict_key(number_))) {
        return finish(*text);
      }
      try {
        check_interrupt();
      } catch (...) {
        abandon("left the wait (interrupted)");
        throw;
      }
      collect();
      const bool stop = std::any_of(
          came_.begin(), came_.end(),
          [](const auto& entry) { return !entry.second.error.empty(); });
      if (missing_.empty() || stop) {
        publish(failures(came_, members_.size));
      } else if (out_of_time()) {
        publish(absentees());
      } else {
        std::this_thread::sleep_for(pause);
        pause = std::min(pause * 2, kLastPoll);
      }
    }
  }

 private:
  static std::string arrival_key(int64_t round, int rank) {
    return std::to_string(round) + "/rank/" + std::to_string(rank);
  }
  static std::string verdict_key(int64_t round) {
    return std::to_string(round) + "/verdict";
  }

  void collect() {
    std::vector<int> still;
    for (const int rank : missing_) {
      if (auto value = link_.read(arrival_key(number_, rank))) {
        came_[rank] = parsed(*value);
      } else {
        still.push_back(rank);
      }
    }
    missing_ = still;
  }

  bool out_of_time() const {
    return meeting_.timeout_s > 0. &&
           Seconds(Clock::now() - start_).count() >= meeting_.timeout_s;
  }

  std::string absentees() const {
    std::string text = std::to_string(missing_.size()) + " of " +
                       std::to_string(members_.size) +
                       " ranks did not come within ";
    std::string seconds = std::to_string(meeting_.timeout_s);
    text += seconds.substr(0, seconds.find('.') + 3) + " s: rank";
    for (const int rank : missing_) {
      text += " " + std::to_string(rank);
    }
    return text + " (rank " + std::to_string(members_.rank) + " waited in \"" +
           meeting_.phase + "\").";
  }

  void publish(const std::string& text) {
    link_.write_once(verdict_key(number_), "", text.empty() ? kPassed : text);
  }

  void abandon(const std::string& why) {
    try {
      Arrival me{meeting_.phase, why, "",
                 "host " + host_name() + ", pid " + std::to_string(getpid())};
      publish(failures({{members_.rank, me}}, members_.size));
    } catch (const std::exception&) {
      // The Store is gone as well; the others will say so themselves.
    }
  }

  // All ranks have left round n-1 once round n has a verdict with all of them;
  // in a round that ended early a straggler may still read it, so keep two.
  std::string finish(const std::string& text) {
    if (number_ >= 2) {
      link_.erase(arrival_key(number_ - 2, members_.rank));
      if (members_.rank == 0) {
        link_.erase(verdict_key(number_ - 2));
      }
    }
    return text == kPassed ? "" : text;
  }

  const Members& members_;
  const Meeting& meeting_;
  const int64_t number_;
  StoreLink link_;
  Clock::time_point start_;
  std::vector<int> missing_;
  std::map<int, Arrival> came_;
};

}  // namespace

void agree(const Members& members, const Meeting& meeting) {
  if (members.size <= 1) {
    TORCH_CHECK(meeting.error.empty(), "sync_ranks: ", meeting.phase, ": ",
                meeting.error);
    return;
  }
  std::string text;
  std::string gone;
  try {
    text = Round(members, meeting).verdict();
  } catch (const c10::Error& error) {
    gone = error.what_without_backtrace();
  } catch (const std::system_error& error) {
    gone = error.what();
  }
  TORCH_CHECK(gone.empty(),
              "sync_ranks: the Store of this group must answer, it no longer "
              "does (rank ",
              members.rank, " in \"", meeting.phase,
              "\"). The process that hosts it has probably ended: look for "
              "the first error of rank 0 or of the launcher. ",
              gone);
  TORCH_CHECK(text.empty(), "sync_ranks: ", text);
}

}  // namespace deepmd_prewarm
