// SPDX-License-Identifier: LGPL-3.0-or-later
// What differs between torch 2.11 and 2.15 in headers that torch calls private.
// Told apart by what is declared, not by version: which version between them
// changed it does not matter.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <type_traits>

namespace deepmd_prewarm {

/// An autograd node of type `T`, owned as this torch owns nodes: by shared_ptr
/// (2.11) or by intrusive_ptr (2.15).
template <class T, class Owner = decltype(torch::autograd::Edge::function)>
auto make_node() {
  if constexpr (std::is_same_v<Owner, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<T>();
  } else {
    return c10::make_intrusive<T>();
  }
}

}  // namespace deepmd_prewarm
