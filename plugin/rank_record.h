// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// What stands in the Store, below deepmd_prewarm/<run>/<size>/:
//   beat/<rank>     RankRecord, written by that rank (a tombstone: by a
//                   neighbour)
//   text/<rank>     RankText, written before the beat that refers to it
//   lead            Lease of the one rank that reads all beats
//   host/<place>    roster of a host, written by the leader
//   verdict/<n>     VerdictRecord of round n, compare-and-set by the leader
//   admit/<rank>    VerdictRecord for a rank that came after round 1
// A nonce names one process group object in one process, so what an earlier
// one left under the same keys is never taken for news. torchrun's restart
// count is no part of the keys: each node counts for itself, so it may differ
// between ranks of one attempt (pytorch#61590, #167302).

namespace deepmd_prewarm {

/// A heartbeat: everything the leader has to know of a rank.
struct DEEPMD_PREWARM_API RankRecord {
  std::string nonce;
  int64_t seq = 0;  ///< changes with every beat
  std::string host;
  std::string place;
  int64_t pid = 0;
  std::string start;
  std::string phase;
  double phase_s = 0.;       ///< seconds in that phase
  double period_s = 0.;      ///< how often this rank beats
  int64_t round = 0;         ///< rounds it entered
  int64_t adopted = 0;       ///< verdicts it has
  bool failed = false;       ///< brings an error, see RankText
  bool out_of_time = false;  ///< its own time-out is over
  bool left = false;         ///< ended by itself: its last record
  bool dead = false;         ///< a neighbour saw its process end
  std::string fingerprint;   ///< a digest, see RankText
  std::string echo;          ///< nonce of the leader it follows
  int64_t written_ms = 0;    ///< boot_ms() then: to compare on one host only

  std::string packed() const;
  static std::optional<RankRecord> parse(const std::string& value);
};

/// The long texts of one arrival.
struct DEEPMD_PREWARM_API RankText {
  std::string nonce;
  int64_t round = 0;
  std::string error;
  std::string fingerprint;

  std::string packed() const;
  static std::optional<RankText> parse(const std::string& value);
};

/// Who leads. Whoever replaces it by compare-and-set leads from then on.
struct DEEPMD_PREWARM_API Lease {
  int64_t rank = 0;
  std::string nonce;
  int64_t seq = 0;
  bool left = false;
  int64_t drained = 0;  ///< every live rank has the verdicts up to here
  int64_t notice = 0;   ///< number of the notice
  std::string notice_text;

  std::string packed() const;
  static std::optional<Lease> parse(const std::string& value);
};

/// The end of a round, equal for all.
struct DEEPMD_PREWARM_API VerdictRecord {
  std::string session;
  int64_t round = 0;
  std::string text;  ///< empty: all go on
  /// Nonce of each rank ("" = unknown), where ranks join by this verdict.
  std::vector<std::string> members;

  std::string packed() const;
  static std::optional<VerdictRecord> parse(const std::string& value);
};

/// One process of a host.
struct DEEPMD_PREWARM_API Neighbour {
  int64_t rank = 0;
  std::string nonce;
  int64_t pid = 0;
  std::string start;
};

DEEPMD_PREWARM_API std::string pack_roster(const std::vector<Neighbour>& all);
DEEPMD_PREWARM_API std::vector<Neighbour> parse_roster(
    const std::string& value);

/// 16 hex digits that no other call returns.
DEEPMD_PREWARM_API std::string make_nonce();

/// A short digest of `text`, "" for "".
DEEPMD_PREWARM_API std::string digest(const std::string& text);

}  // namespace deepmd_prewarm
