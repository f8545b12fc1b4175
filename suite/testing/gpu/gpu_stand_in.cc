// SPDX-License-Identifier: Apache-2.0
/// Streams of the stand-in, and messages through the fabric.
#include "suite/testing/gpu/gpu_stand_in.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "core/comm/buffers.h"
#include "core/comm/reduce.h"

namespace isoshard {
namespace {

constexpr int kRoundsUnderWay = 1;
constexpr std::byte kUnwritten{0xcd};

}  // namespace

// ---- streams and events
// --------------------------------------------------------------------------

GpuStandIn::GpuStandIn(GpuFabric& fabric, int process) : fabric_(fabric), process_(process) {
  streams_.emplace(nullptr, std::make_unique<Stream>());
  worker_ = std::thread([this] { work(); });
}

GpuStandIn::~GpuStandIn() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  wakes_.notify_all();
  worker_.join();
  for (const auto* of_kind : {&memory_, &host_memory_}) {
    for (const auto& [data, bytes] : *of_kind) ::operator delete(const_cast<std::byte*>(data));
  }
  for (std::byte* memory : freed_) ::operator delete(memory);
}

// A GPU works whether or not its process asks.
void GpuStandIn::work() {
  constexpr std::chrono::microseconds kIdle{5000}, kBusy{200};
  std::unique_lock lock(mutex_);
  while (!is_ending_) {
    const bool has_moved = progress();
    if (!has_moved) wakes_.wait_for(lock, has_tasks() ? kBusy : kIdle);
  }
}

bool GpuStandIn::progress() {
  bool has_moved = false;
  pull();
  for (auto each = streams_.begin(); each != streams_.end();) {
    Stream& stream = *each->second;
    while (!stream.tasks.empty() && stream.tasks.front()()) {
      stream.tasks.pop_front();
      has_moved = true;
    }
    each = stream.is_dying && stream.tasks.empty() ? streams_.erase(each) : std::next(each);
  }
  if (!freed_.empty() && !has_tasks()) {
    for (std::byte* memory : std::exchange(freed_, {})) ::operator delete(memory);
  }
  return has_moved;
}

bool GpuStandIn::has_tasks() const {
  return std::ranges::any_of(streams_,
                             [](const auto& each) { return !each.second->tasks.empty(); });
}

void GpuStandIn::enqueue(GpuStream stream, Step step) {
  const std::lock_guard lock(mutex_);
  stream_of(stream).tasks.push_back(std::move(step));
  wakes_.notify_all();
}

void GpuStandIn::delay(GpuStream stream, int rounds) {
  enqueue(stream, [rounds]() mutable { return rounds-- <= 0; });
}

GpuStandIn::Stream& GpuStandIn::stream_of(GpuStream stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) throw GpuError("a stream must be one of this device, got another");
  return *found->second;
}

void GpuStandIn::use_device(int index) {
  if (index != 0) throw GpuError(fmt::format("invalid device {}", index));
}

std::byte* GpuStandIn::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto* const made = static_cast<std::byte*>(::operator new(bytes));
  std::fill_n(made, bytes, kUnwritten);
  memory_[made] = bytes;
  return made;
}

void GpuStandIn::free(std::byte* memory) noexcept {
  const std::lock_guard lock(mutex_);
  if (memory_.erase(memory) != 0) freed_.push_back(memory);
}

std::byte* GpuStandIn::allocate_host(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto* const made = static_cast<std::byte*>(::operator new(bytes));
  host_memory_[made] = bytes;
  return made;
}

void GpuStandIn::free_host(std::byte* memory) noexcept {
  const std::lock_guard lock(mutex_);
  if (host_memory_.erase(memory) != 0) freed_.push_back(memory);
}

std::size_t GpuStandIn::num_allocated() const {
  const std::lock_guard lock(mutex_);
  return memory_.size();
}

int GpuStandIn::num_aborted_comms() const {
  const std::lock_guard lock(mutex_);
  return num_aborted_;
}

bool GpuStandIn::holds(const std::map<const std::byte*, std::size_t>& memory, const std::byte* data,
                       std::size_t bytes) {
  auto found = memory.upper_bound(data);
  if (found == memory.begin()) return false;
  --found;
  return data + bytes <= found->first + found->second;
}

void GpuStandIn::require_device(const std::byte* data, std::size_t bytes, const char* what) const {
  if (bytes == 0 || holds(memory_, data, bytes)) return;
  if (is_other_memory_ && is_other_memory_(data, bytes)) return;
  throw GpuError(
      fmt::format("{}: an illegal memory access: {} bytes that are not the device's", what, bytes));
}

