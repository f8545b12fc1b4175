// SPDX-License-Identifier: Apache-2.0
/// Worlds of ranks that are forked: a listening socket, and memory that all of them share.
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "core/base/error.h"
#include "core/comm/nccl/nccl_communicator.h"
#include "core/comm/nccl/nccl_rank.h"
#include "core/comm/nccl/nccl_world.h"

namespace isoshard {
namespace {

/// Zeroed memory that forked processes share.
class SharedPages {
 public:
  explicit SharedPages(std::size_t bytes) : bytes_(bytes) {
    void* const made =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) {
      throw InfrastructureError(
          fmt::format("cannot get {} KiB of shared memory: {}", bytes >> 10, std::strerror(errno)));
    }
    data_ = static_cast<std::byte*>(made);
  }
  ~SharedPages() { ::munmap(data_, bytes_); }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

constexpr std::size_t kJournalOffset = 4096;
static_assert(sizeof(SharedAbort) <= kJournalOffset);

class ForkedNcclWorld final : public CommWorld {
 public:
  ForkedNcclWorld(int num_ranks, ReductionOrder order)
      : size_(checked(num_ranks)),
        order_(order),
        pages_(kJournalOffset + Journal::bytes(num_ranks)),
        abort_(*new (pages_.data()) SharedAbort),
        journal_(pages_.data() + kJournalOffset, num_ranks) {}

  [[nodiscard]] int size() const noexcept override { return size_; }
  std::unique_ptr<Communicator> communicator(int rank) override {
    if (rank < 0 || rank >= size_)
      throw UsageError(fmt::format("the rank must be from 0 to {}, got {}", size_ - 1, rank));
    if (!gpu_api())
      throw NotBuiltError("backend nccl is not part of this program (docs/reference/gpu.md)");
    const std::shared_ptr<GpuApi> api = gpu_api()(rank, size_);
    const int devices = api->num_devices();
    if (devices == 0) {
      throw GpuError(fmt::format("a rank of backend nccl must have a GPU, got none ({}); use shm",
                                 api->name()));
    }
    auto job = std::make_shared<TcpJob>(Rendezvous{.rank = rank,
                                                   .size = size_,
                                                   .port = listener_.port(),
                                                   .listening_socket = listener_.socket()});
    return std::make_unique<NcclCommunicator>(std::make_shared<NcclRank>(
        std::move(job), api, rank % devices, order_, &abort_, pages_.data() + kJournalOffset));
  }
  void abort(std::string_view reason) noexcept override {
    std::uint32_t expected = 0;
    // 2: the reason is being written
    if (!abort_.is_aborted.compare_exchange_strong(expected, 2)) return;
    const std::size_t length = std::min(reason.size(), sizeof abort_.reason - 1);
    std::memcpy(abort_.reason, reason.data(), length);
    abort_.is_aborted.store(1, std::memory_order_release);
  }
  [[nodiscard]] const Journal& journal() const noexcept override { return journal_; }

 private:
  static int checked(int num_ranks) {
    if (num_ranks >= 1 && num_ranks <= kMaxRanks) return num_ranks;
    throw UsageError(
        fmt::format("the number of ranks must be from 1 to {}, got {}", kMaxRanks, num_ranks));
  }

  int size_;
  ReductionOrder order_;
  LoopbackListener listener_;
  SharedPages pages_;
  SharedAbort& abort_;
  Journal journal_;
};

}  // namespace

Transport nccl_transport() {
  return {Backend::kNccl, true, [](int num_ranks, ReductionOrder order) {
            return std::make_unique<ForkedNcclWorld>(num_ranks, order);
          }};
}

}  // namespace isoshard
