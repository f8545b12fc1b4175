// SPDX-License-Identifier: Apache-2.0
/// The loop of the CPU.
#include "core/comm/nccl/gathered_reduction.h"

namespace isoshard {
namespace {

struct Loop {
  const GatheredReduction& task;
  template <class T, Reduction kReduction>
  void operator()() const {
    for (std::int64_t i = 0; i < task.count; ++i) reduce_element<T, kReduction>(task, i);
  }
};

}  // namespace

void reduce_gathered(const GatheredReduction& task) {
  with_types_of(task, Loop{task});
}

}  // namespace isoshard
