// SPDX-License-Identifier: LGPL-3.0-or-later
// The CUDA runtime's answer about graph captures, for a program without a
// driver.
#pragma once

namespace deepmd_prewarm {

/// Index of the device whose current stream captures; -1: none.
extern int capturing_on;

/// The current device of the program's fake guard; each program defines it.
int current_fake_device();

}  // namespace deepmd_prewarm
