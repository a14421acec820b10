// SPDX-License-Identifier: LGPL-3.0-or-later
// Ranks are threads that share one Store.
#include <deepmd_prewarm/plugin/interrupt_check.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "rank_threads.h"

namespace deepmd_prewarm {
namespace {

using Texts = std::vector<std::string>;

c10::intrusive_ptr<c10d::Store> hash_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

// A name that no other test uses: rounds are counted for each name.
std::string fresh_name() {
  static std::atomic<int> count{0};
  return "test group " + std::to_string(++count);
}

Members members(const c10::intrusive_ptr<c10d::Store>& store,
                const std::string& name,
                int rank,
                int size) {
  return Members{store, name, rank, size};
}

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
  const auto name = fresh_name();
  const auto raised = on_ranks(4, [&](int rank) {
    for (int round = 0; round < 20; ++round) {
      agree(members(store, name, rank, 4), phase("warm"));
    }
  });
  EXPECT_EQ(raised, Texts(4));
}

TEST(RankAgreement, LetsNobodyPassBeforeTheLastRankCame) {
  const auto store = hash_store();
  const auto name = fresh_name();
  std::promise<void> gate;
  const auto open = gate.get_future().share();
  std::atomic<int> passed{0};
  auto ranks = std::async(std::launch::async, [&] {
    return on_ranks(3, [&](int rank) {
      if (rank == 2) {
        open.wait();
        EXPECT_EQ(passed.load(), 0);
      }
      agree(members(store, name, rank, 3), phase("warm"));
      ++passed;
    });
  });
  gate.set_value();
  EXPECT_EQ(ranks.get(), Texts(3));
  EXPECT_EQ(passed.load(), 3);
}

TEST(RankAgreement, RaisesOneTextThatNamesEveryFailedRank) {
  const auto store = hash_store();
  const auto name = fresh_name();
  const auto raised = on_ranks(3, [&](int rank) {
    agree(members(store, name, rank, 3),
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
  const auto name = fresh_name();
  const std::string text =
      "Größe 温度\nsecond line\n" + std::string(20000, 'x') + "\nlast";
  const auto raised = on_ranks(2, [&](int rank) {
    agree(members(store, name, rank, 2), phase("é", rank == 1 ? text : ""));
  });
  EXPECT_TRUE(holds(raised[0], "rank 1 in \"é\"")) << raised[0];
  EXPECT_TRUE(holds(raised[0], "Größe 温度\n    second line\n"));
  EXPECT_TRUE(holds(raised[0], std::string(20000, 'x') + "\n    last"));
  EXPECT_EQ(raised[1], raised[0]);
}

TEST(RankAgreement, ShortensATextThatTheStoreCouldNotCarry) {
  const auto store = hash_store();
  const auto name = fresh_name();
  const auto raised = on_ranks(2, [&](int rank) {
    agree(members(store, name, rank, 2),
          phase("warm", "begin" + std::string(9UL << 20U, 'x') + "end"));
  });
  EXPECT_LT(raised[0].size(), 5UL << 20U);
  EXPECT_TRUE(holds(raised[0], "begin"));
  EXPECT_TRUE(holds(raised[0], "9437192 bytes in all"));
  EXPECT_EQ(raised[1], raised[0]);
}

TEST(RankAgreement, WorksAgainAfterARoundThatFailed) {
  const auto store = hash_store();
  const auto name = fresh_name();
  const auto raised = on_ranks(2, [&](int rank) {
    EXPECT_THROW(agree(members(store, name, rank, 2),
                       phase("warm", rank == 0 ? "bad" : "")),
                 c10::Error);
    agree(members(store, name, rank, 2), phase("warm"));
  });
  EXPECT_EQ(raised, Texts(2));
}

TEST(RankAgreement, NamesTheRanksThatDidNotComeInTime) {
  const auto store = hash_store();
  const auto name = fresh_name();
  const auto raised = on_ranks(4, [&](int rank) {
    if (rank == 1 || rank == 3) {
      return;
    }
    auto meeting = phase("warm");
    meeting.timeout_s = 0.05;
    agree(members(store, name, rank, 4), meeting);
  });
  EXPECT_TRUE(holds(raised[0],
                    "2 of 4 ranks did not come within 0.05 s: "
                    "rank 1 3"))
      << raised[0];
  EXPECT_EQ(raised[2], raised[0]);
}

TEST(RankAgreement, NamesTheDifferenceBetweenFingerprints) {
  const auto store = hash_store();
  const auto name = fresh_name();
  const auto raised = on_ranks(3, [&](int rank) {
    auto meeting = phase("start");
    meeting.fingerprint = rank == 1 ? "2 tasks\na\nb" : "3 tasks\na\nb\nc";
    agree(members(store, name, rank, 3), meeting);
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
  const Members alone{nullptr, fresh_name(), 0, 1};
  EXPECT_NO_THROW(agree(alone, phase("warm")));
  EXPECT_THROW(agree(alone, phase("warm", "bad")), c10::Error);
}

TEST(RankAgreement, KeepsABoundedNumberOfKeys) {
  const auto store = hash_store();
  const auto name = fresh_name();
  const auto rounds = [&](int count) {
    on_ranks(3, [&](int rank) {
      for (int round = 0; round < count; ++round) {
        agree(members(store, name, rank, 3), phase("warm"));
      }
    });
  };
  rounds(5);
  const auto keys = store->getNumKeys();
  rounds(20);
  EXPECT_LE(store->getNumKeys(), keys);
}

TEST(RankAgreement, DoesNotReadWhatAnEarlierAttemptLeft) {
  const auto store = hash_store();
  const auto attempt = [&](const char* count, const std::string& error) {
    setenv("TORCHELASTIC_RESTART_COUNT", count, 1);
    const auto name = fresh_name();  // a new process counts from zero
    const auto raised = on_ranks(2, [&](int rank) {
      agree(members(store, name, rank, 2), phase("warm", error));
    });
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    return raised;
  };
  EXPECT_TRUE(holds(attempt("0", "old error")[0], "old error"));
  EXPECT_EQ(attempt("1", ""), Texts(2));
}

TEST(RankAgreement, KeepsGroupsOverOneStoreApart) {
  const auto store = hash_store();
  const auto raised = on_ranks(4, [&](int rank) {
    const std::string half = rank < 2 ? "low" : "high";
    const auto own = c10::make_intrusive<c10d::PrefixStore>(half, store);
    agree(members(own, half, rank % 2, 2),
          phase("warm", rank == 3 ? "bad" : ""));
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
  static std::thread::id interrupted;
  const auto store = hash_store();
  const auto name = fresh_name();
  set_interrupt_check([] {
    if (std::this_thread::get_id() == interrupted) {
      throw Interrupted("Ctrl-C");
    }
  });
  std::atomic<bool> came{false};
  const auto raised = on_ranks(3, [&](int rank) {
    if (rank == 1) {
      return;  // never comes
    }
    if (rank == 0) {
      interrupted = std::this_thread::get_id();
    }
    agree(members(store, name, rank, 3), phase("warm"));
  });
  set_interrupt_check(nullptr);
  EXPECT_EQ(raised[0], "Ctrl-C");
  EXPECT_TRUE(holds(raised[2], "rank 0 in \"warm\"")) << raised[2];
  EXPECT_TRUE(holds(raised[2], "interrupted")) << raised[2];
}

TEST(RankAgreement, LeavesTheTimeoutsOfTheStoreAlone) {
  const auto store = hash_store();
  store->setTimeout(std::chrono::seconds(1234));
  const auto name = fresh_name();
  on_ranks(2, [&](int rank) {
    agree(members(store, name, rank, 2), phase("warm"));
  });
  EXPECT_EQ(store->getTimeout(), std::chrono::seconds(1234));
}

TEST(RankAgreement, WorksOverAFileStore) {
  const std::string path = testing::TempDir() + "rank_agreement_file_store";
  std::remove(path.c_str());
  const auto name = fresh_name();
  const auto raised = on_ranks(2, [&](int rank) {
    const auto store = c10::make_intrusive<c10d::FileStore>(path, 2);
    for (int round = 0; round < 3; ++round) {
      agree(members(store, name, rank, 2), phase("warm"));
    }
    EXPECT_THROW(agree(members(store, name, rank, 2),
                       phase("warm", rank == 1 ? "bad" : "")),
                 c10::Error);
  });
  EXPECT_EQ(raised, Texts(2));
}

TEST(RankAgreement, WorksOverTcpStoresWithAndWithoutLibuv) {
  for (const bool libuv : {true, false}) {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    options.useLibUV = libuv;
    const auto server =
        c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    const auto name = fresh_name();
    const auto raised = on_ranks(3, [&](int rank) {
      for (int round = 0; round < 3; ++round) {
        agree(members(server->clone(), name, rank, 3), phase("warm"));
      }
    });
    EXPECT_EQ(raised, Texts(3)) << libuv;
  }
}

TEST(RankAgreement, SaysThatTheStoreIsGone) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto client = server->clone();
  std::promise<void> waits;
  set_interrupt_check(nullptr);
  const auto name = fresh_name();
  const auto raised = on_ranks(2, [&](int rank) {
    if (rank == 0) {
      while (!server->check({"deepmd_prewarm///2/0/rank/1"})) {
        std::this_thread::yield();
      }
      server.reset();
      return;
    }
    agree(members(client, name, 1, 2), phase("warm"));
  });
  EXPECT_TRUE(holds(raised[1], "the Store of this group must answer"))
      << raised[1];
  EXPECT_TRUE(holds(raised[1], "rank 1 in \"warm\"")) << raised[1];
}

}  // namespace
}  // namespace deepmd_prewarm
