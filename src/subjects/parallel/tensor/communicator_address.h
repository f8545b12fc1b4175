// SPDX-License-Identifier: Apache-2.0
/// An autograd context keeps integers and strings, so a communicator travels as its address.
#pragma once
#include <cstdint>

#include "core/comm/communicator.h"

namespace isoshard {

[[nodiscard]] inline std::int64_t to_address(Communicator& tp) {
  return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&tp));
}
[[nodiscard]] inline Communicator& from_address(std::int64_t address) {
  return *reinterpret_cast<Communicator*>(static_cast<std::intptr_t>(address));
}

}  // namespace isoshard
