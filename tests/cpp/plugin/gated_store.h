// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

namespace deepmd_prewarm {

/// One rank's way to a shared HashStore. While shut, every request waits, as
/// that of a stopped process does; once cut, every request throws, as after
/// the death of the Store's host.
class GatedStore : public c10d::Store {
 public:
  explicit GatedStore(c10::intrusive_ptr<c10d::HashStore> shared)
      : shared_(std::move(shared)) {}

  void shut() {
    const std::lock_guard<std::mutex> lock(mutex_);
    shut_ = true;
  }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    shut_ = false;
    changed_.notify_all();
  }
  void cut() {
    const std::lock_guard<std::mutex> lock(mutex_);
    cut_ = true;
    shut_ = false;
    changed_.notify_all();
  }

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
  }
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    pass().set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key,
                                  const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& value) override {
    return pass().compareSet(key, expected, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    return pass().get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    return pass().add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    return pass().deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    return pass().check(keys);
  }
  int64_t getNumKeys() override { return pass().getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override {
    pass().wait(keys);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    pass().wait(keys, timeout);
  }

 private:
  c10d::HashStore& pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !shut_; });
    TORCH_CHECK(!cut_, "Connection reset by peer");
    return *shared_;
  }

  c10::intrusive_ptr<c10d::HashStore> shared_;
  std::mutex mutex_;  // guards the flags
  std::condition_variable changed_;
  bool shut_ = false;
  bool cut_ = false;
};

}  // namespace deepmd_prewarm
