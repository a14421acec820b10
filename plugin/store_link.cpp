// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/store_link.h>

#include <chrono>
#include <exception>
#include <utility>

namespace deepmd_prewarm {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes to_bytes(const std::string& text) {
  return Bytes(text.begin(), text.end());
}

std::string to_text(const Bytes& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

c10::intrusive_ptr<c10d::Store> own_connection(
    const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // e.g. a Store written in Python
  }
}

}  // namespace

// Counts a request, and marks the link as busy while it lasts.
class StoreLink::Request {
 public:
  explicit Request(StoreLink& link) : link_(link) {
    ++link.requests_;
    link.busy_since_ = now_ns();
  }
  ~Request() { link_.busy_since_ = 0; }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

 private:
  StoreLink& link_;
};

StoreLink::StoreLink(std::string prefix) : prefix_(std::move(prefix)) {}

void StoreLink::connect(const c10::intrusive_ptr<c10d::Store>& store) {
  {
    const Request request(*this);
    store_ = own_connection(store);
  }
  connected_ = true;  // only now: what connecting took is no late answer
}

void StoreLink::disconnect() { store_.reset(); }

double StoreLink::busy_for() const {
  const int64_t since = busy_since_;
  return since == 0 ? 0. : static_cast<double>(now_ns() - since) * 1e-9;
}

bool StoreLink::has(const std::vector<std::string>& keys) {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const auto& key : keys) {
    names.push_back(full(key));
  }
  const Request request(*this);
  return store_->check(names);
}

std::optional<std::string> StoreLink::read(const std::string& key) {
  if (!has({key})) {
    return std::nullopt;
  }
  const Request request(*this);
  return to_text(store_->get(full(key)));
}

std::vector<std::string> StoreLink::read_all(
    const std::vector<std::string>& keys) {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const auto& key : keys) {
    names.push_back(full(key));
  }
  std::vector<std::string> values;
  values.reserve(keys.size());
  if (store_->hasExtendedApi()) {
    const Request request(*this);
    for (const auto& bytes : store_->multiGet(names)) {
      values.push_back(to_text(bytes));
    }
    return values;
  }
  for (const auto& name : names) {
    const Request request(*this);
    values.push_back(to_text(store_->get(name)));
  }
  return values;
}

void StoreLink::write(const std::string& key, const std::string& value) {
  const Request request(*this);
  store_->set(full(key), to_bytes(value));
}

std::string StoreLink::write_once(const std::string& key,
                                  const std::string& expected,
                                  const std::string& value) {
  const Request request(*this);
  try {
    return to_text(
        store_->compareSet(full(key), to_bytes(expected), to_bytes(value)));
  } catch (const c10::NotImplementedError&) {
    store_->set(full(key), to_bytes(value));
    return value;
  }
}

void StoreLink::erase(const std::string& key) {
  const Request request(*this);
  try {
    store_->deleteKey(full(key));
  } catch (const c10::NotImplementedError&) {
    // Some Stores keep their keys; a bounded number then stays anyway.
  }
}

}  // namespace deepmd_prewarm
