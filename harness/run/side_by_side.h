// SPDX-License-Identifier: Apache-2.0
/// Runs tasks that need one core each, as many at once as there are cores.
#pragma once
#include <cstddef>
#include <deque>
#include <functional>
#include <vector>

namespace isoshard {

/// Cores that this process may use.
[[nodiscard]] int num_cores();

/// Keeps as many runs going as there are cores: the next one starts when the oldest has ended.
/// `ended` waits for its run; it is called in the order of `starts`.
template <class Run>
void run_side_by_side(const std::vector<std::function<Run()>>& starts,
                      const std::function<void(std::size_t, Run&)>& ended) {
  std::deque<Run> running;
  std::size_t started = 0;
  for (std::size_t done = 0; done < starts.size(); ++done) {
    while (started < starts.size() && static_cast<int>(running.size()) < num_cores())
      running.push_back(starts[started++]());
    ended(done, running.front());
    running.pop_front();
  }
}

}  // namespace isoshard
