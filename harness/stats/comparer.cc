// SPDX-License-Identifier: Apache-2.0
/// The one comparer that this program can make on a GPU.
#include "harness/stats/comparer.h"

#include <utility>

namespace isoshard {
namespace {

ComparerMaker& of_program() noexcept {
  static ComparerMaker make;
  return make;
}

}  // namespace

const ComparerMaker& gpu_comparer() noexcept {
  return of_program();
}

void set_gpu_comparer(ComparerMaker make) {
  of_program() = std::move(make);
}

}  // namespace isoshard
