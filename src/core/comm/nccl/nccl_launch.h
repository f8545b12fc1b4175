// SPDX-License-Identifier: Apache-2.0
/// One collective on the device, from the announcements that agree to the end of its Work.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/control/group_calls.h"
#include "core/comm/nccl/nccl_rank.h"

namespace isoshard {

/// Bytes to or from a rank of the group.
struct NcclPiece {
  int rank = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// What a group has in NCCL: made by its first call that moves data, and shared by later ones.
struct NcclGroup {
  NcclComm comm = nullptr;
};

/// Puts the parts of one collective into the rank's stream, behind the streams of its buffers.
/// Buffers of the host go to the device before, and back when the Work is waited for.
///
/// Ranks    collective over the group: all put in the same parts.
/// Errors   CommError, GpuError.
class NcclLaunch {
 public:
  NcclLaunch(std::shared_ptr<NcclRank> rank, const GroupCalls& calls, NcclGroup& group,
             MetCall call);

  /// The call ends after what the buffer's stream already holds, even if nothing moves.
  void follow(const ConstBuffer& buffer);
  /// Where the elements are on the device, once they are there.
  [[nodiscard]] const std::byte* input(const ConstBuffer& buffer);
  /// Where results go. `has_input`: it is read, too.
  [[nodiscard]] std::byte* output(const Buffer& buffer, bool has_input);
  /// Until the end of the call.
  [[nodiscard]] std::byte* scratch(std::size_t bytes) { return rank_->scratch().take(bytes); }

  [[nodiscard]] GpuApi& api() noexcept { return rank_->api(); }
  [[nodiscard]] NcclComm comm() const noexcept { return group_->comm; }
  [[nodiscard]] GpuStream stream() const noexcept { return rank_->stream(); }
  /// Calls of NCCL that move at once.
  void at_once(const std::function<void()>& calls);
  /// Pieces by group rank, at once. Empty ones are left out.
  void exchange(const std::vector<NcclPiece>& receives, const std::vector<NcclPiece>& sends);
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);
  void reduce(const GatheredReduction& task) { api().reduce(task, stream()); }

  /// Nothing is put in afterwards.
  [[nodiscard]] Work end();

 private:
  void bring(std::byte* place, const std::byte* host, std::size_t bytes);

  std::shared_ptr<NcclRank> rank_;
  RankSet members_;
  NcclGroup* group_;
  MetCall call_;
  std::vector<std::pair<Buffer, std::byte*>> results_;  ///< of the host, and where on the device
  std::vector<std::byte*> staged_;
  std::vector<GpuStream> followed_;
  GpuEvent event_ = nullptr;  ///< for streams that are followed
};

}  // namespace isoshard
