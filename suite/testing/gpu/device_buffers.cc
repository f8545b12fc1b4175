// SPDX-License-Identifier: Apache-2.0
/// Copies around each call.
#include "suite/testing/gpu/device_buffers.h"

#include <thread>
#include <utility>
#include <vector>

#include "core/comm/buffers.h"
#include "suite/testing/gpu/gpu_stand_in.h"

namespace isoshard {

/// The buffers of one call. Kept by its Work.
class DeviceBuffers::Call {
 public:
  Call(std::shared_ptr<GpuApi> api, int device, GpuStream stream)
      : api_(std::move(api)), device_(device), stream_(stream) {
    // what follows is late
    if (auto* const stand_in = dynamic_cast<GpuStandIn*>(api_.get())) stand_in->delay(stream, 2);
  }
  ~Call() {
    if (!memory_.empty()) wait_for(stream_);  // its copies read from here
    for (std::byte* memory : memory_) api_->free(memory);
    for (std::byte* memory : staged_) api_->free_host(memory);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Buffer place(const ConstBuffer& host, bool is_read) {
    // NOLINT: written only where the caller's buffer is not const
    Buffer buffer{const_cast<std::byte*>(host.data), host.count, host.dtype};
    // what is malformed is not ours to judge
    if (host.count <= 0 || host.data == nullptr || host.device != Device{} ||
        host.stream != nullptr) {
      buffer.device = host.device;
      buffer.stream = host.stream;
      return buffer;
    }
    const std::size_t bytes = bytes_of(host.count, host.dtype);
    buffer.data = memory_.emplace_back(api_->allocate(bytes));
    buffer.device = {Device::Kind::kCuda, device_};
    buffer.stream = stream_;
    if (is_read) {
      std::byte* const staged = staged_.emplace_back(api_->allocate_host(bytes));
      copy_bytes(staged, host.data, bytes);
      api_->copy(buffer.data, staged, bytes, stream_);
    }
    return buffer;
  }
  Buffer result(const Buffer& host, bool is_read) {
    const Buffer buffer = place(host, is_read);
    if (buffer.data != host.data) results_.emplace_back(host, buffer.data);
    return buffer;
  }
  /// When the inner Work is done: no stream is asked, as wait() promises the result to all.
  void copy_back() {
    if (results_.empty()) return;
    GpuStream other = api_->make_stream();
    std::vector<std::byte*> staged;
    for (const auto& [host, data] : results_) {
      const std::size_t bytes = bytes_of(host.count, host.dtype);
      api_->copy(staged.emplace_back(staged_.emplace_back(api_->allocate_host(bytes))), data, bytes,
                 other);
    }
    wait_for(other);
    api_->destroy_stream(other);
    for (std::size_t i = 0; i < results_.size(); ++i) {
      const Buffer& host = results_[i].first;
      copy_bytes(host.data, staged[i], bytes_of(host.count, host.dtype));
    }
  }

 private:
  void wait_for(GpuStream stream) {
    GpuEvent done = api_->make_event();
    api_->record(done, stream);
    while (!api_->is_done(done)) std::this_thread::yield();
    api_->destroy_event(done);
  }

  std::shared_ptr<GpuApi> api_;
  int device_;
  GpuStream stream_;
  std::vector<std::byte*> memory_;
  std::vector<std::byte*> staged_;
  std::vector<std::pair<Buffer, std::byte*>> results_;
};

namespace {

template <class Call>
Work finished(std::shared_ptr<Call> call, Work work) {
  return Work([call = std::move(call), inner = std::make_shared<Work>(std::move(work))] {
    inner->wait();
    call->copy_back();
  });
}

}  // namespace

DeviceBuffers::DeviceBuffers(std::unique_ptr<Communicator> inner, std::shared_ptr<GpuApi> api,
                             int device)
    : inner_(std::move(inner)),
      api_(std::move(api)),
      device_(device),
      stream_(api_->make_stream()) {}

DeviceBuffers::~DeviceBuffers() {
  api_->destroy_stream(stream_);
}

Work DeviceBuffers::all_reduce(Buffer data, Reduction reduction, const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  return finished(call, inner_->all_reduce(call->result(data, true), reduction, info));
}

Work DeviceBuffers::all_gather(ConstBuffer input, Buffer output, const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  const Buffer in = call->place(input, true);
  return finished(call, inner_->all_gather(in, call->result(output, false), info));
}

Work DeviceBuffers::reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                                   const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  const Buffer in = call->place(input, true);
  return finished(call, inner_->reduce_scatter(in, call->result(output, false), reduction, info));
}

Work DeviceBuffers::all_gather_uneven(ConstBuffer input, Buffer output,
                                      std::span<const std::int64_t> counts, const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  const Buffer in = call->place(input, true);
  return finished(call, inner_->all_gather_uneven(in, call->result(output, false), counts, info));
}

Work DeviceBuffers::reduce_scatter_uneven(ConstBuffer input, Buffer output,
                                          std::span<const std::int64_t> counts, Reduction reduction,
                                          const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  const Buffer in = call->place(input, true);
  return finished(call, inner_->reduce_scatter_uneven(in, call->result(output, false), counts,
                                                      reduction, info));
}

Work DeviceBuffers::all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts,
                               Buffer output, std::span<const std::int64_t> output_counts,
                               const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  const Buffer in = call->place(input, true);
  return finished(
      call, inner_->all_to_all(in, input_counts, call->result(output, false), output_counts, info));
}

Work DeviceBuffers::send(ConstBuffer data, int to, const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  return finished(call, inner_->send(call->place(data, true), to, info));
}

Work DeviceBuffers::recv(Buffer data, int from, const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  Work work = finished(call, inner_->recv(call->result(data, false), from, info));
  work.wait();  // as the call itself does on the host
  return work;
}

Work DeviceBuffers::send_recv(std::span<const Transfer> transfers) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  std::vector<Transfer> on_device(transfers.begin(), transfers.end());
  for (Transfer& transfer : on_device) {
    transfer.data =
        transfer.is_send ? call->place(transfer.data, true) : call->result(transfer.data, false);
  }
  return finished(call, inner_->send_recv(on_device));
}

Work DeviceBuffers::broadcast(Buffer data, int root, const CallInfo& info) {
  const auto call = std::make_shared<Call>(api_, device_, stream_);
  return finished(call, inner_->broadcast(call->result(data, rank() == root), root, info));
}

std::unique_ptr<Communicator> DeviceBuffers::split(int color, int key) {
  return std::make_unique<DeviceBuffers>(inner_->split(color, key), api_, device_);
}

}  // namespace isoshard
