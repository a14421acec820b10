// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

/// Marks what libdeepmd_prewarm.so shows; everything else has hidden
/// visibility.
#define DEEPMD_PREWARM_API __attribute__((visibility("default")))
