// SPDX-License-Identifier: Apache-2.0
/// The cases of a suite that runs by default, and those of its slow suite (SuiteWide).
#pragma once
#include <cstddef>
#include <vector>

namespace isoshard {

/// The first, the n-th after it, and so on.
template <class T>
std::vector<T> every_nth(std::size_t n, const std::vector<T>& all) {
  std::vector<T> result;
  for (std::size_t i = 0; i < all.size(); i += n) result.push_back(all[i]);
  return result;
}

/// Those that every_nth leaves out.
template <class T>
std::vector<T> all_but_every_nth(std::size_t n, const std::vector<T>& all) {
  std::vector<T> result;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i % n != 0) result.push_back(all[i]);
  }
  return result;
}

}  // namespace isoshard
