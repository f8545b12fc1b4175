// SPDX-License-Identifier: Apache-2.0
/// The decorating communicator and the faults that need nothing but the call.
#include "harness/fault/collective_fault.h"

#include <algorithm>
#include <cstring>

#include "core/base/error.h"

namespace isoshard {
namespace {

bool is_reduce_scatter(const InterceptedCall& call) {
  return call.op == CollectiveOp::kReduceScatter || call.op == CollectiveOp::kReduceScatterUneven;
}

/// Where this rank's block lies in the input of a reduce_scatter.
std::int64_t begin_of_own_block(const InterceptedCall& call) {
  std::int64_t begin = 0;
  for (int rank = 0; rank < call.comm->rank(); ++rank) {
    begin += call.input_counts.empty() ? call.output.count
                                       : call.input_counts[static_cast<std::size_t>(rank)];
  }
  return begin;
}

class SkipSegments final : public CollectiveFault {
 public:
  using Matches = std::function<bool(const CallInfo&, const Segment*)>;
  explicit SkipSegments(Matches matches) : matches_(std::move(matches)) {}

  bool applies(const InterceptedCall& call) const override {
    const bool reduces = call.op == CollectiveOp::kAllReduce || is_reduce_scatter(call);
    if (!reduces || call.comm->size() == 1) return false;  // nothing to skip
    if (call.info.segments.empty()) return matches_(call.info, nullptr);
    return std::any_of(call.info.segments.begin(), call.info.segments.end(),
                       [&](const Segment& s) { return matches_(call.info, &s); });
  }

  Work apply(const InterceptedCall& call) const override {
    if (is_reduce_scatter(call)) return keep_own_block(call);
    struct Saved {
      std::byte* data;
      std::vector<std::byte> bytes;
    };
    std::vector<Saved> saved;
    const auto element = static_cast<std::int64_t>(size_of(call.output.dtype));
    for (const Segment& segment : call.info.segments) {
      if (!matches_(call.info, &segment)) continue;
      std::byte* begin = call.output.data + segment.offset * element;
      saved.push_back({begin, {begin, begin + segment.count * element}});
    }
    if (saved.size() == call.info.segments.size()) return {};  // nothing left to send
    Work work = call.pass();
    work.wait();
    for (const Saved& part : saved) std::memcpy(part.data, part.bytes.data(), part.bytes.size());
    return {};
  }

 private:
  // Carried out whole; then what matches of this rank's block becomes what the rank gave for it.
  Work keep_own_block(const InterceptedCall& call) const {
    Work work = call.pass();
    work.wait();
    const auto element = static_cast<std::int64_t>(size_of(call.output.dtype));
    const std::int64_t begin = begin_of_own_block(call);
    const auto keep = [&](std::int64_t first, std::int64_t last) {
      first = std::max(first, begin);
      last = std::min(last, begin + call.output.count);
      if (first >= last) return;
      std::memcpy(call.output.data + (first - begin) * element, call.input.data + first * element,
                  static_cast<std::size_t>((last - first) * element));
    };
    if (call.info.segments.empty()) keep(begin, begin + call.output.count);
    for (const Segment& segment : call.info.segments) {
      if (matches_(call.info, &segment)) keep(segment.offset, segment.offset + segment.count);
    }
    return {};
  }

  Matches matches_;
};

class ChangeSegments final : public CollectiveFault {
 public:
  explicit ChangeSegments(SegmentChange change) : change_(std::move(change)) {}

  bool applies(const InterceptedCall& call) const override {
    const bool is_block = change_.of_own_blocks && is_reduce_scatter(call);
    if (call.op != CollectiveOp::kAllReduce && !is_block) return false;
    if (call.info.segments.empty()) return change_.matches(call.info, nullptr);
    return std::any_of(call.info.segments.begin(), call.info.segments.end(),
                       [&](const Segment& s) { return change_.matches(call.info, &s); });
  }

  Work apply(const InterceptedCall& call) const override {
    *call.acted = false;
    if (is_reduce_scatter(call)) return change_own_block(call);
    std::vector<Buffer> parts = parts_of(call);
    std::vector<std::vector<std::byte>> inputs;
    for (const Buffer& part : parts) {
      if (change_.before) watch(call, part, [&] { change_.before(call, part); });
      inputs.push_back(bytes_of(part));
    }
    Work work = call.pass();
    work.wait();
    for (std::size_t i = 0; change_.after && i < parts.size(); ++i) {
      watch(call, parts[i], [&] {
        change_.after(call, {inputs[i].data(), parts[i].count, parts[i].dtype}, parts[i]);
      });
    }
    return {};
  }

