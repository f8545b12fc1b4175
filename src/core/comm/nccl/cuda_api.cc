// SPDX-License-Identifier: Apache-2.0
/// Each function of the table is one of CUDA or NCCL, checked.
#include "core/comm/nccl/cuda_api.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "core/comm/nccl/reduce_kernels.h"

namespace isoshard {
namespace {

static_assert(std::tuple_size_v<NcclId> == NCCL_UNIQUE_ID_BYTES);

void check(cudaError_t code, const char* function) {
  if (code == cudaSuccess) return;
  throw GpuError(
      fmt::format("{}: {} ({})", function, cudaGetErrorString(code), cudaGetErrorName(code)));
}

// ncclInProgress is no failure: state() says when it is over.
void check(ncclResult_t code, const char* function, ncclComm_t comm = nullptr) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  const char* const more = ncclGetLastError(comm);
  throw GpuError(fmt::format("{}: {}{}{}", function, ncclGetErrorString(code),
                             more != nullptr && *more != '\0' ? "; " : "",
                             more != nullptr ? more : ""));
}

/// NCCL refuses two ranks of one host on one GPU; two of different hosts it cannot see.
constexpr std::array<std::pair<const char*, const char*>, 12> kOfSharedGpus = {
    {{"NCCL_NET", "Socket"},
     {"NCCL_IB_DISABLE", "1"},
     {"NCCL_SOCKET_IFNAME", "lo"},
     {"NCCL_P2P_DISABLE", "1"},
     {"NCCL_SHM_DISABLE", "1"},
     {"NCCL_NVLS_ENABLE", "0"},
     {"NCCL_CUMEM_ENABLE", "0"},
     {"NCCL_ALGO", "Ring"},
     {"NCCL_PROTO", "Simple"},
     {"NCCL_MIN_CTAS", "1"},
     {"NCCL_MAX_CTAS", "2"},
     {"NCCL_RAS_ENABLE", "0"}}};

cudaStream_t as_stream(GpuStream stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t as_event(GpuEvent event) {
  return static_cast<cudaEvent_t>(event);
}
ncclComm_t as_comm(NcclComm comm) {
  return static_cast<ncclComm_t>(comm);
}

ncclDataType_t type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return ncclFloat64;
    case Dtype::kFloat32:
      return ncclFloat32;
    case Dtype::kBFloat16:
      return ncclBfloat16;
    case Dtype::kFloat16:
      return ncclFloat16;
    case Dtype::kInt64:
      return ncclInt64;
    case Dtype::kInt32:
      return ncclInt32;
    case Dtype::kInt8:
      return ncclInt8;
    case Dtype::kUint8:
      return ncclUint8;
    case Dtype::kInt16:
    case Dtype::kBool:
      break;
  }
  throw GpuError(fmt::format("NCCL cannot reduce {}", name_of(dtype)));
}

ncclRedOp_t op_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return ncclSum;
    case Reduction::kAvg:
      return ncclAvg;
    case Reduction::kMin:
      return ncclMin;
    case Reduction::kMax:
      return ncclMax;
  }
  return ncclSum;
}

class CudaApi final : public GpuApi {
 public:
  [[nodiscard]] std::string name() const override {
    int cuda = 0, nccl = 0;
    cudaRuntimeGetVersion(&cuda);
    ncclGetVersion(&nccl);
    return fmt::format("CUDA {}.{}, NCCL {}.{}.{}", cuda / 1000, cuda % 1000 / 10, nccl / 10000,
                       nccl % 10000 / 100, nccl % 100);
  }
  [[nodiscard]] int num_devices() override {
    int devices = 0;
    check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    return devices;
  }
  void use_device(int index) override { check(cudaSetDevice(index), "cudaSetDevice"); }

