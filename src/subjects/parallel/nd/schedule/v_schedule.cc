// SPDX-License-Identifier: Apache-2.0
// A list scheduler: backwards first, then the deepest forward within the memory bound.
#include "subjects/parallel/nd/schedule/v_schedule.h"

#include <cstdint>

#include "subjects/parallel/nd/schedule/schedule_simulation.h"

namespace isoshard {
namespace {

constexpr int kForwardTime = 1, kBackwardTime = 2;

class ListScheduler {
 public:
  explicit ListScheduler(const PipelineSpec& spec)
      : spec_(spec),
        stages_(static_cast<std::size_t>(num_stages(spec))),
        ranks_(static_cast<std::size_t>(spec.pp)),
        bound_(memory_bound(spec)),
        table_(ranks_.size()) {
    for (int rank = 0; rank < spec.pp; ++rank)
      ranks_[static_cast<std::size_t>(rank)].stages = stages_of_rank(spec, rank);
  }

  PipelineSchedule run() {
    for (std::int64_t left = 2LL * num_stages(spec_) * spec_.micro_batches; left > 0; ++now_)
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
        if (ranks_[rank].free_at <= now_ && (run_backward(rank) || run_forward(rank))) --left;
    return aligned({spec_, std::move(table_)});
  }

 private:
  /// Ends of the forwards and backwards of a stage, by micro-batch.
  struct Stage {
    std::vector<std::int64_t> forward, backward;
  };
  struct Rank {
    std::vector<int> stages;
    std::int64_t free_at = 0;
    int alive = 0;
  };

  [[nodiscard]] Stage& stage(int index) { return stages_[static_cast<std::size_t>(index)]; }

  [[nodiscard]] bool is_done(const std::vector<std::int64_t>& ends, std::size_t micro_batch) const {
    return micro_batch < ends.size() && ends[micro_batch] <= now_;
  }

  bool run_backward(std::size_t rank) {
    int best = -1;
    for (const int index : ranks_[rank].stages) {
      const std::size_t next = stage(index).backward.size();
      const bool is_last = index + 1 == num_stages(spec_);
      if (!is_done(stage(index).forward, next)) continue;
      if (!is_last && !is_done(stage(index + 1).backward, next)) continue;
      if (best < 0 || next <= stage(best).backward.size()) best = index;
    }
    if (best < 0) return false;
    --ranks_[rank].alive;
    append(rank, ActionKind::kBackward, best, stage(best).backward, kBackwardTime);
    return true;
  }

  bool run_forward(std::size_t rank) {
    Rank& own = ranks_[rank];
    for (std::size_t place = own.stages.size(); place-- > 0;) {
      const int index = own.stages[place];
      const std::size_t next = stage(index).forward.size();
      const int later = static_cast<int>(own.stages.size() - 1 - place);
      if (next >= static_cast<std::size_t>(spec_.micro_batches)) continue;
      if (index > 0 && !is_done(stage(index - 1).forward, next)) continue;
      if (own.alive + later >= bound_[rank]) continue;
      ++own.alive;
      append(rank, ActionKind::kForward, index, stage(index).forward, kForwardTime);
      return true;
    }
    return false;
  }

  void append(std::size_t rank, ActionKind kind, int index, std::vector<std::int64_t>& ends,
              int time) {
    table_[rank].emplace_back(PipelineAction{kind, index, static_cast<int>(ends.size())});
    ranks_[rank].free_at = now_ + time;
    ends.push_back(now_ + time);
  }

  const PipelineSpec& spec_;
  std::vector<Stage> stages_;
  std::vector<Rank> ranks_;
  const std::vector<int> bound_;
  PipelineTable table_;
  std::int64_t now_ = 0;
};

}  // namespace

PipelineSchedule interleaved_on_a_v(const PipelineSpec& spec) {
  return ListScheduler(spec).run();
}

}  // namespace isoshard
