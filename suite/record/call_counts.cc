// SPDX-License-Identifier: Apache-2.0
// The counting communicator.
#include "suite/record/call_counts.h"

#include <utility>

namespace isoshard {
namespace {

class CountingCommunicator final : public Communicator {
 public:
  CountingCommunicator(Communicator& inner, std::shared_ptr<CallCounts> counts)
      : inner_(&inner), counts_(std::move(counts)) {}
  CountingCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<CallCounts> counts)
      : owned_(std::move(inner)), inner_(owned_.get()), counts_(std::move(counts)) {}

  [[nodiscard]] int rank() const noexcept override { return inner_->rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_->size(); }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return inner_->reduction_order();
  }
  [[nodiscard]] int world_rank_of(int rank) const override { return inner_->world_rank_of(rank); }

  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override {
    count(CollectiveOp::kAllReduce, info);
    return inner_->all_reduce(data, reduction, info);
  }
  Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) override {
    count(CollectiveOp::kAllGather, info);
    return inner_->all_gather(input, output, info);
  }
  Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                      const CallInfo& info) override {
    count(CollectiveOp::kReduceScatter, info);
    return inner_->reduce_scatter(input, output, reduction, info);
  }
  using Communicator::all_to_all;
  Work all_gather_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                         const CallInfo& info) override {
    count(CollectiveOp::kAllGatherUneven, info);
    return inner_->all_gather_uneven(input, output, counts, info);
  }
  Work reduce_scatter_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                             Reduction reduction, const CallInfo& info) override {
    count(CollectiveOp::kReduceScatterUneven, info);
    return inner_->reduce_scatter_uneven(input, output, counts, reduction, info);
  }
  Work all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                  std::span<const std::int64_t> output_counts, const CallInfo& info) override {
    count(CollectiveOp::kAllToAll, info);
    return inner_->all_to_all(input, input_counts, output, output_counts, info);
  }
  Work send(ConstBuffer data, int to, const CallInfo& info) override {
    count(CollectiveOp::kSend, info);
    return inner_->send(data, to, info);
  }
  Work recv(Buffer data, int from, const CallInfo& info) override {
    count(CollectiveOp::kRecv, info);
    return inner_->recv(data, from, info);
  }
  Work send_recv(std::span<const Transfer> transfers) override {
    for (const Transfer& transfer : transfers)
      count(transfer.is_send ? CollectiveOp::kSend : CollectiveOp::kRecv, transfer.info);
    return inner_->send_recv(transfers);
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

  std::unique_ptr<Communicator> owned_;  // null for a communicator that someone else owns
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
