// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/storage_audit.h>
