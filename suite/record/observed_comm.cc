// SPDX-License-Identifier: Apache-2.0
// Calls on their way to the communicator below.
#include "suite/record/observed_comm.h"

#include <numeric>
#include <utility>

#include "core/comm/passes_on.h"

namespace isoshard {
namespace {

std::int64_t sum_of(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

class ObservedCommunicator final : public Communicator, public PassesOn {
 public:
  ObservedCommunicator(Communicator& inner, CallObserver observer)
      : inner_(&inner), observer_(std::move(observer)) {}
  ObservedCommunicator(std::unique_ptr<Communicator> inner, CallObserver observer)
      : owned_(std::move(inner)), inner_(owned_.get()), observer_(std::move(observer)) {}
  [[nodiscard]] const Communicator& below() const noexcept override { return *inner_; }
  [[nodiscard]] int rank() const noexcept override { return inner_->rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_->size(); }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return inner_->reduction_order();
  }
  [[nodiscard]] int world_rank_of(int rank) const override { return inner_->world_rank_of(rank); }

  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override {
    see(CollectiveOp::kAllReduce, data.dtype, reduction, data.count, info);
    return inner_->all_reduce(data, reduction, info);
  }
  Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) override {
    see(CollectiveOp::kAllGather, input.dtype, {}, input.count, info);
    return inner_->all_gather(input, output, info);
  }
  Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                      const CallInfo& info) override {
    see(CollectiveOp::kReduceScatter, output.dtype, reduction, output.count, info);
    return inner_->reduce_scatter(input, output, reduction, info);
  }
  using Communicator::all_to_all;
  Work all_gather_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                         const CallInfo& info) override {
    see(CollectiveOp::kAllGatherUneven, input.dtype, {}, sum_of(counts), info);
    return inner_->all_gather_uneven(input, output, counts, info);
  }
  Work reduce_scatter_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                             Reduction reduction, const CallInfo& info) override {
    see(CollectiveOp::kReduceScatterUneven, output.dtype, reduction, sum_of(counts), info);
    return inner_->reduce_scatter_uneven(input, output, counts, reduction, info);
  }
  Work all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                  std::span<const std::int64_t> output_counts, const CallInfo& info) override {
    see(CollectiveOp::kAllToAll, input.dtype, {}, sum_of(input_counts), info);
    return inner_->all_to_all(input, input_counts, output, output_counts, info);
  }
  Work send(ConstBuffer data, int to, const CallInfo& info) override {
    see(CollectiveOp::kSend, data.dtype, {}, data.count, info);
    return inner_->send(data, to, info);
  }
  Work recv(Buffer data, int from, const CallInfo& info) override {
    see(CollectiveOp::kRecv, data.dtype, {}, data.count, info);
    return inner_->recv(data, from, info);
  }
  Work send_recv(std::span<const Transfer> transfers) override {
    for (const Transfer& transfer : transfers)
      see(transfer.is_send ? CollectiveOp::kSend : CollectiveOp::kRecv, transfer.data.dtype, {},
          transfer.data.count, transfer.info);
    return inner_->send_recv(transfers);
  }
  Work broadcast(Buffer data, int root, const CallInfo& info) override {
    see(CollectiveOp::kBroadcast, data.dtype, {}, data.count, info);
    return inner_->broadcast(data, root, info);
  }
  void barrier(const CallInfo& info) override {
    see(CollectiveOp::kBarrier, Dtype::kUint8, {}, 0, info);
    inner_->barrier(info);
  }
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    see(CollectiveOp::kSplit, Dtype::kUint8, {}, 0, {Purpose::kSetup, Axis::kWorld, {}});
    std::unique_ptr<Communicator> group = inner_->split(color, key);
    if (group == nullptr) return nullptr;
    return std::make_unique<ObservedCommunicator>(std::move(group), observer_);
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

 private:
  void see(CollectiveOp op, Dtype dtype, Reduction reduction, std::int64_t count,
           const CallInfo& info) {
    CollectiveCall call;
    call.op = op;
    call.purpose = info.purpose;
    call.axis = info.axis;
    call.dtype = dtype;
    call.reduction = reduction;
    call.count = count;
    observer_(call, inner_->size());
  }

  std::unique_ptr<Communicator> owned_;  // null for a communicator that someone else owns
  Communicator* inner_;
  CallObserver observer_;
};

}  // namespace

std::unique_ptr<Communicator> observed(Communicator& inner, CallObserver observer) {
  return std::make_unique<ObservedCommunicator>(inner, std::move(observer));
}

std::unique_ptr<Communicator> observed(std::unique_ptr<Communicator> inner, CallObserver observer) {
  return std::make_unique<ObservedCommunicator>(std::move(inner), std::move(observer));
}

}  // namespace isoshard
