// SPDX-License-Identifier: Apache-2.0
/// Collectives on at::Tensor.
#include "core/comm/tensor.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/error.h"

namespace isoshard {
namespace {

/// PrivateUse1 is the device that tests register (harness/testing/test_device.h).
bool is_known(const at::Device& device) {
  return device.is_cpu() || device.is_cuda() || device.is_privateuseone();
}

void check(const at::Tensor& tensor, std::string_view op) {
  if (!tensor.defined()) throw ShapeError(fmt::format("{}: the tensor must be defined", op));
  if (tensor.layout() != at::kStrided || !is_known(tensor.device())) {
    throw ShapeError(
        fmt::format("{}: the tensor must be dense and in the memory of a CPU or GPU, got a {} one "
                    "on {}",
                    op, c10::str(tensor.layout()), tensor.device().str()));
  }
  if (tensor.requires_grad() && at::GradMode::is_enabled()) {
    throw ShapeError(
        fmt::format("{}: the tensor [{}] must not require grad, because autograd would not see the "
                    "collective; call it under "
                    "at::NoGradGuard or inside a custom Function",
                    op, fmt::join(tensor.sizes(), ", ")));
  }
}

void check_writable(const at::Tensor& tensor, std::string_view op) {
  check(tensor, op);
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw ShapeError(
        fmt::format("{}: a tensor that is written in place must not be expanded, got [{}] with "
                    "strides [{}], whose elements share memory; clone it first",
                    op, fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", ")));
  }
}

// `packed` is the contiguous tensor that the collective works on; `tensor` gets its content when
// the Work is done.
Work unpack_when_done(Work work, at::Tensor packed, at::Tensor tensor) {
  return Work([pending = std::make_shared<Work>(std::move(work)), packed = std::move(packed),
               tensor = std::move(tensor)] {
    pending->wait();
    const at::NoGradGuard no_grad;
    if (packed.is_same(tensor)) {
      // What autograd saved of the old content is no longer there: let it notice.
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    } else {
      tensor.copy_(packed);
    }
  });
}

std::vector<std::int64_t> with_first_dim(const at::Tensor& tensor, std::int64_t first) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  if (sizes.empty()) return {first};
  sizes[0] = first;
  return sizes;
}

}  // namespace

Buffer buffer_of(const at::Tensor& tensor) {
  Buffer buffer{static_cast<std::byte*>(tensor.data_ptr()), tensor.numel(), dtype_of(tensor)};
  const at::Device device = tensor.device();
  if (!is_known(device)) {
    throw ShapeError(fmt::format(
        "a collective needs a tensor in the memory of a CPU or GPU, got one on {}", device.str()));
  }
  if (device.is_cpu()) return buffer;
  buffer.device = {Device::Kind::kCuda, std::max(0, static_cast<int>(device.index()))};
  if (device.is_cuda())
    buffer.stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  return buffer;
}

Work all_reduce(Communicator& comm, at::Tensor tensor, Reduction reduction, const CallInfo& info) {
  check_writable(tensor, "all_reduce");
  at::Tensor packed = tensor.is_contiguous() ? tensor : tensor.contiguous();
  Work work = comm.all_reduce(buffer_of(packed), reduction, info);
  return unpack_when_done(std::move(work), std::move(packed), std::move(tensor));
}

at::Tensor all_gather(Communicator& comm, const at::Tensor& tensor, const CallInfo& info) {
  check(tensor, "all_gather");
  const at::Tensor input = tensor.contiguous();
  const std::int64_t first = tensor.dim() == 0 ? 1 : tensor.size(0);
  at::Tensor output = at::empty(with_first_dim(tensor, first * comm.size()), tensor.options());
  comm.all_gather(buffer_of(input), buffer_of(output), info).wait();
  return output;
}

at::Tensor reduce_scatter(Communicator& comm, const at::Tensor& tensor, Reduction reduction,
                          const CallInfo& info) {
  check(tensor, "reduce_scatter");
  if (tensor.dim() == 0 || tensor.size(0) % comm.size() != 0) {
    throw ShapeError(
        fmt::format("reduce_scatter: dim 0 must be divisible by the group size {}, got [{}]",
                    comm.size(), fmt::join(tensor.sizes(), ", ")));
  }
  const at::Tensor input = tensor.contiguous();
  at::Tensor output =
      at::empty(with_first_dim(tensor, tensor.size(0) / comm.size()), tensor.options());
  comm.reduce_scatter(buffer_of(input), buffer_of(output), reduction, info).wait();
  return output;
}

Work broadcast(Communicator& comm, at::Tensor tensor, int root, const CallInfo& info) {
  check_writable(tensor, "broadcast");
  at::Tensor packed = tensor.is_contiguous() ? tensor : tensor.contiguous();
  Work work = comm.broadcast(buffer_of(packed), root, info);
  return unpack_when_done(std::move(work), std::move(packed), std::move(tensor));
}

}  // namespace isoshard
