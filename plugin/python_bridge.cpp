// SPDX-License-Identifier: LGPL-3.0-or-later
#include <torch/extension.h>

PYBIND11_MODULE(_bridge, m) { m.doc() = "deepmd-prewarm bridge"; }
