// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/util/Exception.h>
#include <deepmd_prewarm/plugin/rank_settings.h>

#include <cmath>
#include <cstdlib>

namespace deepmd_prewarm {
namespace {

constexpr double kBeatsUntilDead = 5.;

double seconds(const char* name, double fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') {
    return fallback;
  }
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  TORCH_CHECK_VALUE(*end == '\0' && std::isfinite(value) && value >= 0.,
                    "sync_ranks: ", name,
                    " must be a number of seconds >= 0, got \"", text,
                    "\". Unset it for the default of ", fallback, " s.");
  return value;
}

}  // namespace

RankSettings RankSettings::from_environment() {
  const RankSettings standard;
  RankSettings settings;
  settings.beat_s = seconds("DP_PREWARM_BEAT_S", standard.beat_s);
  TORCH_CHECK_VALUE(settings.beat_s > 0.,
                    "sync_ranks: DP_PREWARM_BEAT_S must be > 0, got 0. Unset "
                    "it for the default of 1 s.");
  settings.dead_s =
      seconds("DP_PREWARM_DEAD_S", kBeatsUntilDead * settings.beat_s);
  TORCH_CHECK_VALUE(settings.dead_s >= 2. * settings.beat_s,
                    "sync_ranks: DP_PREWARM_DEAD_S must be at least two beats "
                    "of DP_PREWARM_BEAT_S (",
                    settings.beat_s, " s), got ", settings.dead_s,
                    ". One late beat would be taken for a death.");
  settings.arrive_s = seconds("DP_PREWARM_ARRIVE_S", standard.arrive_s);
  settings.slow_s = seconds("DP_PREWARM_SLOW_S", standard.slow_s);
  settings.max_s = seconds("DP_PREWARM_MAX_S", standard.max_s);
  return settings;
}

}  // namespace deepmd_prewarm
