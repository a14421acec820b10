// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <optional>
#include <string>
#include <vector>

namespace deepmd_prewarm {

/// One Store value made of any number of byte strings, each with its length in
/// front ("5:hello"), so that texts may hold anything.
DEEPMD_PREWARM_API std::string pack(const std::vector<std::string>& fields);

/// The fields again; nothing where `value` was not made by pack().
DEEPMD_PREWARM_API std::optional<std::vector<std::string>> unpack(
    const std::string& value);

/// At most `limit` bytes of `text`: its beginning and its end around a line
/// that says how much is left out. Cuts between UTF-8 characters only.
DEEPMD_PREWARM_API std::string shorten(const std::string& text, size_t limit);

}  // namespace deepmd_prewarm
