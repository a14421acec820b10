// SPDX-License-Identifier: LGPL-3.0-or-later
// Ranks are threads that share one Store.
#include <deepmd_prewarm/plugin/process_watch.h>
#include <deepmd_prewarm/plugin/rank_agreement.h>
#include <deepmd_prewarm/plugin/rank_record.h>
#include <deepmd_prewarm/plugin/wait_hooks.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <tuple>

#include "gated_store.h"
#include "rank_threads.h"

namespace deepmd_prewarm {
namespace {

using Texts = std::vector<std::string>;

c10::intrusive_ptr<c10d::Store> hash_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

// One rank's part in a group of that Store. Every group is made anew.
class Rank {
 public:
  Rank(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
      : group_(c10::make_intrusive<c10d::ProcessGroup>(store, rank, size)) {}

  void meet(const Meeting& meeting) { agree(group_, "test", meeting); }
  void beat() { start_beats(group_, "test"); }
  int64_t requests() const { return requests_sent(group_); }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

// Heartbeats of a test: quick, so that a death is found quickly.
class QuickBeats {
 public:
  QuickBeats() {
    setenv("DP_PREWARM_BEAT_S", "0.05", 1);
    setenv("DP_PREWARM_DEAD_S", "1", 1);
  }
  ~QuickBeats() {
    unsetenv("DP_PREWARM_BEAT_S");
    unsetenv("DP_PREWARM_DEAD_S");
  }
};

Meeting phase(const std::string& name, const std::string& error = "") {
  Meeting meeting;
  meeting.phase = name;
  meeting.error = error;
  return meeting;
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RankAgreement, LetsAllRanksGoOnRoundAfterRound) {
  const auto store = hash_store();
  const auto raised = on_ranks(4, [&](int rank) {
    Rank me(store, rank, 4);
    for (int round = 0; round < 20; ++round) {
      me.meet(phase("warm"));
    }
  });
  EXPECT_EQ(raised, Texts(4));
}

TEST(RankAgreement, LetsNobodyPassBeforeTheLastRankCame) {
  const auto store = hash_store();
  std::promise<void> gate;
  const auto open = gate.get_future().share();
  std::atomic<int> passed{0};
  auto ranks = std::async(std::launch::async, [&] {
    return on_ranks(3, [&](int rank) {
      if (rank == 2) {
        open.wait();
        EXPECT_EQ(passed.load(), 0);
      }
      Rank(store, rank, 3).meet(phase("warm"));
      ++passed;
    });
  });
  gate.set_value();
  EXPECT_EQ(ranks.get(), Texts(3));
  EXPECT_EQ(passed.load(), 3);
}

TEST(RankAgreement, RaisesOneTextThatNamesEveryFailedRank) {
  const auto store = hash_store();
  const auto raised = on_ranks(3, [&](int rank) {
    Rank(store, rank, 3)
        .meet(
            phase("task " + std::to_string(rank), rank == 1 ? "bad task" : ""));
  });
  EXPECT_TRUE(holds(raised[0], "1 of 3 ranks failed")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "rank 1 in \"task 1\"")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "): bad task")) << raised[0];
  EXPECT_EQ(raised[1], raised[0]);
  EXPECT_EQ(raised[2], raised[0]);
}

TEST(RankAgreement, HandsLongMultiLineAndForeignTextOn) {
  const auto store = hash_store();
  const std::string text =
      "Größe 温度\nsecond line\n" + std::string(20000, 'x') + "\nlast";
  const auto raised = on_ranks(2, [&](int rank) {
    Rank(store, rank, 2).meet(phase("é", rank == 1 ? text : ""));
  });
  EXPECT_TRUE(holds(raised[0], "rank 1 in \"é\"")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "Größe 温度\n    second line\n"));
  EXPECT_TRUE(holds(raised[0], std::string(20000, 'x') + "\n    last"));
  EXPECT_EQ(raised[1], raised[0]);
}

TEST(RankAgreement, ShortensATextThatTheStoreCouldNotCarry) {
  const auto store = hash_store();
  const std::string text = "begin" + std::string(9UL << 20U, 'x') + "end";
  const auto raised = on_ranks(
      2, [&](int rank) { Rank(store, rank, 2).meet(phase("warm", text)); });
  EXPECT_LT(raised[0].size(), 5UL << 20U);
  EXPECT_TRUE(holds(raised[0], "begin"));
  EXPECT_TRUE(holds(raised[0], "9437192 bytes in all"));
  EXPECT_EQ(raised[1], raised[0]);
}

TEST(RankAgreement, WorksAgainAfterARoundThatFailed) {
  const auto store = hash_store();
  const auto raised = on_ranks(2, [&](int rank) {
    Rank me(store, rank, 2);
    EXPECT_THROW(me.meet(phase("warm", rank == 0 ? "bad" : "")), c10::Error);
    me.meet(phase("warm"));
  });
  EXPECT_EQ(raised, Texts(2));
}

TEST(RankAgreement, NamesTheRanksThatDidNotComeInTime) {
  const auto store = hash_store();
  const auto raised = on_ranks(4, [&](int rank) {
    if (rank == 1 || rank == 3) {
      return;
    }
    auto meeting = phase("warm");
    meeting.timeout_s = 0.05;
    Rank(store, rank, 4).meet(meeting);
  });
  EXPECT_TRUE(holds(raised[0], "2 of 4 ranks did not come: rank 1, 3. "))
      << raised[0];
  EXPECT_EQ(raised[2], raised[0]);
}

TEST(RankAgreement, TakesALateRankInForTheNextRound) {
  const auto store = hash_store();
  std::promise<void> gate;
  const auto open = gate.get_future().share();
  const auto raised = on_ranks(3, [&](int rank) {
    auto first = phase("first");
    first.timeout_s = 0.05;
    Rank me(store, rank, 3);
    if (rank == 2) {
      open.wait();
      first.timeout_s = 0.;
    }
    try {
      me.meet(first);
      ADD_FAILURE() << "rank " << rank << " passed";
    } catch (const c10::Error& error) {
      EXPECT_TRUE(holds(error.what(), "1 of 3 ranks did not come: rank 2"));
    }
    if (rank == 0) {
      gate.set_value();
    }
    me.meet(phase("second"));
  });
  EXPECT_EQ(raised, Texts(3));
}

TEST(RankAgreement, NamesTheDifferenceBetweenFingerprints) {
  const auto store = hash_store();
  const auto raised = on_ranks(3, [&](int rank) {
    auto meeting = phase("start");
    meeting.fingerprint = rank == 1 ? "2 tasks\na\nb" : "3 tasks\na\nb\nc";
    Rank(store, rank, 3).meet(meeting);
  });
  EXPECT_TRUE(holds(raised[0], "do not agree")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "rank 1 in \"start\"")) << raised[0];
  EXPECT_TRUE(
      holds(raised[0], "differs from rank 0: \"2 tasks\" against \"3 tasks\""))
      << raised[0];
  EXPECT_EQ(raised[1], raised[0]);
  EXPECT_EQ(raised[2], raised[0]);
}

