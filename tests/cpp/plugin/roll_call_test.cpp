// SPDX-License-Identifier: LGPL-3.0-or-later
// The leader's judgement, with time played.
#include <deepmd_prewarm/plugin/roll_call.h>
#include <gtest/gtest.h>

#include <string>

namespace deepmd_prewarm {
namespace {

using Time = RollCall::Time;

Time at(double seconds) {
  return Time(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
}

RankRecord beat(int rank, int64_t seq, int64_t round = 0) {
  RankRecord record;
  record.nonce = "nonce " + std::to_string(rank);
  record.seq = seq;
  record.host = "a";
  record.place = "boot";
  record.pid = 100 + rank;
  record.start = "7";
  record.phase = "warm";
  record.period_s = 1.;
  record.round = round;
  record.echo = "leader";
  return record;
}

std::optional<RankText> no_text(int /* rank */) { return std::nullopt; }

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class RollCallTest : public testing::Test {
 protected:
  RollCallTest() : call_(3, settings(), at(0)) { call_.trust("leader"); }

  static RankSettings settings() {
    RankSettings settings;
    settings.max_s = 1000.;
    return settings;
  }
  void all_arrive(double when) {
    for (int rank = 0; rank < 3; ++rank) {
      call_.see(rank, beat(rank, 1, 1), at(when));
    }
  }
  std::string verdict(double when) { return call_.text(1, at(when), no_text); }

  RollCall call_;
};

TEST_F(RollCallTest, ListsRanksThatDoNotYetFollowForTheirNeighbours) {
  auto early = beat(1, 1);
  early.echo = "";
  call_.see(1, early, at(1));
  EXPECT_EQ(call_.nonces()[1], "");
  EXPECT_EQ(call_.candidates()[1], "nonce 1");
  ASSERT_EQ(call_.roster("boot").size(), 1U);
  EXPECT_EQ(call_.roster("boot")[0].pid, 101);
}

TEST_F(RollCallTest, NamesARankThatDiedBeforeItFollowedOnceANeighbourSaysSo) {
  call_.see(0, beat(0, 1, 1), at(1));
  auto early = beat(1, 1);
  early.echo = "";
  call_.see(1, early, at(1));
  EXPECT_FALSE(call_.decided(1, at(2)));
  early.dead = true;
  early.seq = 2;
  call_.see(1, early, at(3));  // a rest of an earlier job
  EXPECT_FALSE(call_.decided(1, at(4)));
  RollCall other(3, settings(), at(0));
  other.trust("leader");
  other.see(0, beat(0, 1, 1), at(1));
  early.echo = "leader";  // vouched for
  other.see(1, early, at(3));
  EXPECT_FALSE(other.decided(1, at(3)));
  EXPECT_TRUE(other.decided(1, at(4)));
  EXPECT_NE(other.text(1, at(4), no_text).find("its process ended"),
            std::string::npos);
}

TEST_F(RollCallTest, LetsAllGoOnOnceAllCame) {
  call_.see(0, beat(0, 1, 1), at(1));
  call_.see(1, beat(1, 1, 1), at(1));
  EXPECT_TRUE(call_.pending(1));
  EXPECT_FALSE(call_.decided(1, at(1)));
  call_.see(2, beat(2, 1, 1), at(2));
  EXPECT_TRUE(call_.decided(1, at(2)));
  EXPECT_EQ(verdict(2), "");
}

TEST_F(RollCallTest, WaitsForASlowRankAsLongAsItBeats) {
  call_.see(0, beat(0, 1, 1), at(0));
  call_.see(1, beat(1, 1, 1), at(0));
  for (int second = 0; second < 900; ++second) {
    for (int rank = 0; rank < 3; ++rank) {
      call_.see(rank, beat(rank, second, rank < 2 ? 1 : 0), at(second));
    }
    ASSERT_FALSE(call_.decided(1, at(second))) << second;
  }
}

TEST_F(RollCallTest, NamesARankThatIsSilentForFiveBeats) {
  call_.see(0, beat(0, 1, 1), at(0));
  call_.see(1, beat(1, 1, 1), at(0));
  call_.see(2, beat(2, 1), at(0));
  for (double now = 0; now < 6; now += 0.5) {
    call_.see(0, beat(0, 2 + static_cast<int64_t>(now), 1), at(now));
    call_.see(1, beat(1, 2 + static_cast<int64_t>(now), 1), at(now));
    call_.see(2, beat(2, 1), at(now));
    ASSERT_EQ(call_.decided(1, at(now)), now > 5.) << now;
  }
  const auto text = verdict(5.5);
  EXPECT_TRUE(holds(text, "1 of 3 ranks failed")) << text;
  EXPECT_TRUE(holds(text, "rank 2 in \"warm\"")) << text;
  EXPECT_TRUE(holds(text, "(host a, pid 102): no heartbeat for 5.5 s")) << text;
}

TEST_F(RollCallTest, CountsTheSilenceOfAnOldLeaderFromItsLastSign) {
  call_.heard(2, at(4));
  call_.see(0, beat(0, 1, 1), at(9.5));
  call_.see(2, beat(2, 1), at(9.5));
  call_.decided(1, at(9.5));
  EXPECT_TRUE(holds(verdict(9.5), "rank 2")) << verdict(9.5);
}

TEST_F(RollCallTest, WaitsLongerForARankThatBeatsMoreSlowly) {
  auto resting = beat(2, 1);
  resting.period_s = 10.;
  call_.see(0, beat(0, 1, 1), at(0));
  call_.see(2, resting, at(0));
  call_.see(0, beat(0, 2, 1), at(49));
  EXPECT_FALSE(call_.decided(1, at(49)));
  call_.see(0, beat(0, 3, 1), at(51));
  call_.decided(1, at(51));
  EXPECT_TRUE(holds(verdict(51), "rank 2")) << verdict(51);
}

TEST_F(RollCallTest, CountsNobodysSilenceWhileTheReaderWasAway) {
  call_.see(0, beat(0, 1, 1), at(0));
  call_.see(1, beat(1, 1), at(0));
  call_.see(2, beat(2, 1), at(0));
  call_.forgive(std::chrono::seconds(100));
  EXPECT_FALSE(call_.decided(1, at(100)));
  EXPECT_EQ(verdict(100), "");
}

TEST_F(RollCallTest, NamesARankWhoseProcessEndedAtOnce) {
  all_arrive(1);
  auto tombstone = beat(1, 2, 1);
  tombstone.dead = true;
  call_.see(1, tombstone, at(1));
  EXPECT_TRUE(call_.decided(1, at(1)));
  EXPECT_TRUE(holds(verdict(1), "pid 101): its process ended")) << verdict(1);
}

TEST_F(RollCallTest, BelievesATombstoneMoreThanALastBeatUnderWay) {
  all_arrive(1);
  auto tombstone = beat(1, 2, 1);
  tombstone.dead = true;
  call_.see(1, tombstone, at(1));
  call_.see(1, beat(1, 3, 1), at(2));
  EXPECT_TRUE(holds(verdict(2), "rank 1")) << verdict(2);
}

TEST_F(RollCallTest, WaitsAMomentForOthersThatFailToo) {
  auto failed = beat(1, 1, 1);
  failed.failed = true;
  call_.see(0, beat(0, 1, 1), at(1));
  call_.see(1, failed, at(1));
  call_.see(2, beat(2, 1), at(1));
  EXPECT_FALSE(call_.decided(1, at(1)));
  EXPECT_FALSE(call_.decided(1, at(1.2)));
  failed = beat(2, 2, 1);
  failed.failed = true;
  call_.see(2, failed, at(1.2));
  EXPECT_TRUE(call_.decided(1, at(1.2)));
  const auto text = call_.text(1, at(1.2), [](int rank) {
    RankText own;
    own.nonce = "nonce " + std::to_string(rank);
    own.round = 1;
    own.error = "error of " + std::to_string(rank);
    return std::optional<RankText>(own);
  });
  EXPECT_TRUE(holds(text, "2 of 3 ranks failed")) << text;
  EXPECT_TRUE(holds(text, "pid 101): error of 1")) << text;
  EXPECT_TRUE(holds(text, "pid 102): error of 2")) << text;
}

TEST_F(RollCallTest, EndsAfterTheMomentWithoutTheSlowOnes) {
  auto failed = beat(1, 1, 1);
  failed.failed = true;
  call_.see(1, failed, at(1));
  call_.see(0, beat(0, 1), at(1));
  EXPECT_FALSE(call_.decided(1, at(1)));
  EXPECT_TRUE(call_.decided(1, at(1.3)));
}

TEST_F(RollCallTest, TakesNoRecordOfAnEarlierGroupForAnArrival) {
  auto stale = beat(2, 400, 7);
  stale.echo = "an earlier leader";
  call_.see(0, beat(0, 1, 1), at(0));
  call_.see(1, beat(1, 1, 1), at(0));
  call_.see(2, stale, at(0));
  stale.seq = 401;  // its thread has not ended yet
  call_.see(2, stale, at(1));
  EXPECT_FALSE(call_.decided(1, at(1)));
  EXPECT_EQ(call_.nonces(),
            (std::vector<std::string>{"nonce 0", "nonce 1", ""}));
}

TEST_F(RollCallTest, NamesARankThatNeverBeatAfterItsTime) {
  call_.see(0, beat(0, 1, 1), at(599));
  call_.see(1, beat(1, 1, 1), at(599));
  EXPECT_FALSE(call_.decided(1, at(599)));
  call_.see(0, beat(0, 2, 1), at(601));
  call_.see(1, beat(1, 2, 1), at(601));
  EXPECT_TRUE(call_.decided(1, at(601)));
  const auto text = verdict(601);
  EXPECT_TRUE(holds(text, "rank 2 (never seen): no heartbeat yet after 600 s"))
      << text;
}

TEST_F(RollCallTest, EndsAPhaseThatTakesLongerThanTheLimit) {
  call_.see(0, beat(0, 1, 1), at(0));
  call_.see(1, beat(1, 1, 1), at(0));
  auto slow = beat(2, 1);
  slow.phase_s = 1001.;
  call_.see(2, slow, at(0));
  call_.decided(1, at(0));
  const auto text = verdict(0);
  EXPECT_TRUE(holds(text, "rank 2 in \"warm\" for 1001 s")) << text;
  EXPECT_TRUE(holds(text, "longer than 1000 s (DP_PREWARM_MAX_S)")) << text;
}

TEST_F(RollCallTest, NamesARankThatLeftInsteadOfComing) {
  all_arrive(1);
  auto left = beat(2, 2);
  left.left = true;
  call_.see(2, left, at(1));
  EXPECT_TRUE(call_.decided(1, at(1)));
  EXPECT_TRUE(
      holds(verdict(1), "rank 2 in \"warm\" (host a, pid 102): it left"))
      << verdict(1);
}

TEST_F(RollCallTest, ListsWhoDidNotComeWhenAWaitersTimeIsOver) {
  auto waiting = beat(0, 1, 1);
  waiting.out_of_time = true;
  waiting.phase_s = 2.;
  auto slow = beat(1, 1);
  slow.phase = "compile b";
  slow.phase_s = 12.;
  call_.see(0, waiting, at(3));
  call_.see(1, slow, at(3));
  EXPECT_FALSE(call_.decided(1, at(3)));
  EXPECT_TRUE(call_.decided(1, at(3.3)));
  EXPECT_EQ(call_.text(1, at(3), no_text),
            "2 of 3 ranks did not come: rank 1, 2. Rank 0 waited 2 s in "
            "\"warm\" (its timeout_s)."
            "\n  rank 1 in \"compile b\" for 12 s (host a, pid 101)"
            "\n  rank 2 (never seen)");
}

TEST_F(RollCallTest, NamesTheOneRankThatDoesSomethingElse) {
  for (int rank = 0; rank < 3; ++rank) {
    auto record = beat(rank, 1, 1);
    record.fingerprint = rank == 0 ? "odd" : "usual";
    call_.see(rank, record, at(1));
  }
  EXPECT_TRUE(call_.decided(1, at(1)));
  const auto text = call_.text(1, at(1), [](int rank) {
    RankText own;
    own.fingerprint = rank == 0 ? "2 tasks\na\nc" : "2 tasks\na\nb";
    return std::optional<RankText>(own);
  });
  EXPECT_EQ(text,
            "the ranks do not agree on what they are doing."
            "\n  rank 0 in \"warm\" (host a, pid 100): differs from rank 1: "
            "\"c\" against \"b\"");
}

TEST_F(RollCallTest, SaysAtDoublingTimesWhoIsSlow) {
  call_.see(0, beat(0, 1, 1), at(0));
  auto slow = beat(2, 1);
  slow.phase = "compile water";
  std::vector<double> said;
  for (int second = 0; second <= 1300; second += 10) {
    slow.seq = second;
    slow.phase_s = second;
    call_.see(2, slow, at(second));
    if (const auto line = call_.notice(1, at(second))) {
      said.push_back(second);
      EXPECT_TRUE(holds(*line, "rank 2 in \"compile water\" for "));
      EXPECT_TRUE(holds(*line, "(host a, pid 102)"));
    }
  }
  EXPECT_EQ(said, (std::vector<double>{300, 600, 1200}));
}

TEST_F(RollCallTest, KnowsWhenAllThatLiveHaveTheVerdict) {
  for (int rank = 0; rank < 2; ++rank) {
    auto record = beat(rank, 1, 1);
    record.adopted = 1;
    call_.see(rank, record, at(1));
  }
  call_.see(2, beat(2, 1, 1), at(1));
  EXPECT_FALSE(call_.drained(1, at(1)));
  EXPECT_EQ(call_.oldest_needed(), 1);
  auto dead = beat(2, 2, 1);
  dead.dead = true;
  call_.see(2, dead, at(1));
  EXPECT_TRUE(call_.drained(1, at(1)));
  EXPECT_EQ(call_.oldest_needed(), 2);
}

TEST_F(RollCallTest, LetsALateOrReplacedProcessAskToJoin) {
  all_arrive(1);
  call_.establish({"nonce 0", "", "nonce of an old process"});
  EXPECT_FALSE(call_.newcomer(0));
  EXPECT_TRUE(call_.newcomer(1));
  EXPECT_TRUE(call_.newcomer(2));
  EXPECT_TRUE(holds(verdict(1), "rank 2 (never seen): another process has"))
      << verdict(1);
  call_.admit(1);
  call_.admit(2);
  EXPECT_FALSE(call_.newcomer(2));
  EXPECT_EQ(verdict(1), "");
}

TEST_F(RollCallTest, TellsEachHostWhoLivesThere) {
  all_arrive(1);
  auto away = beat(2, 2, 1);
  away.place = "another boot";
  call_.see(2, away, at(1));
  EXPECT_EQ(call_.places(), (std::set<std::string>{"another boot", "boot"}));
  const auto roster = call_.roster("boot");
  ASSERT_EQ(roster.size(), 2U);
  EXPECT_EQ(roster[1].rank, 1);
  EXPECT_EQ(roster[1].pid, 101);
  EXPECT_EQ(roster[1].nonce, "nonce 1");
}

}  // namespace
}  // namespace deepmd_prewarm