GpuStream GpuStandIn::make_stream() {
  const std::lock_guard lock(mutex_);
  auto made = std::make_unique<Stream>();
  Stream* const handle = made.get();
  streams_.emplace(handle, std::move(made));
  return handle;
}

void GpuStandIn::destroy_stream(GpuStream stream) noexcept {
  const std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(stream); found != streams_.end())
    found->second->is_dying = true;
}

GpuEvent GpuStandIn::make_event() {
  const std::lock_guard lock(mutex_);
  auto made = std::make_shared<Event>();
  GpuEvent const handle = made.get();
  events_.emplace(handle, std::move(made));
  return handle;
}

void GpuStandIn::destroy_event(GpuEvent event) noexcept {
  const std::lock_guard lock(mutex_);
  events_.erase(event);
}

void GpuStandIn::record(GpuEvent event, GpuStream stream) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Event>& recorded = events_.at(event);
  stream_of(stream).tasks.push_back([recorded, number = ++recorded->num_recorded] {
    recorded->num_done = std::max(recorded->num_done, number);
    return true;
  });
}

void GpuStandIn::wait_for(GpuEvent event, GpuStream stream) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Event>& awaited = events_.at(event);
  stream_of(stream).tasks.push_back(
      [awaited, number = awaited->num_recorded] { return awaited->num_done >= number; });
}

bool GpuStandIn::is_done(GpuEvent event) {
  const std::lock_guard lock(mutex_);
  progress();
  const Event& asked = *events_.at(event);
  return asked.num_done == asked.num_recorded;
}

void GpuStandIn::copy(std::byte* to, const std::byte* from, std::size_t bytes, GpuStream stream) {
  if (faults_.copies_throw) throw GpuError("cudaMemcpyAsync: an illegal memory access");
  {
    const std::lock_guard lock(mutex_);
    for (const std::byte* side : {static_cast<const std::byte*>(to), from}) {
      if (!holds(host_memory_, side, bytes)) require_device(side, bytes, "cudaMemcpyAsync");
    }
  }
  enqueue(stream, [=] {
    std::memmove(to, from, bytes);
    return true;
  });
}

void GpuStandIn::reduce(const GatheredReduction& asked, GpuStream stream) {
  GatheredReduction task = asked;
  if (faults_.sums_one) task.num_sources = 1;
  {
    const std::lock_guard lock(mutex_);
    const std::size_t bytes = bytes_of(task.count, task.dtype);
    require_device(
        task.gathered,
        bytes == 0 ? 0 : task.stride_bytes * static_cast<std::size_t>(task.num_sources - 1) + bytes,
        "reduce");
    require_device(task.output, bytes, "reduce");
  }
  enqueue(stream, [task] {
    reduce_gathered(task);
    return true;
  });
}

// ---- communicators
// -------------------------------------------------------------------------------

NcclId GpuStandIn::make_id() {
  NcclId id{};
  const std::uint64_t number = fabric_.new_id();
  std::memcpy(id.data(), &number, sizeof number);
  return id;
}

NcclComm GpuStandIn::start_comm(const NcclId& id, int size, int rank) {
  const std::lock_guard lock(mutex_);
  auto made = std::make_shared<Comm>();
  std::memcpy(&made->id, id.data(), sizeof made->id);
  made->size = size;
  made->rank = rank;
  made->rounds_under_way = kRoundsUnderWay;
  if (faults_.start_fails) {
    made->failure = "unhandled system error: the network has no interface";
  } else if (faults_.start_hangs) {
    made->hangs = true;
  } else {
    fabric_.arrive(made->id, rank, process_);
  }
  NcclComm const handle = made.get();
  comms_.emplace(handle, std::move(made));
  return handle;
}

std::shared_ptr<GpuStandIn::Comm> GpuStandIn::comm_of(NcclComm comm) {
  const auto found = comms_.find(comm);
  if (found == comms_.end()) throw GpuError("invalid argument: no such communicator");
  return found->second;
}

NcclState GpuStandIn::state(NcclComm comm) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Comm> asked = comm_of(comm);
  if (faults_.comms_fail && asked->failure.empty())
    asked->failure = "remote process exited or there was a network error";
  if (!asked->failure.empty()) return {NcclState::Kind::kFailed, asked->failure};
  if (asked->hangs || fabric_.num_arrived(asked->id) < asked->size)
    return {NcclState::Kind::kInProgress};
  if (asked->rounds_under_way > 0 && asked->rounds_under_way-- > 0)
    return {NcclState::Kind::kInProgress};
  for (Step& step : std::exchange(asked->launching, {}))
    asked->stream->tasks.push_back(std::move(step));
  progress();
  return {};
}