TEST(RankAgreement, OfOneRankAsksNobody) {
  Rank alone(hash_store(), 0, 1);
  EXPECT_NO_THROW(alone.meet(phase("warm")));
  EXPECT_THROW(alone.meet(phase("warm", "bad")), c10::Error);
  EXPECT_EQ(alone.requests(), 0);
}

TEST(RankAgreement, KeepsABoundedNumberOfKeys) {
  const QuickBeats quick;  // old verdicts go with a beat
  const auto store = hash_store();
  on_ranks(3, [&](int rank) {
    Rank me(store, rank, 3);
    for (int round = 0; round < 200; ++round) {
      me.meet(phase("warm", round % 50 == 7 ? "bad" : ""));
    }
  });
  // beat and text of each rank, lead, host, and a few verdicts
  EXPECT_LE(store->getNumKeys(), 3 + 3 + 2 + 100);
}

TEST(RankAgreement, DoesNotReadWhatAnEarlierAttemptLeft) {
  const auto store = hash_store();
  const auto attempt = [&](const char* count, const std::string& error) {
    setenv("TORCHELASTIC_RESTART_COUNT", count, 1);
    const auto raised = on_ranks(
        2, [&](int rank) { Rank(store, rank, 2).meet(phase("warm", error)); });
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    return raised;
  };
  EXPECT_TRUE(holds(attempt("0", "old error")[0], "old error"));
  EXPECT_EQ(attempt("1", ""), Texts(2));
}

