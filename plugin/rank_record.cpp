// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/rank_record.h>
#include <deepmd_prewarm/plugin/store_record.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>

namespace deepmd_prewarm {
namespace {

// First field of every record: another version of this library never reads a
// record as if it were its own.
constexpr const char* kFormat = "1";

std::string hex(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx",
                static_cast<unsigned long long>(value));
  return text.data();
}

// Reads fields in the order in which they were written; a record that does not
// fit is reported by std::exception and taken for no record at all.
class Fields {
 public:
  explicit Fields(const std::string& value) : fields_(unpack(value)) {
    if (text() != kFormat) {
      throw std::invalid_argument("another format");
    }
  }
  std::string text() {
    if (!fields_ || at_ >= fields_->size()) {
      throw std::out_of_range("a field is missing");
    }
    return (*fields_)[at_++];
  }
  int64_t number() { return std::stoll(text()); }
  double seconds() { return static_cast<double>(number()) / 1000.; }
  bool flag() { return text() == "1"; }
  bool more() const { return at_ < fields_->size(); }

 private:
  std::optional<std::vector<std::string>> fields_;
  size_t at_ = 0;
};

std::string flag(bool value) { return value ? "1" : "0"; }

// Whole milliseconds: a decimal point depends on the locale.
std::string milliseconds(double seconds) {
  return std::to_string(std::llround(seconds * 1000.));
}

template <typename Record, typename Read>
std::optional<Record> parsed(const std::string& value, Read read) {
  try {
    Fields fields(value);
    Record record;
    read(fields, record);
    return record;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

std::string RankRecord::packed() const {
  return pack({kFormat, nonce, std::to_string(seq), host, place,
               std::to_string(pid), start, phase, milliseconds(phase_s),
               milliseconds(period_s), std::to_string(round),
               std::to_string(adopted), flag(failed), flag(out_of_time),
               flag(left), flag(dead), fingerprint, echo,
               std::to_string(written_ms)});
}

std::optional<RankRecord> RankRecord::parse(const std::string& value) {
  return parsed<RankRecord>(value, [](Fields& in, RankRecord& r) {
    r.nonce = in.text();
    r.seq = in.number();
    r.host = in.text();
    r.place = in.text();
    r.pid = in.number();
    r.start = in.text();
    r.phase = in.text();
    r.phase_s = in.seconds();
    r.period_s = in.seconds();
    r.round = in.number();
    r.adopted = in.number();
    r.failed = in.flag();
    r.out_of_time = in.flag();
    r.left = in.flag();
    r.dead = in.flag();
    r.fingerprint = in.text();
    r.echo = in.text();
    r.written_ms = in.number();
  });
}

std::string RankText::packed() const {
  return pack({kFormat, nonce, std::to_string(round), error, fingerprint});
}

std::optional<RankText> RankText::parse(const std::string& value) {
  return parsed<RankText>(value, [](Fields& in, RankText& t) {
    t.nonce = in.text();
    t.round = in.number();
    t.error = in.text();
    t.fingerprint = in.text();
  });
}

std::string Lease::packed() const {
  return pack({kFormat, std::to_string(rank), nonce, std::to_string(seq),
               flag(left), std::to_string(drained), std::to_string(notice),
               notice_text});
}

std::optional<Lease> Lease::parse(const std::string& value) {
  return parsed<Lease>(value, [](Fields& in, Lease& lease) {
    lease.rank = in.number();
    lease.nonce = in.text();
    lease.seq = in.number();
    lease.left = in.flag();
    lease.drained = in.number();
    lease.notice = in.number();
    lease.notice_text = in.text();
  });
}

std::string VerdictRecord::packed() const {
  std::vector<std::string> fields{kFormat, session, std::to_string(round),
                                  text};
  fields.insert(fields.end(), members.begin(), members.end());
  return pack(fields);
}

std::optional<VerdictRecord> VerdictRecord::parse(const std::string& value) {
  return parsed<VerdictRecord>(value, [](Fields& in, VerdictRecord& verdict) {
    verdict.session = in.text();
    verdict.round = in.number();
    verdict.text = in.text();
    while (in.more()) {
      verdict.members.push_back(in.text());
    }
  });
}

std::string pack_roster(const std::vector<Neighbour>& all) {
  std::vector<std::string> fields{kFormat};
  for (const auto& one : all) {
    fields.push_back(std::to_string(one.rank));
    fields.push_back(one.nonce);
    fields.push_back(std::to_string(one.pid));
    fields.push_back(one.start);
  }
  return pack(fields);
}

std::vector<Neighbour> parse_roster(const std::string& value) {
  using Roster = std::vector<Neighbour>;
  return parsed<Roster>(value,
                        [](Fields& in, Roster& roster) {
                          while (in.more()) {
                            Neighbour one;
                            one.rank = in.number();
                            one.nonce = in.text();
                            one.pid = in.number();
                            one.start = in.text();
                            roster.push_back(one);
                          }
                        })
      .value_or(Roster{});
}

std::string make_nonce() {
  // Not torch's generator: warming up must not draw from anybody's stream.
  std::random_device device;
  return hex((static_cast<uint64_t>(device()) << 32U) ^ device());
}

std::string digest(const std::string& text) {
  if (text.empty()) {
    return "";
  }
  // FNV-1a, 64 bit: the same on every host, unlike std::hash.
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hex(hash);
}

}  // namespace deepmd_prewarm