void GpuStandIn::abort_comm(NcclComm comm) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = comms_.find(comm);
  if (found == comms_.end()) return;
  found->second->is_aborted = true;
  comms_.erase(found);
  ++num_aborted_;
}

void GpuStandIn::destroy_comm(NcclComm comm) noexcept {
  const std::lock_guard lock(mutex_);
  comms_.erase(comm);
}

void GpuStandIn::group_start() {
  const std::lock_guard lock(mutex_);
  group_ = Group{.is_open = true};
}

void GpuStandIn::group_end() {
  const std::lock_guard lock(mutex_);
  Group group = std::exchange(group_, {});
  if (group.comm == nullptr) return;  // nothing was called
  group.comm->rounds_under_way = kRoundsUnderWay;
  group.comm->stream = &stream_of(group.stream);
  group.comm->launching.push_back(
      [this, comm = group.comm, ops = std::move(group.ops), finish = group.finish]() mutable {
        if (comm->is_aborted) return true;
        if (faults_.kernels_hang || faults_.comms_fail || !comm->failure.empty()) return false;
        bool is_done = true;
        for (Op& op : ops) is_done = move(*comm, op) && is_done;
        if (is_done && finish) finish();
        return is_done;
      });
}

void GpuStandIn::pull() {
  GpuFabric::Frame frame;
  for (int from = 0; from < fabric_.num_ranks(); ++from) {
    std::vector<std::byte> data;
    while (fabric_.read(from, process_, frame, data)) {
      auto& messages = inbox_[{frame.comm, from}];
      if (messages.empty() || messages.back().data.size() == messages.back().bytes)
        messages.push_back({.bytes = frame.message_bytes});
      std::vector<std::byte>& into = messages.back().data;
      into.insert(into.end(), data.begin(), data.end());
      data.clear();
    }
  }
}

bool GpuStandIn::move(Comm& comm, Op& op) {
  if (op.is_done) return true;
  const int peer = fabric_.process_of(comm.id, op.peer);
  if (op.is_send) {
    while (op.moved < op.bytes) {
      const std::size_t bytes = std::min(GpuFabric::kFrameBytes, op.bytes - op.moved);
      if (!fabric_.write(process_, peer, {comm.id, op.bytes, bytes}, op.data + op.moved))
        return false;
      op.moved += bytes;
    }
    return op.is_done = true;
  }
  auto& messages = inbox_[{comm.id, peer}];
  if (messages.empty() || messages.front().data.size() < messages.front().bytes) return false;
  if (messages.front().bytes != op.bytes) {
    comm.failure = fmt::format("a message of {} bytes must be received as such, got {} bytes",
                               messages.front().bytes, op.bytes);
    return false;
  }
  std::memcpy(op.data, messages.front().data.data(), op.bytes);
  messages.pop_front();
  return op.is_done = true;
}

void GpuStandIn::add(Op op, NcclComm comm, GpuStream stream) {
  const std::shared_ptr<Comm> called = comm_of(comm);
  if (!group_.is_open) throw GpuError("the backend calls NCCL in groups only");
  if (called->rounds_under_way > 0 || !called->launching.empty())
    throw GpuError("invalid usage: the communicator is still under way");
  if (group_.comm != nullptr && (group_.comm != called || group_.stream != stream))
    throw GpuError("a group has one communicator and stream here");
  group_.comm = called;
  group_.stream = stream;
  if (op.peer == called->rank) throw GpuError("invalid argument: a rank sends to itself");
  group_.ops.push_back(op);
}

void GpuStandIn::send(const std::byte* data, std::size_t bytes, int peer, NcclComm comm,
                      GpuStream stream) {
  const std::lock_guard lock(mutex_);
  require_device(data, bytes, "ncclSend");
  // NOLINT: a send only reads it
  add({.is_send = true, .peer = peer, .data = const_cast<std::byte*>(data), .bytes = bytes}, comm,
      stream);
}

void GpuStandIn::recv(std::byte* data, std::size_t bytes, int peer, NcclComm comm,
                      GpuStream stream) {
  const std::lock_guard lock(mutex_);
  require_device(data, bytes, "ncclRecv");
  add({.peer = peer, .data = data, .bytes = bytes}, comm, stream);
}

