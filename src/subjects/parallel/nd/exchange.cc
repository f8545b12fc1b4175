// SPDX-License-Identifier: Apache-2.0
// One grouped send and receive.
#include "subjects/parallel/nd/exchange.h"

#include <ATen/ATen.h>

#include <array>
#include <span>

#include "core/comm/tensor.h"

namespace isoshard {

at::Tensor exchanged(const at::Tensor& tensor, int to, int from, Communicator& group,
                     Purpose purpose, Axis axis, const std::string& name, ParamClass param_class) {
  const at::Tensor sent = tensor.contiguous();
  at::Tensor received = at::empty_like(sent);
  const Segment segment{name, param_class, 0, sent.numel()};
  const CallInfo info{purpose, axis, std::span(&segment, 1)};
  const std::array<Transfer, 2> transfers{Transfer{true, to, buffer_of(sent), info},
                                          Transfer{false, from, buffer_of(received), info}};
  group.send_recv(transfers).wait();
  return received;
}

}  // namespace isoshard
