// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/rank_agreement.h>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace deepmd_prewarm {

/// Runs `body(rank)` on `size` threads at once; what each raised, "" = nothing.
inline std::vector<std::string> on_ranks(int size,
                                         const std::function<void(int)>& body) {
  std::vector<std::string> raised(static_cast<size_t>(size));
  std::vector<std::thread> ranks;
  ranks.reserve(raised.size());
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&raised, &body, rank] {
      try {
        body(rank);
      } catch (const c10::Error& error) {
        raised[static_cast<size_t>(rank)] = error.what_without_backtrace();
      } catch (const std::exception& error) {
        raised[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
  return raised;
}

}  // namespace deepmd_prewarm