std::shared_ptr<std::vector<std::byte>> GpuStandIn::gather(const std::byte* from, std::size_t bytes,
                                                           NcclComm comm, GpuStream stream) {
  const std::shared_ptr<Comm> called = comm_of(comm);
  auto gathered =
      std::make_shared<std::vector<std::byte>>(bytes * static_cast<std::size_t>(called->size));
  for (int peer = 0; peer < called->size; ++peer) {
    if (peer == called->rank) continue;
    // NOLINT: a send only reads it
    add({.is_send = true, .peer = peer, .data = const_cast<std::byte*>(from), .bytes = bytes}, comm,
        stream);
    add({.peer = peer,
         .data = gathered->data() + bytes * static_cast<std::size_t>(peer),
         .bytes = bytes},
        comm, stream);
  }
  return gathered;
}

void GpuStandIn::all_gather(const std::byte* from, std::byte* to, std::size_t bytes, NcclComm comm,
                            GpuStream stream) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Comm> called = comm_of(comm);
  require_device(from, bytes, "ncclAllGather");
  require_device(to, bytes * static_cast<std::size_t>(called->size), "ncclAllGather");
  const auto gathered = gather(from, bytes, comm, stream);
  group_.finish = [=, rank = static_cast<std::size_t>(called->rank)] {
    std::memcpy(gathered->data() + bytes * rank, from, bytes);
    std::memcpy(to, gathered->data(), gathered->size());
  };
}

void GpuStandIn::broadcast(std::byte* data, std::size_t bytes, int root, NcclComm comm,
                           GpuStream stream) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Comm> called = comm_of(comm);
  require_device(data, bytes, "ncclBroadcast");
  if (called->rank != root) return add({.peer = root, .data = data, .bytes = bytes}, comm, stream);
  for (int peer = 0; peer < called->size; ++peer) {
    if (peer != root)
      add({.is_send = true, .peer = peer, .data = data, .bytes = bytes}, comm, stream);
  }
}

// ---- the library's own reductions: in rank order, as good as any
// ----------------------------------

void GpuStandIn::native_all_reduce(std::byte* data, std::int64_t count, Dtype dtype,
                                   Reduction reduction, NcclComm comm, GpuStream stream) {
  native_reduce(data, data, count, dtype, reduction, -1, comm, stream);
}

void GpuStandIn::native_reduce(const std::byte* from, std::byte* to, std::int64_t count,
                               Dtype dtype, Reduction reduction, int root, NcclComm comm,
                               GpuStream stream) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Comm> called = comm_of(comm);
  if (!has_native(dtype))
    throw GpuError(fmt::format("invalid argument: NCCL reduces no {}", name_of(dtype)));
  const std::size_t bytes = bytes_of(count, dtype);
  const bool has_result = root < 0 || root == called->rank;
  require_device(from, bytes, "ncclReduce");
  if (has_result) require_device(to, bytes, "ncclReduce");
  const auto gathered = gather(from, bytes, comm, stream);
  group_.finish = [=, size = static_cast<std::size_t>(called->size),
                   rank = static_cast<std::size_t>(called->rank)] {
    if (!has_result) return;
    std::memcpy(gathered->data() + bytes * rank, from, bytes);
    std::vector<const std::byte*> sources;
    for (std::size_t i = 0; i < size; ++i) sources.push_back(gathered->data() + bytes * i);
    reduce_ordered(reduction, dtype, sources, to, count);
  };
}

void GpuStandIn::native_reduce_scatter(const std::byte* from, std::byte* to, std::int64_t count,
                                       Dtype dtype, Reduction reduction, NcclComm comm,
                                       GpuStream stream) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Comm> called = comm_of(comm);
  if (!has_native(dtype))
    throw GpuError(fmt::format("invalid argument: NCCL reduces no {}", name_of(dtype)));
  const std::size_t bytes = bytes_of(count, dtype);
  const auto size = static_cast<std::size_t>(called->size);
  const auto rank = static_cast<std::size_t>(called->rank);
  require_device(from, bytes * size, "ncclReduceScatter");
  require_device(to, bytes, "ncclReduceScatter");
  const auto gathered = gather(from, bytes * size, comm, stream);
  group_.finish = [=] {
    std::memcpy(gathered->data() + bytes * size * rank, from, bytes * size);
    std::vector<const std::byte*> sources;
    for (std::size_t i = 0; i < size; ++i)
      sources.push_back(gathered->data() + bytes * (size * i + rank));
    reduce_ordered(reduction, dtype, sources, to, count);
  };
}

}  // namespace isoshard
