// SPDX-License-Identifier: LGPL-3.0-or-later
// A c10d backend whose only collective, the sum of CPU tensors, goes through
// the Store. PyTorch's wheels carry Gloo, but not the headers that a C++
// program would need to make a Gloo group.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

class StoreBackend final : public c10d::Backend {
 public:
  StoreBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Backend(rank, size), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "store"; }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& /*options*/) override {
    for (auto& tensor : tensors) {
      const auto round = "sum/" + std::to_string(round_++) + "/";
      const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
      store_->set(round + std::to_string(getRank()),
                  std::vector<uint8_t>(data, data + tensor.nbytes()));
      auto sum = at::zeros_like(tensor);
      for (int rank = 0; rank < getSize(); ++rank) {
        const auto bytes = store_->get(round + std::to_string(rank));
        auto part = at::empty_like(tensor);
        std::memcpy(part.mutable_data_ptr(), bytes.data(), bytes.size());
        sum.add_(part);
      }
      tensor.copy_(sum);
    }
    return c10::make_intrusive<Done>();
  }

 private:
  struct Done : c10d::Work {
    bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  };

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t round_ = 0;
};
