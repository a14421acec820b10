// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/side_effect_guard.h>
