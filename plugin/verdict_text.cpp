// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/store_record.h>
#include <deepmd_prewarm/plugin/verdict_text.h>

#include <algorithm>
#include <cmath>

namespace deepmd_prewarm {
namespace {

// A TCPStore value may be 8 MiB, one byte more kills the connection.
constexpr size_t kMaxVerdict = 4UL << 20U;
constexpr size_t kMaxDifference = 1UL << 10U;
constexpr size_t kMaxListed = 8;
constexpr size_t kMaxSlow = 4;

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

std::string line_at(const std::string& text, size_t& at) {
  const size_t end = std::min(text.find('\n', at), text.size());
  std::string line = text.substr(at, end - at);
  at = end + 1;
  return line;
}

std::string quoted(const std::string& text) {
  return "\"" + shorten(text, kMaxDifference) + "\"";
}

std::string and_more(size_t count) {
  return "\n  and " + std::to_string(count) + " more";
}

std::string of_ranks(size_t count, int size) {
  return std::to_string(count) + " of " + std::to_string(size) + " ranks";
}

}  // namespace

std::string failure_text(const RankTexts& failed, int size, const Who& who) {
  std::string text =
      of_ranks(failed.size(), size) + " failed, so none goes on.";
  const size_t share = kMaxVerdict / failed.size();
  for (const auto& [rank, why] : failed) {
    text += "\n  " + shorten(who(rank) + ": " + indented(why), share);
  }
  return text;
}

std::string mismatch_text(const RankTexts& odd, const Who& who) {
  std::string text = "the ranks do not agree on what they are doing.";
  for (size_t i = 0; i < odd.size(); ++i) {
    if (i == kMaxListed) {
      return text + and_more(odd.size() - i);
    }
    text += "\n  " + who(odd[i].first) + ": " + odd[i].second;
  }
  return text;
}

std::string absentee_text(const std::vector<int>& missing,
                          int size,
                          int waiting_rank,
                          const std::string& phase,
                          double seconds,
                          const Who& who) {
  std::string text = of_ranks(missing.size(), size) + " did not come: rank " +
                     rank_list(missing) + ". Rank " +
                     std::to_string(waiting_rank) + " waited " +
                     short_seconds(seconds) + " s in \"" + phase +
                     "\" (its timeout_s).";
  for (size_t i = 0; i < missing.size(); ++i) {
    if (i == kMaxListed) {
      return text + and_more(missing.size() - i);
    }
    text += "\n  " + who(missing[i]);
  }
  return text;
}

std::string slow_line(const std::vector<std::string>& slow) {
  std::string line = "alive but slow, the other ranks wait for ";
  for (size_t i = 0; i < std::min(slow.size(), kMaxSlow); ++i) {
    line += (i == 0 ? "" : "; ") + slow[i];
  }
  if (slow.size() > kMaxSlow) {
    line += "; and " + std::to_string(slow.size() - kMaxSlow) + " more";
  }
  return line;
}

std::string difference(const std::string& found, const std::string& expected) {
  size_t a = 0;
  size_t b = 0;
  while (a <= found.size() && b <= expected.size()) {
    const std::string x = line_at(found, a);
    const std::string y = line_at(expected, b);
    if (x != y) {
      return quoted(x) + " against " + quoted(y);
    }
  }
  if (a <= found.size()) {
    return quoted(line_at(found, a)) + " against nothing more";
  }
  return b <= expected.size()
             ? "nothing more against " + quoted(line_at(expected, b))
             : "no difference in what could be read";
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string list;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    list += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) {
      list += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
    }
    i = last + 1;
  }
  return list;
}

std::string short_seconds(double seconds) {
  const int digits = seconds < 1. ? 2 : (seconds < 100. ? 1 : 0);
  const auto scale = std::llround(std::pow(10., digits));
  const auto scaled = std::llround(seconds * static_cast<double>(scale));
  std::string text = std::to_string(scaled / scale);
  if (scaled % scale != 0) {
    std::string part = std::to_string(scaled % scale);
    part.insert(0, static_cast<size_t>(digits) - part.size(), '0');
    text += "." + part;
  }
  return text;
}

}  // namespace deepmd_prewarm
