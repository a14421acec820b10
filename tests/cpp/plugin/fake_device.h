// SPDX-License-Identifier: LGPL-3.0-or-later
// A device type with three devices, of which the last has no context yet. Its
// guard writes down what is asked of it, so that a wrong device, a wrong stream
// or a context that is made shows.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace deepmd_prewarm {

using Log = std::vector<std::string>;

class FakeDevice final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr int kCount = 3;
  static constexpr int kWithoutContext = 2;

  explicit FakeDevice(c10::DeviceType type) : type_(type) {}

  mutable Log log;
  mutable int current = 0;
  mutable std::array<int64_t, kCount> streams{};  // current one of each device
  mutable std::vector<std::function<void()>> pending;  // work of all streams

  void reset() {
    log.clear();
    current = 0;
    streams = {};
    pending.clear();
  }
  void note(const std::string& what) const { log.push_back(what); }

  c10::DeviceType type() const override { return type_; }
  c10::Device getDevice() const override { return at(current); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    uncheckedSetDevice(device);
    if (current == kWithoutContext) {
      note("context made");
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams[index(device)]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    streams[index(stream.device())] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(c10::Stream) const override { return nullptr; }
  void recordDataPtrOnStream(const c10::DataPtr&,
                             const c10::Stream& stream) const override {
    note("used on " + name(stream));
  }

  void record(void** event,
              const c10::Stream& stream,
              c10::DeviceIndex,
              c10::EventFlag) const override {
    *event = const_cast<FakeDevice*>(this);
    note("event on " + name(stream));
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return pending.empty(); }
  void synchronizeEvent(void*) const override {
    for (const auto& work : std::exchange(pending, {})) {
      work();
    }
    note("event waited for");
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}

 private:
  c10::Device at(int index) const {
    return {type_, static_cast<c10::DeviceIndex>(index)};
  }
  static size_t index(c10::Device device) {
    return static_cast<size_t>(device.index());
  }
  static std::string name(const c10::Stream& stream) {
    return "device " + std::to_string(stream.device_index()) + " stream " +
           std::to_string(stream.id());
  }

  c10::DeviceType type_;
};

}  // namespace deepmd_prewarm