// torchrun's agents count restarts each for itself (pytorch#61590).
TEST(RankAgreement, MeetsRanksWhoseNodesCountRestartsDifferently) {
  const auto store = hash_store();
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  for (int rank = 0; rank < 2; ++rank) {
    setenv("TORCHELASTIC_RESTART_COUNT", std::to_string(rank).c_str(), 1);
    groups.push_back(c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2));
    start_beats(groups.back(), "test");
  }
  unsetenv("TORCHELASTIC_RESTART_COUNT");
  const auto raised = on_ranks(2, [&](int rank) {
    auto meeting = phase("warm");
    meeting.timeout_s = 20.;
    agree(groups[static_cast<size_t>(rank)], "test", meeting);
  });
  EXPECT_EQ(raised, Texts(2));
}

// What rank 1 left in the Store: its process has ended, and it had not yet
// heard of any leader.
c10::intrusive_ptr<c10d::Store> store_of_a_dead_rank(int64_t written_ms) {
  RankRecord record;
  const auto self = ProcessIdentity::own();
  record.nonce = make_nonce();
  record.seq = 1;
  record.host = self.host;
  record.place = self.place;
  record.phase = "read data";
  record.period_s = 1.;
  record.written_ms = written_ms;
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  record.pid = child;
  record.start = process_start(child);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  auto store = hash_store();
  store->set("deepmd_prewarm//2/beat/1", record.packed());
  return store;
}

TEST(RankAgreement, NamesANeighbourThatDiedBeforeItFollowedAnybody) {
  const auto store = store_of_a_dead_rank(boot_ms() + 60000);
  const auto raised = on_ranks(
      1, [&](int /* rank */) { Rank(store, 0, 2).meet(phase("warm")); });
  EXPECT_TRUE(holds(raised[0], "1 of 2 ranks failed")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "rank 1 in \"read data\"")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "its process ended")) << raised[0];
}

TEST(RankAgreement, WaitsForARankOfWhichOnlyAnEarlierJobLeftABeat) {
  const auto store = store_of_a_dead_rank(0);
  auto meeting = phase("warm");
  meeting.timeout_s = 0.5;
  const auto raised =
      on_ranks(1, [&](int /* rank */) { Rank(store, 0, 2).meet(meeting); });
  EXPECT_TRUE(holds(raised[0], "1 of 2 ranks did not come: rank 1"))
      << raised[0];
  EXPECT_TRUE(holds(raised[0], "(never seen)")) << raised[0];
}

TEST(RankAgreement, StartsAnewWithAGroupMadeAgainOverTheSameKeys) {
  const auto store = hash_store();
  for (int time = 0; time < 5; ++time) {
    const auto raised = on_ranks(3, [&](int rank) {
      Rank me(store, rank, 3);
      for (int round = 0; round <= time; ++round) {
        me.meet(phase("warm"));
      }
      EXPECT_THROW(me.meet(phase("warm", rank == 2 ? "bad" : "")), c10::Error);
    });
    EXPECT_EQ(raised, Texts(3)) << time;
  }
}

TEST(RankAgreement, KeepsGroupsOverOneStoreApart) {
  const auto store = hash_store();
  const auto raised = on_ranks(4, [&](int rank) {
    const std::string half = rank < 2 ? "low" : "high";
    const auto own = c10::make_intrusive<c10d::PrefixStore>(half, store);
    const auto group =
        c10::make_intrusive<c10d::ProcessGroup>(own, rank % 2, 2);
    agree(group, half, phase("warm", rank == 3 ? "bad" : ""));
  });
  EXPECT_EQ(raised[0], "");
  EXPECT_EQ(raised[1], "");
  EXPECT_TRUE(holds(raised[2], "bad"));
  EXPECT_TRUE(holds(raised[3], "bad"));
}

struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(RankAgreement, EndsTheWaitOfAnInterruptedRankAndTellsTheOthers) {
  static std::atomic<std::thread::id> interrupted{};
  const auto store = hash_store();
  set_wait_hooks({[] {
                    if (std::this_thread::get_id() == interrupted.load()) {
                      throw Interrupted("Ctrl-C");
                    }
                  },
                  nullptr});
  const auto raised = on_ranks(3, [&](int rank) {
    if (rank == 1) {
      return;  // never comes
    }
    if (rank == 0) {
      interrupted = std::this_thread::get_id();
    }
    Rank(store, rank, 3).meet(phase("warm"));
  });
  set_wait_hooks({});
  EXPECT_EQ(raised[0], "Ctrl-C");
  EXPECT_TRUE(holds(raised[2], "rank 0 in \"warm\"")) << raised[2];
  EXPECT_TRUE(holds(raised[2], "interrupted")) << raised[2];
}