  [[nodiscard]] std::byte* allocate(std::size_t bytes) override {
    void* made = nullptr;
    check(cudaMalloc(&made, bytes), "cudaMalloc");
    return static_cast<std::byte*>(made);
  }
  void free(std::byte* memory) noexcept override { cudaFree(memory); }
  [[nodiscard]] std::byte* allocate_host(std::size_t bytes) override {
    void* made = nullptr;
    check(cudaMallocHost(&made, bytes), "cudaMallocHost");
    return static_cast<std::byte*>(made);
  }
  void free_host(std::byte* memory) noexcept override { cudaFreeHost(memory); }
  [[nodiscard]] GpuStream make_stream() override {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return made;
  }
  void destroy_stream(GpuStream stream) noexcept override { cudaStreamDestroy(as_stream(stream)); }
  [[nodiscard]] GpuEvent make_event() override {
    cudaEvent_t made = nullptr;
    check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return made;
  }
  void destroy_event(GpuEvent event) noexcept override { cudaEventDestroy(as_event(event)); }
  void record(GpuEvent event, GpuStream stream) override {
    check(cudaEventRecord(as_event(event), as_stream(stream)), "cudaEventRecord");
  }
  void wait_for(GpuEvent event, GpuStream stream) override {
    check(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0), "cudaStreamWaitEvent");
  }
  [[nodiscard]] bool is_done(GpuEvent event) override {
    const cudaError_t code = cudaEventQuery(as_event(event));
    if (code == cudaErrorNotReady) return false;
    check(code, "cudaEventQuery");
    return true;
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, GpuStream stream) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)),
          "cudaMemcpyAsync");
  }
  void reduce(const GatheredReduction& task, GpuStream stream) override {
    check(launch_reduction(task, as_stream(stream)), "a kernel of the reduction");
  }

  [[nodiscard]] NcclId make_id() override {
    ncclUniqueId made;
    check(ncclGetUniqueId(&made), "ncclGetUniqueId");
    NcclId id;
    std::memcpy(id.data(), made.internal, id.size());
    return id;
  }
  [[nodiscard]] NcclComm start_comm(const NcclId& id, int size, int rank) override {
    ncclUniqueId given;
    std::memcpy(given.internal, id.data(), id.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t made = nullptr;
    check(ncclCommInitRankConfig(&made, size, given, rank, &config), "ncclCommInitRankConfig");
    return made;
  }
  [[nodiscard]] NcclState state(NcclComm comm) override {
    ncclResult_t result = ncclSuccess;
    check(ncclCommGetAsyncError(as_comm(comm), &result), "ncclCommGetAsyncError", as_comm(comm));
    if (result == ncclSuccess) return {};
    if (result == ncclInProgress) return {NcclState::Kind::kInProgress};
    const char* const more = ncclGetLastError(as_comm(comm));
    return {NcclState::Kind::kFailed,
            fmt::format("{}{}{}", ncclGetErrorString(result),
                        more != nullptr && *more != '\0' ? "; " : "", more != nullptr ? more : "")};
  }
  void abort_comm(NcclComm comm) noexcept override { ncclCommAbort(as_comm(comm)); }
  // Finalizing sends what others still receive. A rank that is gone must not keep this one.
  void destroy_comm(NcclComm comm) noexcept override {
    constexpr std::chrono::seconds kLongest{10};
    const auto until = std::chrono::steady_clock::now() + kLongest;
    ncclResult_t result = ncclCommFinalize(as_comm(comm));
    while (result == ncclInProgress && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
      if (ncclCommGetAsyncError(as_comm(comm), &result) != ncclSuccess) break;
    }
    if (result == ncclSuccess) {
      ncclCommDestroy(as_comm(comm));
    } else {
      ncclCommAbort(as_comm(comm));
    }
  }
  void group_start() override { check(ncclGroupStart(), "ncclGroupStart"); }
  void group_end() override { check(ncclGroupEnd(), "ncclGroupEnd"); }
  void send(const std::byte* data, std::size_t bytes, int peer, NcclComm comm,
            GpuStream stream) override {
    check(ncclSend(data, bytes, ncclInt8, peer, as_comm(comm), as_stream(stream)), "ncclSend",
          as_comm(comm));
  }
  void recv(std::byte* data, std::size_t bytes, int peer, NcclComm comm,
            GpuStream stream) override {
    check(ncclRecv(data, bytes, ncclInt8, peer, as_comm(comm), as_stream(stream)), "ncclRecv",
          as_comm(comm));
  }
  void all_gather(const std::byte* from, std::byte* to, std::size_t bytes, NcclComm comm,
                  GpuStream stream) override {
    check(ncclAllGather(from, to, bytes, ncclInt8, as_comm(comm), as_stream(stream)),
          "ncclAllGather", as_comm(comm));
  }
  void broadcast(std::byte* data, std::size_t bytes, int root, NcclComm comm,
                 GpuStream stream) override {
    check(ncclBroadcast(data, data, bytes, ncclInt8, root, as_comm(comm), as_stream(stream)),
          "ncclBroadcast", as_comm(comm));
  }
  void native_all_reduce(std::byte* data, std::int64_t count, Dtype dtype, Reduction reduction,
                         NcclComm comm, GpuStream stream) override {
    check(ncclAllReduce(data, data, static_cast<std::size_t>(count), type_of(dtype),
                        op_of(reduction), as_comm(comm), as_stream(stream)),
          "ncclAllReduce", as_comm(comm));
  }
  void native_reduce_scatter(const std::byte* from, std::byte* to, std::int64_t count, Dtype dtype,
                             Reduction reduction, NcclComm comm, GpuStream stream) override {
    check(ncclReduceScatter(from, to, static_cast<std::size_t>(count), type_of(dtype),
                            op_of(reduction), as_comm(comm), as_stream(stream)),
          "ncclReduceScatter", as_comm(comm));
  }
  void native_reduce(const std::byte* from, std::byte* to, std::int64_t count, Dtype dtype,
                     Reduction reduction, int root, NcclComm comm, GpuStream stream) override {
    check(ncclReduce(from, to, static_cast<std::size_t>(count), type_of(dtype), op_of(reduction),
                     root, as_comm(comm), as_stream(stream)),
          "ncclReduce", as_comm(comm));
  }
};

}  // namespace

std::shared_ptr<GpuApi> make_cuda_api(int local_rank, int local_size) {
  auto api = std::make_shared<CudaApi>();
  if (local_size > api->num_devices()) {
    for (const auto& [name, value] : kOfSharedGpus) ::setenv(name, value, /*overwrite=*/0);
    ::setenv("NCCL_HOSTID", fmt::format("isoshard-{}", local_rank).c_str(), /*overwrite=*/0);
  }
  return api;
}

void use_cuda() {
  set_gpu_api(make_cuda_api);
}

std::string why_no_gpu() {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return "cannot create a pipe";
  const pid_t asking = ::fork();
  if (asking == 0) {
    int devices = 0;
    const cudaError_t code = cudaGetDeviceCount(&devices);
    const char* const words = code != cudaSuccess ? cudaGetErrorString(code)
                              : devices == 0      ? "no CUDA-capable device is detected"
                                                  : "";
    (void)!::write(ends[1], words, std::strlen(words));
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string words;
  std::array<char, 512> piece{};
  for (ssize_t got = 0; (got = ::read(ends[0], piece.data(), piece.size())) > 0;)
    words.append(piece.data(), static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  if (asking < 0 || ::waitpid(asking, &status, 0) != asking || status != 0)
    return "the process that asks CUDA for its devices failed";
  return words;
}

}  // namespace isoshard
