// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/verdict_text.h>
#include <gtest/gtest.h>

#include <string>

namespace deepmd_prewarm {
namespace {

std::string who(int rank) { return "rank " + std::to_string(rank); }

TEST(VerdictText, IndentsTheLinesOfAnError) {
  EXPECT_EQ(failure_text({{1, "ValueError: bad\nsecond"}}, 2, who),
            "1 of 2 ranks failed, so none goes on."
            "\n  rank 1: ValueError: bad\n    second");
}

TEST(VerdictText, OfManyLongErrorsFitsIntoOneStoreValue) {
  RankTexts failed;
  for (int rank = 0; rank < 4096; ++rank) {
    failed.emplace_back(rank, std::string(100000, 'x'));
  }
  const auto text = failure_text(failed, 4096, who);
  EXPECT_LT(text.size(), 5UL << 20U);
  EXPECT_NE(text.find("\n  rank 4095: xxx"), std::string::npos);
}

TEST(VerdictText, ListsAFewOfManyOddRanks) {
  RankTexts odd;
  for (int rank = 0; rank < 20; ++rank) {
    odd.emplace_back(rank, "differs");
  }
  const auto text = mismatch_text(odd, who);
  EXPECT_NE(text.find("rank 7: differs\n  and 12 more"), std::string::npos)
      << text;
}

TEST(VerdictText, NamesEveryAbsenteeOfManyInOneList) {
  std::vector<int> missing;
  for (int rank = 1; rank < 20; ++rank) {
    missing.push_back(rank);
  }
  const auto text = absentee_text(missing, 21, 0, "warm", 2., who);
  EXPECT_NE(text.find("19 of 21 ranks did not come: rank 1-19. Rank 0 waited "
                      "2 s in \"warm\""),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("and 11 more"), std::string::npos) << text;
}

TEST(Difference, IsTheFirstLineThatDiffers) {
  EXPECT_EQ(difference("a\nb", "a\nc"), "\"b\" against \"c\"");
  EXPECT_EQ(difference("a\nb", "a"), "\"b\" against nothing more");
  EXPECT_EQ(difference("a", "a\nb"), "nothing more against \"b\"");
  EXPECT_EQ(difference("", "x"), "\"\" against \"x\"");
  EXPECT_EQ(difference("a", "a"), "no difference in what could be read");
}

TEST(RankList, JoinsNeighbours) {
  EXPECT_EQ(rank_list({3}), "3");
  EXPECT_EQ(rank_list({1, 2}), "1, 2");
  EXPECT_EQ(rank_list({1, 2, 3, 7}), "1-3, 7");
}

TEST(ShortSeconds, SaysNoMoreThanIsOfUse) {
  EXPECT_EQ(short_seconds(0.05), "0.05");
  EXPECT_EQ(short_seconds(5.07), "5.1");
  EXPECT_EQ(short_seconds(5.), "5");
  EXPECT_EQ(short_seconds(0.999), "1");
  EXPECT_EQ(short_seconds(300.4), "300");
}

TEST(SlowLine, NamesFourAndCountsTheRest) {
  EXPECT_EQ(slow_line({"a", "b", "c", "d", "e"}),
            "alive but slow, the other ranks wait for a; b; c; d; and 1 more");
}

}  // namespace
}  // namespace deepmd_prewarm
