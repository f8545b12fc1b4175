// SPDX-License-Identifier: Apache-2.0
/// Collectives on a device's memory over a backend of host memory: what goes out is copied to the
/// host first, and what comes in from it afterwards.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>

#include "core/comm/communicator.h"

namespace isoshard {

/// How bytes come from a device and go there. Both return when source and destination may be
/// touched again.
struct DeviceCopies {
  std::function<void(std::byte* host, const std::byte* device, std::size_t bytes,
                     const Device& from)>
      to_host;
  std::function<void(std::byte* device, const std::byte* host, std::size_t bytes, const Device& to)>
      to_device;
};

/// `inner` for Buffers of any device. Those in host memory go to it as they are.
///
/// Guarantees   what `inner` sees differs from the caller's Buffers in `data`, `device` and
/// `stream`
///              alone. Input is read when the call is made; output is written, by the calling
///              thread, when the Work is waited for. Groups that are split from it are staged too.
/// Errors       as `inner`.
[[nodiscard]] std::unique_ptr<Communicator> staged(Communicator& inner, DeviceCopies copies);
[[nodiscard]] std::unique_ptr<Communicator> staged(std::unique_ptr<Communicator> inner,
                                                   DeviceCopies copies);

}  // namespace isoshard