TEST(RankAgreement, LeavesTheTimeoutsOfTheStoreAlone) {
  const auto store = hash_store();
  store->setTimeout(std::chrono::seconds(1234));
  on_ranks(2, [&](int rank) { Rank(store, rank, 2).meet(phase("warm")); });
  EXPECT_EQ(store->getTimeout(), std::chrono::seconds(1234));
}

TEST(RankAgreement, LetsGoOfAStoreWhoseGroupIsGone) {
  const QuickBeats quick;
  const auto store = hash_store();
  on_ranks(2, [&](int rank) { Rank(store, rank, 2).meet(phase("warm")); });
  leave_all(30.);
  EXPECT_EQ(store.use_count(), 1U);
}

TEST(RankAgreement, NamesARankThatGivesItsGroupUp) {
  const QuickBeats quick;
  const auto store = hash_store();
  const auto raised = on_ranks(2, [&](int rank) {
    Rank me(store, rank, 2);
    me.meet(phase("first"));
    if (rank == 0) {
      me.meet(phase("second"));
    }
  });
  EXPECT_TRUE(holds(raised[0], "rank 1 in \"after first\"")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "it left")) << raised[0];
}

// Three ranks over gated ways to one Store, after a first meeting.
class RankAgreementDeath : public testing::Test {
 protected:
  RankAgreementDeath() {
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    for (int rank = 0; rank < 3; ++rank) {
      ways_.push_back(c10::make_intrusive<GatedStore>(shared));
      ranks_.emplace_back(ways_.back(), rank, 3);
    }
    on_ranks(3, [&](int rank) { ranks_[rank].meet(phase("first")); });
  }
  Texts second_meeting_without(int absent) {
    return on_ranks(3, [&](int rank) {
      if (rank != absent) {
        ranks_[static_cast<size_t>(rank)].meet(phase("second"));
      }
    });
  }

  const QuickBeats quick_;
  std::vector<c10::intrusive_ptr<GatedStore>> ways_;
  std::vector<Rank> ranks_;
};

TEST_F(RankAgreementDeath, OfAStoppedRankIsNamedAndToldToItWhenItWakes) {
  ways_[1]->shut();
  const auto raised = second_meeting_without(1);
  EXPECT_TRUE(holds(raised[0], "rank 1 in \"")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "no heartbeat for 1")) << raised[0];
  EXPECT_EQ(raised[2], raised[0]);
  ways_[1]->open();
  const auto woken =
      on_ranks(1, [&](int /* rank */) { ranks_[1].meet(phase("second")); });
  EXPECT_EQ(woken[0], raised[0]);
}

TEST_F(RankAgreementDeath, OfTheLeaderMakesAnotherRankLead) {
  ways_[0]->shut();
  const auto raised = second_meeting_without(0);
  EXPECT_TRUE(holds(raised[1], "rank 0 in \"")) << raised[1];
  EXPECT_TRUE(holds(raised[1], "no heartbeat for ")) << raised[1];
  EXPECT_EQ(raised[2], raised[1]);
  ways_[0]->open();
  const auto woken =
      on_ranks(1, [&](int /* rank */) { ranks_[0].meet(phase("second")); });
  EXPECT_EQ(woken[0], raised[1]);
  const auto third = on_ranks(3, [&](int rank) {
    ranks_[static_cast<size_t>(rank)].meet(phase("third"));
  });
  EXPECT_EQ(third, Texts(3));
}

TEST_F(RankAgreementDeath, OfTheStoreIsSaidByEveryRank) {
  for (const auto& way : ways_) {
    way->cut();
  }
  const auto raised = second_meeting_without(3);
  for (int rank = 0; rank < 3; ++rank) {
    const auto& text = raised[static_cast<size_t>(rank)];
    EXPECT_TRUE(holds(text, "the Store of this group must answer")) << text;
    EXPECT_TRUE(holds(text, "(rank " + std::to_string(rank) + " in \"second\""))
        << text;
    EXPECT_TRUE(holds(text, "Connection reset by peer")) << text;
  }
}

