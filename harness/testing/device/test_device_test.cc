// SPDX-License-Identifier: Apache-2.0
/// The device that stands for a GPU computes what the CPU computes, and refuses what a GPU refuses.
#include "harness/testing/device/test_device.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/tensor/convert.h"
#include "core/tensor/device.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;

at::Tensor numbers(at::IntArrayRef shape, double step) {
  return (at::arange(c10::multiply_integers(shape), at::kDouble) * step)
      .sin()
      .to(at::kFloat)
      .view(shape);
}

TEST(TestDevice, TensorsAreOnItAndComputeTheBitsOfTheCpu) {
  const at::Device device = test_device();
  const at::Tensor x = numbers({5, 8}, 0.7);
  const at::Tensor weight = numbers({3, 8}, 0.3);

  const at::Tensor own = at::softmax(at::linear(x.to(device), weight.to(device)), -1).t();

  EXPECT_EQ(own.device(), device);
  EXPECT_TRUE(own.to(at::kCPU).equal(at::softmax(at::linear(x, weight), -1).t()));
}

TEST(TestDevice, RanksTakeTheDevicesInTurn) {
  (void)test_device();

  EXPECT_EQ(device_of_rank(0), test_device());
  EXPECT_EQ(device_of_rank(3), test_device()) << "there is one";
}

TEST(TestDevice, BackwardRunsOnAThreadOfItsOwnAndGivesTheGradientsOfTheCpu) {
  const at::Device device = test_device();
  const at::Tensor x = numbers({5, 8}, 0.7);
  const at::Tensor weight = numbers({3, 8}, 0.3);
  at::Tensor own = weight.to(device).requires_grad_(true);
  at::Tensor plain = weight.clone().requires_grad_(true);
  std::thread::id of_hook;
  own.register_hook([&](const at::Tensor&) { of_hook = std::this_thread::get_id(); });

  at::silu(at::linear(x.to(device), own)).pow(2).sum().backward();
  at::silu(at::linear(x, plain)).pow(2).sum().backward();

  EXPECT_NE(of_hook, std::this_thread::get_id());
  EXPECT_EQ(own.grad().device(), device);
  EXPECT_TRUE(own.grad().to(at::kCPU).equal(plain.grad()));
}

TEST(TestDevice, AnOperationOnTensorsOfTwoDevicesIsRefused) {
  const at::Tensor own = at::ones({2, 2}, at::TensorOptions().device(test_device()));
  const at::Tensor other = at::ones({2, 2});
  const auto refused = [](const char* what) {
    return ::testing::ThrowsMessage<std::exception>(HasSubstr(what));
  };

  EXPECT_THAT([&] { (void)(own + other); }, refused("test_device:0 and cpu"));
  EXPECT_THAT([&] { (void)at::mm(own, other); }, refused("aten::mm"));
  EXPECT_TRUE((own + at::scalar_tensor(1.0)).to(at::kCPU).eq(2).all().item<bool>());
}

TEST(TestDevice, ViewsAndResultsInPlaceShareItsMemory) {
  const at::Tensor own = at::zeros({4, 3}, at::TensorOptions().device(test_device()));

  own.narrow(0, 1, 2).select(1, 2).fill_(5);
  own.view({12}).narrow(0, 0, 2).copy_(at::ones({2}));

  EXPECT_EQ(own.sum().item<float>(), 12);
}

TEST(DeviceMemory, AStorageIsFreedAndGrownWhereItIs) {
  const at::Tensor own = at::ones({100}, at::TensorOptions().device(test_device()));
  const c10::Storage storage = own.storage();

  resize_storage(storage, 0);
  EXPECT_EQ(storage.nbytes(), 0U);
  resize_storage(storage, 400);
  own.fill_(2);

  EXPECT_EQ(storage.nbytes(), 400U);
  EXPECT_EQ(storage.device(), test_device());
  EXPECT_EQ(own.sum().item<float>(), 200);
}

TEST(DeviceMemory, IsKnownByItsAddressUntilItIsFreed) {
  at::Tensor own = at::ones({100}, at::TensorOptions().device(test_device()));
  const at::Tensor other = at::ones({100});
  const auto* const data = static_cast<const std::byte*>(own.data_ptr());

  EXPECT_TRUE(is_on_test_device(data + 396, 4));
  EXPECT_FALSE(is_on_test_device(data + 396, 8));
  EXPECT_FALSE(is_on_test_device(static_cast<const std::byte*>(other.data_ptr()), 4));
  own.reset();
  EXPECT_FALSE(is_on_test_device(data, 4));
}

TEST(DeviceMemory, BytesGoThereAndComeBack) {
  const at::Tensor own = at::zeros({3}, at::TensorOptions().device(test_device()).dtype(at::kInt));
  const std::vector<std::int32_t> sent{7, -1, 1 << 30};
  std::vector<std::int32_t> got(3);
  auto* const there = static_cast<std::byte*>(own.data_ptr());

  copy_to_device(there, reinterpret_cast<const std::byte*>(sent.data()), 12, own.device());
  copy_to_host(reinterpret_cast<std::byte*>(got.data()), there, 12, own.device());

  EXPECT_EQ(got, sent);
  EXPECT_EQ(host_tensor_of(own).bytes.size(), 12U);
  EXPECT_TRUE(has_devices());
}

}  // namespace
}  // namespace isoshard
