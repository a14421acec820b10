// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/store_record.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace deepmd_prewarm {
namespace {

using Fields = std::vector<std::string>;

TEST(StoreRecord, GivesBackWhateverTheFieldsHold) {
  const Fields fields{"", "5:hello", "two\nlines", std::string("\0\xff", 2),
                      "Größe \xe6\xb8\xa9"};
  EXPECT_EQ(unpack(pack(fields)), fields);
}

TEST(StoreRecord, OfNoFieldsIsEmpty) { EXPECT_EQ(unpack(pack({})), Fields{}); }

TEST(StoreRecord, RefusesWhatPackDidNotMake) {
  for (const char* value :
       {"x", "5:hell", "5", "-1:a", ":a", "3:abc4", "99999999999999999999:a"}) {
    EXPECT_FALSE(unpack(value).has_value()) << value;
  }
}

TEST(Shorten, LeavesWhatFitsAlone) { EXPECT_EQ(shorten("abc", 3), "abc"); }

TEST(Shorten, KeepsBothEndsAndSaysHowMuchThereWas) {
  const std::string text = "begin" + std::string(1000, 'x') + "end";
  const std::string cut = shorten(text, 200);
  EXPECT_LE(cut.size(), 200U);
  EXPECT_EQ(cut.substr(0, 5), "begin");
  EXPECT_EQ(cut.substr(cut.size() - 3), "end");
  EXPECT_NE(cut.find("1008 bytes in all"), std::string::npos);
}

TEST(Shorten, NeverCutsInsideACharacter) {
  const std::string euro = "\xe2\x82\xac";
  std::string text;
  for (int i = 0; i < 200; ++i) {
    text += euro;
  }
  for (size_t limit = 100; limit < 110; ++limit) {
    const std::string cut = shorten(text, limit);
    const size_t gap = cut.find("\n[");
    const size_t back = cut.find("]\n") + 2;
    EXPECT_EQ(gap % 3, 0U) << limit;
    EXPECT_EQ((cut.size() - back) % 3, 0U) << limit;
    EXPECT_EQ(cut.substr(back, 3), euro) << limit;
  }
}

}  // namespace
}  // namespace deepmd_prewarm
