// SPDX-License-Identifier: Apache-2.0
// Names of the parameter classes.
#include "core/base/param_class.h"

#include <array>
#include <cstddef>

namespace isoshard {
namespace {
constexpr std::array<std::string_view, 10> kClassNames{
    "other",   "matrix",     "bias",      "row_bias", "norm",
    "qk_norm", "kv_replica", "embedding", "position", "tied"};
}

std::string_view name_of(ParamClass param_class) noexcept {
  return kClassNames[static_cast<std::size_t>(param_class)];
}

}  // namespace isoshard