TEST_F(RankAgreementDeath, OfTheLinkToTheStoreIsSaidWithoutAnAnswer) {
  ways_[2]->shut();
  const auto raised = on_ranks(3, [&](int rank) {
    ranks_[static_cast<size_t>(rank)].meet(phase("second"));
  });
  EXPECT_TRUE(holds(raised[2], "the Store of this group must answer"))
      << raised[2];
  EXPECT_TRUE(holds(raised[2], "No answer for 5")) << raised[2];
  EXPECT_TRUE(holds(raised[0], "rank 2 in")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "no heartbeat")) << raised[0];
  EXPECT_EQ(raised[1], raised[0]);
  ways_[2]->open();
}

TEST(RankAgreement, LogsWhoIsSlowOnEveryWaitingRank) {
  static std::mutex mutex;
  static std::vector<std::string> lines;
  static std::promise<void> both;
  set_wait_hooks({nullptr, [](const std::string& line) {
                    const std::lock_guard<std::mutex> lock(mutex);
                    lines.push_back(line);
                    if (lines.size() == 2) {
                      both.set_value();
                    }
                  }});
  const QuickBeats quick;
  setenv("DP_PREWARM_SLOW_S", "0.2", 1);
  const auto store = hash_store();
  const auto raised = on_ranks(3, [&](int rank) {
    Rank me(store, rank, 3);
    me.meet(phase("compile water"));
    if (rank == 2) {
      both.get_future().wait();
    }
    me.meet(phase("train"));
  });
  unsetenv("DP_PREWARM_SLOW_S");
  set_wait_hooks({});
  EXPECT_EQ(raised, Texts(3));
  for (const auto& line : lines) {
    EXPECT_TRUE(holds(line,
                      "alive but slow, the other ranks wait for rank 2 "
                      "in \"after compile water\""))
        << line;
  }
}

TEST(RankAgreement, RefusesSettingsThatAreNoTimes) {
  for (const auto& [name, value, part] :
       std::vector<std::tuple<const char*, const char*, const char*>>{
           {"DP_PREWARM_BEAT_S", "soon", "got \"soon\""},
           {"DP_PREWARM_BEAT_S", "0", "must be > 0"},
           {"DP_PREWARM_DEAD_S", "0.5", "at least two beats"},
           {"DP_PREWARM_SLOW_S", "-1", "got \"-1\""}}) {
    setenv(name, value, 1);
    try {
      Rank(hash_store(), 0, 2).beat();
      ADD_FAILURE() << name << " " << value;
    } catch (const c10::ValueError& error) {
      EXPECT_TRUE(holds(error.what(), name)) << error.what();
      EXPECT_TRUE(holds(error.what(), part)) << error.what();
    }
    unsetenv(name);
  }
}

TEST(RankAgreement, WorksOverAFileStore) {
  const std::string path = testing::TempDir() + "rank_agreement_file_store";
  std::remove(path.c_str());
  const auto raised = on_ranks(2, [&](int rank) {
    const auto store = c10::make_intrusive<c10d::FileStore>(path, 2);
    Rank me(store, rank, 2);
    for (int round = 0; round < 3; ++round) {
      me.meet(phase("warm"));
    }
    EXPECT_THROW(me.meet(phase("warm", rank == 1 ? "bad" : "")), c10::Error);
  });
  EXPECT_EQ(raised, Texts(2));
}

c10::intrusive_ptr<c10d::TCPStore> tcp_server(bool libuv) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.useLibUV = libuv;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

TEST(RankAgreement, WorksOverTcpStoresWithAndWithoutLibuv) {
  for (const bool libuv : {true, false}) {
    const auto server = tcp_server(libuv);
    const auto raised = on_ranks(3, [&](int rank) {
      Rank me(server->clone(), rank, 3);
      for (int round = 0; round < 3; ++round) {
        me.meet(phase("warm"));
      }
    });
    EXPECT_EQ(raised, Texts(3)) << libuv;
  }
}

TEST(RankAgreement, SaysThatTheServerOfATcpStoreIsGone) {
  auto server = tcp_server(true);
  const auto client = server->clone();
  const auto raised = on_ranks(2, [&](int rank) {
    if (rank == 0) {
      while (!server->check({"deepmd_prewarm//2/beat/1"})) {
        std::this_thread::yield();
      }
      server.reset();
      return;
    }
    Rank(client, 1, 2).meet(phase("warm"));
  });
  EXPECT_TRUE(holds(raised[1], "the Store of this group must answer"))
      << raised[1];
  EXPECT_TRUE(holds(raised[1], "rank 1 in \"warm\"")) << raised[1];
}

}  // namespace
}  // namespace deepmd_prewarm