 private:
  static std::vector<std::byte> bytes_of(const Buffer& part) {
    return {part.data, part.data + static_cast<std::size_t>(part.count) * size_of(part.dtype)};
  }

  /// Carries out a change of this part, and notes whether it was one.
  template <class Change>
  static void watch(const InterceptedCall& call, const Buffer& part, const Change& change) {
    const std::vector<std::byte> before = bytes_of(part);
    change();
    *call.acted = *call.acted || std::memcmp(before.data(), part.data, before.size()) != 0;
  }

  Work change_own_block(const InterceptedCall& call) const {
    call.pass().wait();
    const std::int64_t begin = begin_of_own_block(call), end = begin + call.output.count;
    const auto element = static_cast<std::int64_t>(size_of(call.output.dtype));
    const auto change = [&](std::int64_t first, std::int64_t last) {
      first = std::max(first, begin);
      last = std::min(last, end);
      if (first >= last || !change_.after) return;
      const Buffer part{call.output.data + (first - begin) * element, last - first,
                        call.output.dtype, call.output.device, call.output.stream};
      watch(call, part, [&] {
        change_.after(call, {call.input.data + first * element, last - first, call.input.dtype},
                      part);
      });
    };
    if (call.info.segments.empty()) change(begin, end);
    for (const Segment& segment : call.info.segments) {
      if (change_.matches(call.info, &segment))
        change(segment.offset, segment.offset + segment.count);
    }
    return {};
  }

  std::vector<Buffer> parts_of(const InterceptedCall& call) const {
    if (call.info.segments.empty()) return {call.output};
    std::vector<Buffer> parts;
    const auto element = static_cast<std::int64_t>(size_of(call.output.dtype));
    for (const Segment& segment : call.info.segments) {
      if (change_.matches(call.info, &segment)) {
        parts.push_back(
            {call.output.data + segment.offset * element, segment.count, call.output.dtype});
      }
    }
    return parts;
  }

  SegmentChange change_;
};

class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner,
                     std::shared_ptr<const CollectiveFault> fault, FaultProbe probe,
                     std::shared_ptr<UndecoratedMesh> mesh)
      : inner_(std::move(inner)),
        fault_(std::move(fault)),
        probe_(std::move(probe)),
        mesh_(std::move(mesh)) {}

  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  ReductionOrder reduction_order() const noexcept override { return inner_->reduction_order(); }
  int world_rank_of(int rank) const override { return inner_->world_rank_of(rank); }

  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override {
    return send_call(
        {CollectiveOp::kAllReduce, data, data, reduction, 0, info, inner_.get(), mesh_.get()});
  }
  Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) override {
    return send_call({CollectiveOp::kAllGather, input, output, Reduction::kSum, 0, info,
                      inner_.get(), mesh_.get()});
  }
  Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                      const CallInfo& info) override {
    return send_call({CollectiveOp::kReduceScatter, input, output, reduction, 0, info, inner_.get(),
                      mesh_.get()});
  }
  Work broadcast(Buffer data, int root, const CallInfo& info) override {
    return send_call({CollectiveOp::kBroadcast, data, data, Reduction::kSum, root, info,
                      inner_.get(), mesh_.get()});
  }
  using Communicator::all_to_all;
  Work all_gather_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                         const CallInfo& info) override {
    return send_call({CollectiveOp::kAllGatherUneven, input, output, Reduction::kSum, 0, info,
                      inner_.get(), mesh_.get(), counts});
  }
  Work reduce_scatter_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                             Reduction reduction, const CallInfo& info) override {
    return send_call({CollectiveOp::kReduceScatterUneven, input, output, reduction, 0, info,
                      inner_.get(), mesh_.get(), counts});
  }
  Work all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                  std::span<const std::int64_t> output_counts, const CallInfo& info) override {
    return send_call({CollectiveOp::kAllToAll, input, output, Reduction::kSum, 0, info,
                      inner_.get(), mesh_.get(), input_counts, output_counts});
  }
  Work send(ConstBuffer data, int to, const CallInfo& info) override {
    return send_call(
        {CollectiveOp::kSend, data, {}, Reduction::kSum, to, info, inner_.get(), mesh_.get()});
  }
  Work recv(Buffer data, int from, const CallInfo& info) override {
    return send_call(
        {CollectiveOp::kRecv, {}, data, Reduction::kSum, from, info, inner_.get(), mesh_.get()});
  }
  Work send_recv(std::span<const Transfer> transfers) override {
    if (transfers.empty()) return inner_->send_recv(transfers);
    return send_call({CollectiveOp::kSendRecv,
                      {},
                      {},
                      Reduction::kSum,
                      0,
                      transfers.front().info,
                      inner_.get(),
                      mesh_.get(),
                      {},
                      {},
                      transfers});
  }
  void barrier(const CallInfo& info) override {
    Work work = send_call(
        {CollectiveOp::kBarrier, {}, {}, Reduction::kSum, 0, info, inner_.get(), mesh_.get()});
    work.wait();
  }
  std::unique_ptr<Communicator> split(int color, int key) override {
    return std::make_unique<FaultyCommunicator>(inner_->split(color, key), fault_, probe_, mesh_);
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

 private:
  Work send_call(const InterceptedCall& call) {
    if (call.info.purpose == Purpose::kSetup || !fault_->applies(call)) return call.pass();
    bool acted = true;
    InterceptedCall watched = call;
    watched.acted = &acted;
    Work work = fault_->apply(watched);
    if (acted) probe_.fired();
    return work;
  }

  std::unique_ptr<Communicator> inner_;
  std::shared_ptr<const CollectiveFault> fault_;
  FaultProbe probe_;
  std::shared_ptr<UndecoratedMesh> mesh_;
};

}  // namespace

