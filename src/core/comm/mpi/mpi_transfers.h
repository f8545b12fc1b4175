// SPDX-License-Identifier: Apache-2.0
/// What ranks send to each other: a header first, then the bytes, once the receiver has compared
/// both sides.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "core/comm/mpi/mpi_endpoint.h"
#include "core/comm/mpi/mpi_group.h"

namespace isoshard {

/// One message on its way, as one side sees it.
struct MpiMoving {
  MpiMoving(MpiEndpoint& endpoint, const CollectiveCall& call_in, const Buffer& data_in)
      : call(call_in), data(data_in), in_flight(endpoint) {}
  CollectiveCall call;
  Buffer data;
  std::uint64_t sequence = 0;  ///< in the rank's journal; 0: not entered yet
  InFlight in_flight;
  bool is_under_way = false;  ///< of a recv: its header has come
  bool is_done = false;
};

/// One direction between this rank and another one of a group.
struct MpiChannel {
  std::uint64_t id = 0;
  int peer = 0;  ///< world rank
  int tag = 0;
  bool is_send = false;
  std::uint64_t num_messages = 0;
  std::deque<std::shared_ptr<MpiMoving>> queue{};
};

/// All channels of a rank: who waits in one keeps the others moving.
class MpiTransfers {
 public:
  explicit MpiTransfers(MpiEndpoint& endpoint) : endpoint_(&endpoint) {}

  /// Queues a message behind the earlier ones. A send is under way at once; a small one that need
  /// not be taken travels with its header and is done.
  [[nodiscard]] std::shared_ptr<MpiMoving> add(const CommGroup& group, int own_rank, int peer,
                                               CollectiveCall call, Buffer data,
                                               bool must_be_taken);
  /// Moves what can be moved without waiting.
  /// Errors   CommError on both sides where a message is not what its receiver expects.
  void advance();
  /// Returns when the messages are over, or throws; MPI no longer touches their bytes in both
  /// cases. Errors   as MpiEndpoint::wait_until.
  void finish(std::span<const std::shared_ptr<MpiMoving>> all);
  /// As MpiEndpoint::take_back, of messages that a channel still holds.
  void take_back(std::span<const std::shared_ptr<MpiMoving>> all) noexcept;

 private:
  void finish(MpiMoving& moving);
  void start_sending(MpiChannel& channel, MpiMoving& moving, bool must_be_taken);
  void start_receiving(MpiChannel& channel, MpiMoving& moving);
  void advance(MpiChannel& channel);
  void enter(MpiMoving& moving);

  MpiEndpoint* endpoint_;
  std::map<std::pair<std::uint64_t, bool>, MpiChannel> channels_;
};

}  // namespace isoshard
