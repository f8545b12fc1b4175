// SPDX-License-Identifier: Apache-2.0
/// What ranks send to each other: a header first; when the receiver has come and compared both
/// sides it says so, and both put the transfer into their streams.
///
/// Words. A *channel* is one direction between two ranks of a group. It has a communicator of NCCL
/// of its own, of two ranks, and a stream, so that a transfer waits for nothing but its other side:
/// NCCL's kernels hold a stream until the other rank has come.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "core/comm/control/comm_group.h"
#include "core/comm/nccl/gpu_api.h"

namespace isoshard {

class NcclRank;

/// One message on its way, as one side sees it.
struct NcclMoving {
  CollectiveCall call;
  Buffer data;
  /// kWaiting: for the other side; kLaunched: NCCL has it; kMoving: in the stream.
  enum class Phase : std::uint8_t { kWaiting, kConnecting, kLaunched, kMoving, kDone };
  Phase phase = Phase::kWaiting;
  std::uint64_t sequence = 0;   ///< in the rank's journal; 0: not entered yet
  std::byte* place = nullptr;   ///< on the device, for data of the host
  std::byte* staged = nullptr;  ///< through which these come and go
  GpuEvent done = nullptr;
};

/// All channels of a rank: who waits in one keeps the others moving.
class NcclTransfers {
 public:
  explicit NcclTransfers(NcclRank& rank) : rank_(&rank) {}
  ~NcclTransfers();
  NcclTransfers(const NcclTransfers&) = delete;
  NcclTransfers& operator=(const NcclTransfers&) = delete;

  /// Queues a message behind the earlier ones of its channel.
  [[nodiscard]] std::shared_ptr<NcclMoving> add(const CommGroup& group, int own_rank, int peer,
                                                CollectiveCall call, Buffer data);
  /// Moves what can be moved without waiting.
  /// Errors   CommError on both sides where a message is not what its receiver expects; GpuError.
  void advance();
  /// Returns when the message is over.
  /// Errors   as ControlEndpoint::wait_until; GpuError.
  void finish(const std::shared_ptr<NcclMoving>& moving);

 private:
  struct Channel {
    std::uint64_t id = 0;
    int peer = 0;  ///< world rank
    bool is_send = false;
    std::uint64_t num_messages = 0;
    std::deque<std::shared_ptr<NcclMoving>> queue{};
    bool has_nccl_id = false;
    NcclId nccl_id{};
    NcclComm comm = nullptr;
    GpuStream stream = nullptr;
    GpuEvent ready = nullptr;  ///< of the caller's stream
  };
  void advance(Channel& channel);
  bool advance(Channel& channel, NcclMoving& moving);
  void post(Channel& channel, const NcclMoving& moving);
  bool meet_other_side(Channel& channel, NcclMoving& moving);
  void connect(Channel& channel);
  void launch(Channel& channel, NcclMoving& moving);
  void follow(Channel& channel, NcclMoving& moving);
  void end(NcclMoving& moving);
  void enter(NcclMoving& moving);

  NcclRank* rank_;
  std::map<std::pair<std::uint64_t, bool>, Channel> channels_;
};

}  // namespace isoshard
