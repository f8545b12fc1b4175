// SPDX-License-Identifier: Apache-2.0
/// Host copies of a call's buffers, which live as long as its Work.
#include "core/comm/staged/staged_communicator.h"

#include <utility>
#include <vector>

namespace isoshard {
namespace {

/// The host copies of one call.
class Stage {
 public:
  explicit Stage(const DeviceCopies& copies) : copies_(&copies) {}

  /// `reads`: the call reads what the buffer holds; `writes`: its result goes there.
  Buffer staged(const Buffer& buffer, bool reads, bool writes) {
    if (buffer.device.kind == Device::Kind::kCpu) return buffer;
    if (buffer.count < 0) return {buffer.data, buffer.count, buffer.dtype};  // `inner` refuses it
    const std::size_t bytes = static_cast<std::size_t>(buffer.count) * size_of(buffer.dtype);
    // Of doubles: aligned for every dtype.
    std::vector<double>& host = hosts_.emplace_back((bytes + sizeof(double) - 1) / sizeof(double));
    auto* const data = reinterpret_cast<std::byte*>(host.data());
    if (reads) copies_->to_host(data, buffer.data, bytes, buffer.device);
    if (writes) results_.push_back({buffer, data, bytes});
    return {data, buffer.count, buffer.dtype};
  }
  ConstBuffer staged(const ConstBuffer& buffer) {
    if (buffer.device.kind == Device::Kind::kCpu) return buffer;
    const Buffer read{const_cast<std::byte*>(buffer.data), buffer.count, buffer.dtype,
                      buffer.device, buffer.stream};
    return staged(read, /*reads=*/true, /*writes=*/false);
  }

  void write_results() {
    for (const Result& result : results_)
      copies_->to_device(result.to.data, result.from, result.bytes, result.to.device);
    results_.clear();
  }

 private:
  struct Result {
    Buffer to;
    const std::byte* from;
    std::size_t bytes;
  };
  const DeviceCopies* copies_;
  std::vector<std::vector<double>> hosts_;
  std::vector<Result> results_;
};

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> owned, Communicator& inner,
                     std::shared_ptr<const DeviceCopies> copies)
      : owned_(std::move(owned)), inner_(&inner), copies_(std::move(copies)) {}

  [[nodiscard]] int rank() const noexcept override { return inner_->rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_->size(); }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return inner_->reduction_order();
  }
  [[nodiscard]] int world_rank_of(int rank) const override { return inner_->world_rank_of(rank); }

  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override {
    return staged_call([&](Stage& stage) {
      return inner_->all_reduce(stage.staged(data, true, true), reduction, info);
    });
  }
  Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) override {
    return staged_call([&](Stage& stage) {
      const ConstBuffer own = stage.staged(input);
      return inner_->all_gather(own, stage.staged(output, false, true), info);
    });
  }
  Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                      const CallInfo& info) override {
    return staged_call([&](Stage& stage) {
      const ConstBuffer own = stage.staged(input);
      return inner_->reduce_scatter(own, stage.staged(output, false, true), reduction, info);
    });
  }
  Work all_gather_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                         const CallInfo& info) override {
    return staged_call([&](Stage& stage) {
      const ConstBuffer own = stage.staged(input);
      return inner_->all_gather_uneven(own, stage.staged(output, false, true), counts, info);
    });
  }
  Work reduce_scatter_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                             Reduction reduction, const CallInfo& info) override {
    return staged_call([&](Stage& stage) {
      const ConstBuffer own = stage.staged(input);
      return inner_->reduce_scatter_uneven(own, stage.staged(output, false, true), counts,
                                           reduction, info);
    });
  }
  using Communicator::all_to_all;
  Work all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                  std::span<const std::int64_t> output_counts, const CallInfo& info) override {
    return staged_call([&](Stage& stage) {
      const ConstBuffer own = stage.staged(input);
      return inner_->all_to_all(own, input_counts, stage.staged(output, false, true), output_counts,
                                info);
    });
  }
  Work send(ConstBuffer data, int to, const CallInfo& info) override {
    return staged_call([&](Stage& stage) { return inner_->send(stage.staged(data), to, info); });
  }
  Work recv(Buffer data, int from, const CallInfo& info) override {
    return staged_call(
        [&](Stage& stage) { return inner_->recv(stage.staged(data, false, true), from, info); });
  }
  Work send_recv(std::span<const Transfer> transfers) override {
    return staged_call([&](Stage& stage) {
      std::vector<Transfer> own(transfers.begin(), transfers.end());
      for (Transfer& transfer : own)
        transfer.data = stage.staged(transfer.data, transfer.is_send, !transfer.is_send);
      return inner_->send_recv(own);
    });
  }
  Work broadcast(Buffer data, int root, const CallInfo& info) override {
    const bool is_root = inner_->rank() == root;
    return staged_call([&](Stage& stage) {
      return inner_->broadcast(stage.staged(data, is_root, !is_root), root, info);
    });
  }
  void barrier(const CallInfo& info) override { inner_->barrier(info); }
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    std::unique_ptr<Communicator> group = inner_->split(color, key);
    if (group == nullptr) return nullptr;
    Communicator& of_group = *group;
    return std::make_unique<StagedCommunicator>(std::move(group), of_group, copies_);
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

 private:
  /// A group of one moves nothing, and so leaves what it does not write as it is.
  template <class Call>
  Work staged_call(const Call& call) {
    auto stage = std::make_shared<Stage>(*copies_);
    auto pending = std::make_shared<Work>(call(*stage));
    return Work([stage, pending, copies = copies_] {
      pending->wait();
      stage->write_results();
    });
  }

  std::unique_ptr<Communicator> owned_;  // null for a communicator that someone else owns
  Communicator* inner_;
  std::shared_ptr<const DeviceCopies> copies_;
};

}  // namespace

std::unique_ptr<Communicator> staged(Communicator& inner, DeviceCopies copies) {
  return std::make_unique<StagedCommunicator>(
      nullptr, inner, std::make_shared<const DeviceCopies>(std::move(copies)));
}

std::unique_ptr<Communicator> staged(std::unique_ptr<Communicator> inner, DeviceCopies copies) {
  Communicator& below = *inner;
  return std::make_unique<StagedCommunicator>(
      std::move(inner), below, std::make_shared<const DeviceCopies>(std::move(copies)));
}

}  // namespace isoshard
