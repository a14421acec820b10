// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/store_link.h>

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

c10::intrusive_ptr<c10d::Store> own_connection(
    const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // e.g. a Store written in Python
  }
}

}  // namespace

StoreLink::StoreLink(const c10::intrusive_ptr<c10d::Store>& store,
                     std::string prefix)
    : store_(own_connection(store)), prefix_(std::move(prefix)) {}

bool StoreLink::has(const std::vector<std::string>& keys) {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const auto& key : keys) {
    names.push_back(full(key));
  }
  ++requests_;
  return store_->check(names);
}

std::optional<std::string> StoreLink::read(const std::string& key) {
  if (!has({key})) {
    return std::nullopt;
  }
  ++requests_;
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
    ++requests_;
    for (const auto& bytes : store_->multiGet(names)) {
      values.push_back(to_text(bytes));
    }
    return values;
  }
  for (const auto& name : names) {
    ++requests_;
    values.push_back(to_text(store_->get(name)));
  }
  return values;
}

void StoreLink::write(const std::string& key, const std::string& value) {
  ++requests_;
  store_->set(full(key), to_bytes(value));
}

std::string StoreLink::write_once(const std::string& key,
                                  const std::string& expected,
                                  const std::string& value) {
  ++requests_;
  return to_text(
      store_->compareSet(full(key), to_bytes(expected), to_bytes(value)));
}

void StoreLink::erase(const std::string& key) {
  ++requests_;
  try {
    store_->deleteKey(full(key));
  } catch (const c10::NotImplementedError&) {
    // Some Stores keep their keys; a bounded number then stays anyway.
  }
}

}  // namespace deepmd_prewarm
