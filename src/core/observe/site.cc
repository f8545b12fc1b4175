// SPDX-License-Identifier: Apache-2.0
/// Names of kinds.
#include "core/observe/site.h"

#include <array>
#include <cstddef>

namespace isoshard {
namespace {
constexpr std::array<std::string_view, 8> kKindNames{
    "param", "grad", "activation", "activation_grad", "optimizer", "scalar", "data_id", "mask"};
}

std::string_view name_of(RecordKind kind) noexcept {
  return kKindNames[static_cast<std::size_t>(kind)];
}

}  // namespace isoshard
