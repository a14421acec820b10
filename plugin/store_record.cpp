// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/store_record.h>

#include <algorithm>

namespace deepmd_prewarm {
namespace {

bool inside_character(const std::string& text, size_t at) {
  return at < text.size() &&
         (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U;
}

}  // namespace

std::string pack(const std::vector<std::string>& fields) {
  std::string value;
  for (const auto& field : fields) {
    value += std::to_string(field.size()) + ":" + field;
  }
  return value;
}

std::optional<std::vector<std::string>> unpack(const std::string& value) {
  constexpr size_t kMaxDigits = 10;
  std::vector<std::string> fields;
  size_t at = 0;
  while (at < value.size()) {
    size_t size = 0;
    size_t digits = 0;
    while (at < value.size() && value[at] >= '0' && value[at] <= '9') {
      size = size * 10 + static_cast<size_t>(value[at] - '0');
      ++at;
      if (++digits > kMaxDigits) {
        return std::nullopt;
      }
    }
    if (digits == 0 || at >= value.size() || value[at] != ':' ||
        value.size() - at - 1 < size) {
      return std::nullopt;
    }
    fields.push_back(value.substr(at + 1, size));
    at += 1 + size;
  }
  return fields;
}

std::string shorten(const std::string& text, size_t limit) {
  if (text.size() <= limit) {
    return text;
  }
  const std::string gap = "\n[... cut here, " + std::to_string(text.size()) +
                          " bytes in all ...]\n";
  const size_t kept = limit > gap.size() ? limit - gap.size() : 0;
  size_t head = kept / 2;
  while (head > 0 && inside_character(text, head)) {
    --head;
  }
  size_t tail = text.size() - (kept - kept / 2);
  while (inside_character(text, tail)) {
    ++tail;
  }
  return text.substr(0, head) + gap + text.substr(std::min(tail, text.size()));
}

}  // namespace deepmd_prewarm
