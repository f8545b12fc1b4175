// SPDX-License-Identifier: Apache-2.0
// The counting communicator.
#include "conformance/subjects/call_counts.h"

#include <utility>

namespace isoshard {
namespace {

class CountingCommunicator final : public Communicator {
 public:
  CountingCommunicator(Communicator& inner, std::shared_ptr<CallCounts> counts) : inner_(&inner), counts_(std::move(counts)) {}
  CountingCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<CallCounts> counts)
      : owned_(std::move(inner)), inner_(owned_.get()), counts_(std::move(counts)) {}

  [[nodiscard]] int rank() const noexcept override { return inner_->rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_->size(); }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override { return inner_->reduction_order(); }
  [[nodiscard]] int world_rank_of(int rank) const override { return inner_->world_rank_of(rank); }

  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override {
    count(CollectiveOp::kAllReduce, info);
    return inner_->all_reduce(data, reduction, info);
  }
  Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) override {
    count(CollectiveOp::kAllGather, info);
    return inner_->all_gather(input, output, info);
  }
  Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction, const CallInfo& info) override {
    count(CollectiveOp::kReduceScatter, info);
    return inner_->reduce_scatter(input, output, reduction, info);
  }
  Work broadcast(Buffer data, int root, const CallInfo& info) override {
    count(CollectiveOp::kBroadcast, info);
    return inner_->broadcast(data, root, info);
  }
  void barrier(const CallInfo& info) override {
    count(CollectiveOp::kBarrier, info);
    inner_->barrier(info);
  }
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    count(CollectiveOp::kSplit, {Purpose::kSetup, Axis::kWorld, {}});
    std::unique_ptr<Communicator> group = inner_->split(color, key);
    if (group == nullptr) return nullptr;
    return std::make_unique<CountingCommunicator>(std::move(group), counts_);
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

 private:
  void count(CollectiveOp op, const CallInfo& info) { ++(*counts_)[{op, info.purpose, info.axis}]; }

  std::unique_ptr<Communicator> owned_;   // null for a communicator that someone else owns
  Communicator* inner_;
  std::shared_ptr<CallCounts> counts_;
};

}  // namespace

CountedRank::CountedRank(Rank& rank, std::shared_ptr<CallCounts> counts)
    : rank_(&rank), comm_(std::make_unique<CountingCommunicator>(rank.comm(), std::move(counts))) {}
CountedRank::~CountedRank() = default;

std::int64_t count_of(const CallCounts& counts, Purpose purpose) {
  std::int64_t total = 0;
  for (const auto& [key, count] : counts) total += key.purpose == purpose ? count : 0;
  return total;
}

}  // namespace isoshard
