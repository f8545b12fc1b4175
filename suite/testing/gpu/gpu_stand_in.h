// SPDX-License-Identifier: Apache-2.0
/// Stands in for a GPU with CUDA and NCCL, for tests of the nccl backend without one: device memory
/// is host memory, streams are queues that a thread works off, and NCCL's bytes go through memory
/// that forked ranks share. It is as asynchronous as the real ones, and stricter: it refuses what
/// they would only be undefined for.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/comm/nccl/gpu_api.h"
#include "suite/testing/gpu/gpu_fabric.h"

namespace isoshard {

/// One rank's GPU.
///
/// Guarantees   work on a stream runs in its order and never inside the call that puts it there.
///              A communicator is under way for some calls of state() after each group_end(), and
///              what was called is put into the stream only then. Memory that was not written holds
///              0xcd.
/// Errors       GpuError for a call on a communicator that is under way, for addresses that are no
///              device memory, and as told by faults(). A message of another size than is received
///              makes the communicator fail, as a hang or worse would be its end in NCCL.
class GpuStandIn final : public GpuApi {
 public:
  /// What goes wrong from now on.
  struct Faults {
    std::atomic<bool> start_fails{false};   ///< of communicators, in their state
    std::atomic<bool> start_hangs{false};   ///< they are under way forever
    std::atomic<bool> comms_fail{false};    ///< all of them, and what they do hangs
    std::atomic<bool> kernels_hang{false};  ///< NCCL's, until they are aborted
    std::atomic<bool> copies_throw{false};  ///< as an illegal address would
    std::atomic<bool> sums_one{false};      ///< of all ranks a reduction takes the first alone
  };
  GpuStandIn(GpuFabric& fabric, int process);
  ~GpuStandIn() override;
  GpuStandIn(const GpuStandIn&) = delete;
  GpuStandIn& operator=(const GpuStandIn&) = delete;

  [[nodiscard]] Faults& faults() noexcept { return faults_; }
  /// Memory of the device that others have allocated, as LibTorch does. Called before any work.
  void set_other_memory(std::function<bool(const std::byte* data, std::size_t bytes)> is_other) {
    is_other_memory_ = std::move(is_other);
  }
  /// Puts work into a stream; it is done when `step`, called again and again, returns true.
  void enqueue(GpuStream stream, std::function<bool()> step);
  /// What follows in the stream waits for so many rounds of the working thread.
  void delay(GpuStream stream, int rounds);
  [[nodiscard]] std::size_t num_allocated() const;
  [[nodiscard]] int num_aborted_comms() const;

  [[nodiscard]] std::string name() const override { return "a stand-in for CUDA and NCCL"; }
  [[nodiscard]] int num_devices() override { return 1; }
  void use_device(int index) override;
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override;
  void free(std::byte* memory) noexcept override;
  [[nodiscard]] std::byte* allocate_host(std::size_t bytes) override;
  void free_host(std::byte* memory) noexcept override;
  [[nodiscard]] GpuStream make_stream() override;
  void destroy_stream(GpuStream stream) noexcept override;
  [[nodiscard]] GpuEvent make_event() override;
  void destroy_event(GpuEvent event) noexcept override;
  void record(GpuEvent event, GpuStream stream) override;
  void wait_for(GpuEvent event, GpuStream stream) override;
  [[nodiscard]] bool is_done(GpuEvent event) override;
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, GpuStream stream) override;
  void reduce(const GatheredReduction& task, GpuStream stream) override;
  [[nodiscard]] NcclId make_id() override;
  [[nodiscard]] NcclComm start_comm(const NcclId& id, int size, int rank) override;
  [[nodiscard]] NcclState state(NcclComm comm) override;
  void abort_comm(NcclComm comm) noexcept override;
  void destroy_comm(NcclComm comm) noexcept override;
  void group_start() override;
  void group_end() override;
  void send(const std::byte* data, std::size_t bytes, int peer, NcclComm comm,
            GpuStream stream) override;
  void recv(std::byte* data, std::size_t bytes, int peer, NcclComm comm, GpuStream stream) override;
  void all_gather(const std::byte* from, std::byte* to, std::size_t bytes, NcclComm comm,
                  GpuStream stream) override;
  void broadcast(std::byte* data, std::size_t bytes, int root, NcclComm comm,
                 GpuStream stream) override;
  void native_all_reduce(std::byte* data, std::int64_t count, Dtype dtype, Reduction reduction,
                         NcclComm comm, GpuStream stream) override;
  void native_reduce_scatter(const std::byte* from, std::byte* to, std::int64_t count, Dtype dtype,
                             Reduction reduction, NcclComm comm, GpuStream stream) override;
  void native_reduce(const std::byte* from, std::byte* to, std::int64_t count, Dtype dtype,
                     Reduction reduction, int root, NcclComm comm, GpuStream stream) override;

 private:
  using Step = std::function<bool()>;
  struct Stream {
    std::deque<Step> tasks{};
    bool is_dying = false;
  };
  struct Event {
    std::uint64_t num_recorded = 0;
    std::uint64_t num_done = 0;
  };
  struct Op {
    bool is_send = false;
    int peer = 0;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::size_t moved = 0;
    bool is_done = false;
  };
  struct Comm {
    std::uint64_t id = 0;
    int size = 0;
    int rank = 0;
    bool hangs = false;
    bool is_aborted = false;
    std::string failure{};
    int rounds_under_way = 0;  ///< calls of state() until it is ready
    Stream* stream = nullptr;  ///< of `launching`
    std::vector<Step> launching{};
  };
  struct Message {
    std::uint64_t bytes = 0;
    std::vector<std::byte> data{};
  };
  /// What group_start() began.
  struct Group {
    bool is_open = false;
    std::shared_ptr<Comm> comm{};
    GpuStream stream = nullptr;
    std::vector<Op> ops{};
    std::function<void()> finish{};  ///< when all ops are done
  };

  void work();
  bool progress();
  [[nodiscard]] bool has_tasks() const;
  void pull();
  bool move(Comm& comm, Op& op);
  [[nodiscard]] std::shared_ptr<Comm> comm_of(NcclComm comm);
  [[nodiscard]] Stream& stream_of(GpuStream stream);
  [[nodiscard]] static bool holds(const std::map<const std::byte*, std::size_t>& memory,
                                  const std::byte* data, std::size_t bytes);
  void require_device(const std::byte* data, std::size_t bytes, const char* what) const;
  void add(Op op, NcclComm comm, GpuStream stream);
  /// Every rank's data, in rank order, in memory of the stand-in's own.
  std::shared_ptr<std::vector<std::byte>> gather(const std::byte* from, std::size_t bytes,
                                                 NcclComm comm, GpuStream stream);

  GpuFabric& fabric_;
  int process_;
  Faults faults_;
  mutable std::mutex mutex_;
  std::condition_variable wakes_;
  bool is_ending_ = false;
  std::map<GpuStream, std::unique_ptr<Stream>> streams_;  ///< null: the default one
  std::map<GpuEvent, std::shared_ptr<Event>> events_;
  std::map<NcclComm, std::shared_ptr<Comm>> comms_;
  std::map<const std::byte*, std::size_t> memory_;
  std::map<const std::byte*, std::size_t> host_memory_;
  std::function<bool(const std::byte*, std::size_t)> is_other_memory_;
  std::vector<std::byte*> freed_;  ///< that streams may still use
  std::map<std::pair<std::uint64_t, int>, std::deque<Message>> inbox_;  ///< comm, process
  Group group_;
  int num_aborted_ = 0;
  std::thread worker_;
};

}  // namespace isoshard
