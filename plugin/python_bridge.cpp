// SPDX-License-Identifier: LGPL-3.0-or-later
#include <torch/extension.h>

namespace deepmd_prewarm {
void bind_agreement(pybind11::module_& m);
}

PYBIND11_MODULE(_bridge, m) {
  m.doc() = "deepmd-prewarm bridge";
  deepmd_prewarm::bind_agreement(m);
}