Communicator& UndecoratedMesh::group(Axis axis) {
  if (!mesh_.has_value()) mesh_.emplace(shape_, *world_);
  return mesh_->group(axis);
}

Work InterceptedCall::pass() const {
  switch (op) {
    case CollectiveOp::kAllReduce:
      return comm->all_reduce(output, reduction, info);
    case CollectiveOp::kAllGather:
      return comm->all_gather(input, output, info);
    case CollectiveOp::kReduceScatter:
      return comm->reduce_scatter(input, output, reduction, info);
    case CollectiveOp::kBroadcast:
      return comm->broadcast(output, root, info);
    case CollectiveOp::kBarrier:
      comm->barrier(info);
      return {};
    case CollectiveOp::kAllGatherUneven:
      return comm->all_gather_uneven(input, output, input_counts, info);
    case CollectiveOp::kReduceScatterUneven:
      return comm->reduce_scatter_uneven(input, output, input_counts, reduction, info);
    case CollectiveOp::kAllToAll:
      return comm->all_to_all(input, input_counts, output, output_counts, info);
    case CollectiveOp::kSend:
      return comm->send(input, root, info);
    case CollectiveOp::kRecv:
      return comm->recv(output, root, info);
    case CollectiveOp::kSendRecv:
      return comm->send_recv(transfers);
    case CollectiveOp::kSplit:
      break;  // never intercepted
  }
  throw CommError("a collective of an unknown kind was called");
}

std::shared_ptr<const CollectiveFault> skip_segments(
    std::function<bool(const CallInfo&, const Segment*)> matches) {
  return std::make_shared<SkipSegments>(std::move(matches));
}

std::shared_ptr<const CollectiveFault> skip_calls(Purpose purpose, Axis axis) {
  return skip_segments([purpose, axis](const CallInfo& info, const Segment*) {
    return info.purpose == purpose && info.axis == axis;
  });
}

std::shared_ptr<const CollectiveFault> change_segments(SegmentChange change) {
  return std::make_shared<ChangeSegments>(std::move(change));
}

std::unique_ptr<Communicator> decorate_with_fault(std::unique_ptr<Communicator> inner,
                                                  std::shared_ptr<const CollectiveFault> fault,
                                                  FaultProbe probe, MeshShape shape) {
  auto mesh = std::make_shared<UndecoratedMesh>(std::move(shape), *inner);
  return std::make_unique<FaultyCommunicator>(std::move(inner), std::move(fault), std::move(probe),
                                              std::move(mesh));
}

}  // namespace isoshard
