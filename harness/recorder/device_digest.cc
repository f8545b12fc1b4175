// SPDX-License-Identifier: Apache-2.0
/// One maker for each type of device.
#include "harness/recorder/device_digest.h"

#include <map>
#include <utility>

namespace isoshard {
namespace {

std::map<c10::DeviceType, DeviceDigestMaker>& makers() {
  static std::map<c10::DeviceType, DeviceDigestMaker> all;
  return all;
}

}  // namespace

DeviceDigestMaker set_device_digest(c10::DeviceType type, DeviceDigestMaker make) {
  return std::exchange(makers()[type], std::move(make));
}

std::unique_ptr<DeviceDigest> make_device_digest(c10::DeviceType type) {
  const auto found = makers().find(type);
  return found == makers().end() || !found->second ? nullptr : found->second();
}

}  // namespace isoshard
