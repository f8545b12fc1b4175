// SPDX-License-Identifier: Apache-2.0
/// attach_mpi_job: the job is MPI_COMM_WORLD.
#include <mpi.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "core/comm/attached_job.h"
#include "core/comm/mpi/launcher.h"
#include "core/comm/mpi/mpi_job.h"
#include "core/comm/mpi/mpi_world.h"

namespace isoshard {
namespace {

class MpiAttachedJob final : public AttachedJob {
 public:
  MpiAttachedJob() {
    start_mpi();
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    check_attached_world([](const char* name) { return std::getenv(name); }, rank_, size_,
                         /*expected_size=*/0);
  }
  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  std::unique_ptr<AttachedWorld> make_world(ReductionOrder order) override {
    return std::make_unique<MpiWorld>(order);
  }
  std::uint64_t largest(std::uint64_t own) override {
    std::uint64_t most = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Iallreduce(&own, &most, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD, &request),
              "MPI_Iallreduce");
    await(request);
    return most;
  }
  void finish() override { finish_mpi(); }
  [[nodiscard]] std::string library() const override {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    check_mpi(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
    const std::string_view words(text.data(), static_cast<std::size_t>(length));
    return std::string(words.substr(0, words.find_first_of(",\n")));
  }
  void end_all(int code) noexcept override {
    MPI_Abort(MPI_COMM_WORLD, code);
    ::_Exit(code);
  }

 private:
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace

std::unique_ptr<AttachedJob> attach_mpi_job() {
  return std::make_unique<MpiAttachedJob>();
}

}  // namespace isoshard
