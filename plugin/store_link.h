// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace deepmd_prewarm {

/// Our own connection to a c10d Store, and the few requests made on it.
///
/// Own, because a request on a client that sits inside `wait` blocks until
/// that wait ends. No request here waits for a key: whatever reads, checks
/// first. Time-outs of the Store are neither used nor changed.
///
/// Every method blocks for one round trip (two where noted) and passes on what
/// the Store throws when its server is gone. A server whose host is gone may
/// keep a request for ever: busy_for() lets another thread notice. For one
/// thread; requests() and busy_for() are for any.
class DEEPMD_PREWARM_API StoreLink {
 public:
  /// All keys are put below `prefix`. Sends nothing.
  explicit StoreLink(std::string prefix);

  /// Connects through `store->clone()`; a Store that cannot be cloned is used
  /// itself. Before any other request.
  void connect(const c10::intrusive_ptr<c10d::Store>& store);
  bool connected() const { return connected_; }

  /// Lets go of the Store.
  void disconnect();

  /// Whether all of `keys` exist.
  bool has(const std::vector<std::string>& keys);

  /// The value, or nothing where the key is absent. Two round trips.
  std::optional<std::string> read(const std::string& key);

  /// The values of `keys`, all of which are known to exist. One round trip
  /// where the Store has multiGet, else one for each key.
  std::vector<std::string> read_all(const std::vector<std::string>& keys);

  void write(const std::string& key, const std::string& value);

  /// Writes `value` if nobody else wrote since `expected` was read ("" = the
  /// key is absent); returns what the key holds afterwards.
  std::string write_once(const std::string& key,
                         const std::string& expected,
                         const std::string& value);

  /// Deletes a key where the Store can; absent keys are fine.
  void erase(const std::string& key);

  /// Requests sent so far.
  int64_t requests() const { return requests_; }

  /// Seconds since the request under way was sent; 0: none is.
  double busy_for() const;

 private:
  class Request;
  std::string full(const std::string& key) const { return prefix_ + key; }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::atomic<bool> connected_{false};
  std::atomic<int64_t> requests_{0};
  std::atomic<int64_t> busy_since_{0};  // steady clock, ns; 0: idle
};

}  // namespace deepmd_prewarm
