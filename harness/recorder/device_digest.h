// SPDX-License-Identifier: Apache-2.0
/// Digests of tensors made where they are, by which a recorder leaves equal ones there.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace isoshard {

/// Ranks   local; one thread at a time, which may change from call to call.
class DeviceDigest {
 public:
  DeviceDigest() = default;
  virtual ~DeviceDigest() = default;
  DeviceDigest(const DeviceDigest&) = delete;
  DeviceDigest& operator=(const DeviceDigest&) = delete;

  /// digest_of() (harness/stats/stats.h) of the tensor's bytes, behind all that its device was
  /// asked to do on the stream that is current.
  /// Requires   a contiguous tensor of the device.
  /// Errors     InfrastructureError with the device's words.
  [[nodiscard]] virtual std::uint64_t digest_of(const at::Tensor& tensor) = 0;
};

using DeviceDigestMaker = std::function<std::unique_ptr<DeviceDigest>()>;

/// How recorders of this process, and of those that it forks, make digests on devices of a type; an
/// empty maker: they fetch all tensors. Returns what was there. Call it before ranks start.
DeviceDigestMaker set_device_digest(c10::DeviceType type, DeviceDigestMaker make);
/// nullptr: nobody said how.
[[nodiscard]] std::unique_ptr<DeviceDigest> make_device_digest(c10::DeviceType type);

}  // namespace isoshard
