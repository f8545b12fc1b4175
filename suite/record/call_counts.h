// SPDX-License-Identifier: Apache-2.0
/// Counts a rank's collectives by purpose and axis: which collectives ran is part of what a
/// multi-rank test asserts.
#pragma once
#include <cstdint>
#include <map>
#include <memory>

#include "core/comm/collective.h"
#include "core/comm/communicator.h"
#include "harness/world/rank.h"

namespace isoshard {

struct CallKey {
  CollectiveOp op = CollectiveOp::kBarrier;
  Purpose purpose = Purpose::kUnspecified;
  Axis axis = Axis::kWorld;
  auto operator<=>(const CallKey&) const = default;
};
using CallCounts = std::map<CallKey, std::int64_t>;

/// A rank whose communicator counts every call, and those of the groups split from it, into
/// `counts`, and passes it on.
class CountedRank final : public Rank {
 public:
  CountedRank(Rank& rank, std::shared_ptr<CallCounts> counts);
  ~CountedRank() override;
  [[nodiscard]] int rank() const noexcept override { return rank_->rank(); }
  [[nodiscard]] int size() const noexcept override { return rank_->size(); }
  [[nodiscard]] Communicator& comm() noexcept override { return *comm_; }
  void post_result(std::span<const std::byte> bytes) override { rank_->post_result(bytes); }
  void set_phase(std::string_view phase) noexcept override { rank_->set_phase(phase); }

 private:
  Rank* rank_;
  std::unique_ptr<Communicator> comm_;
};

/// All calls of a purpose, any op and axis.
[[nodiscard]] std::int64_t count_of(const CallCounts& counts, Purpose purpose);

}  // namespace isoshard
