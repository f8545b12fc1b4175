// SPDX-License-Identifier: Apache-2.0
/// One boxed kernel for all operations: it hands the CPU's kernel aliases of its tensors.
#include "harness/testing/device/test_device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

/// What is allocated.
struct Blocks {
  std::mutex mutex;
  std::map<const std::byte*, std::size_t> bytes;
  c10::CachingAllocator::Stat total;
};

// Never destroyed: tensors of static storage may be freed after everything else.
Blocks& blocks() {
  static Blocks& all = *new Blocks;
  return all;
}

/// The host's memory under the device's name.
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const host = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    Blocks& all = blocks();
    const std::lock_guard lock(all.mutex);
    all.bytes[static_cast<std::byte*>(host->get())] = bytes;
    all.total.increase(bytes);
    return {host->get(), host, &release, c10::Device(kType, 0)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const std::lock_guard lock(blocks().mutex);
    stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)] =
        blocks().total;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    const std::lock_guard lock(blocks().mutex);
    blocks().total.reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex) override {
    const std::lock_guard lock(blocks().mutex);
    blocks().total.reset_peak();
  }

 private:
  static void release(void* context) {
    auto* const host = static_cast<c10::DataPtr*>(context);
    {
      Blocks& all = blocks();
      const std::lock_guard lock(all.mutex);
      const auto found = all.bytes.find(static_cast<std::byte*>(host->get()));
      if (found != all.bytes.end()) {  // blocks of no bytes have one address
        all.total.decrease(found->second);
        all.bytes.erase(found);
      }
    }
    delete host;
  }
};

Allocator* allocator() {
  static Allocator all;
  return &all;
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device getDevice() const override { return {kType, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kType, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return default_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return default_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return default_stream(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

 private:
  static c10::Stream default_stream() {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, 0));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, allocator(), kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, strides, allocator(), kKeys,
                                           dtype.value_or(at::kFloat));
}

/// The same memory as a tensor of the CPU; those of the CPU as they are.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
  // no data: a tensor of autograd's that only counts
  return at::from_blob(
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == nullptr
          ? nullptr
          : tensor.data_ptr(),
      tensor.sizes(), tensor.strides(), [](void*) {},
      at::TensorOptions().dtype(tensor.scalar_type()));
}

/// A new tensor of the device with a result of the CPU.
at::Tensor on_device(const at::Tensor& result) {
  if (!result.defined()) return result;
  at::Tensor own = at::detail::empty_strided_generic(result.sizes(), result.strides(), allocator(),
                                                     kKeys, result.scalar_type());
  on_cpu(own).copy_(result);
  return own;
}

std::atomic<std::int64_t> bytes_copied_out{0};

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.is_cpu() && !from.is_cpu()) bytes_copied_out += static_cast<std::int64_t>(to.nbytes());
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  return at::_local_scalar_dense(on_cpu(tensor));
}

at::Tensor& set_from_storage(at::Tensor& tensor, at::Storage storage, std::int64_t offset,
                             at::IntArrayRef size, at::IntArrayRef strides) {
  auto* const own = tensor.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(storage));
  own->set_storage_offset(offset);
  own->set_sizes_and_strides(size, strides);
  return tensor;
}

at::Tensor& set_from_tensor(at::Tensor& tensor, const at::Tensor& from) {
  return set_from_storage(tensor, from.storage(), from.storage_offset(), from.sizes(),
                          from.strides());
}

at::Tensor& set_all_of_storage(at::Tensor& tensor, at::Storage storage) {
  const std::int64_t count =
      static_cast<std::int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_from_storage(tensor, std::move(storage), 0, {count}, {1});
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, size, format);
}

/// The tensors of one call, and where each of them goes on the CPU.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : name_(op.schema().name()) {}

  at::Tensor argument(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    note(tensor);
    if (tensor.device().is_cpu()) return tensor;
    // Of a result that has no element yet the kernel may choose the size.
    at::Tensor alias = tensor.numel() == 0
                           ? at::empty_strided(tensor.sizes(), tensor.strides(),
                                               at::TensorOptions().dtype(tensor.scalar_type()))
                           : on_cpu(tensor);
    pairs_.emplace_back(tensor, alias);
    return alias;
  }

  at::Tensor result(const at::Tensor& cpu) {
    for (auto& [own, alias] : pairs_) {
      if (!cpu.is_same(alias)) continue;
      if (own.sizes() != alias.sizes()) {
        own.resize_(alias.sizes());
        on_cpu(own).copy_(alias);
      }
      return own;
    }
    return on_device(cpu);
  }

  /// As a kernel of CUDA does.
  void require_one_device() const {
    if (!has_device_ || first_on_host_.empty()) return;
    const bool takes_indices = name_.find("index") != std::string::npos;
    if (takes_indices) return;
    throw ShapeError(fmt::format(
        "{}: all tensors must be on one device, got some on {} and one of shape {} in host memory",
        name_, c10::Device(kType, 0).str(), first_on_host_));
  }

 private:
  void note(const at::Tensor& tensor) {
    if (!tensor.device().is_cpu()) {
      has_device_ = true;
    } else if (tensor.dim() > 0 && first_on_host_.empty()) {
      first_on_host_ = c10::str(tensor.sizes());
    }
  }

  std::string name_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
  bool has_device_ = false;
  std::string first_on_host_;
};

void on_any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t arguments = op.schema().arguments().size();
  const std::size_t first = stack->size() - arguments;
  Call call(op);
  for (std::size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.argument(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(call.argument(tensor));
      value = all;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        all.push_back(tensor.has_value() ? std::optional(call.argument(*tensor)) : std::nullopt);
      value = all;
    } else if (value.isDevice() && !value.toDevice().is_cpu()) {
      value = c10::Device(c10::DeviceType::CPU);
    }
  }
  call.require_one_device();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const std::size_t results = op.schema().returns().size();
  for (std::size_t i = stack->size() - results; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(call.result(tensor));
      value = all;
    }
  }
}

/// Whether an operation gives a view of an argument, whose memory it must share.
bool is_view(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

/// Operations of which LibTorch has both a kernel of the CPU and a formula for other devices, which
/// may round otherwise.
void register_kernels_with_formulas(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || name.name.rfind("aten::", 0) != 0) continue;
    const bool has_formula =
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (!has_formula || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (is_view(op->schema()) || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    library.impl(c10::toString(name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&on_any_operation>());
  }
}

void register_kernels() {
  static torch::Library fallback(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__,
                                 __LINE__);
  fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&on_any_operation>());
  static torch::Library autocast(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1,
                                 __FILE__, __LINE__);
  autocast.fallback(torch::CppFunction::makeFallthrough());
  static torch::Library own(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__,
                            __LINE__);
  own.impl("empty.memory_format", &empty);
  own.impl("empty_strided", &empty_strided);
  own.impl("_copy_from", &copy_from);
  own.impl("_copy_from_and_resize", &copy_from_and_resize);
  own.impl("_local_scalar_dense", &local_scalar);
  own.impl("set_.source_Storage_storage_offset", &set_from_storage);
  own.impl("set_.source_Storage", &set_all_of_storage);
  own.impl("set_.source_Tensor", &set_from_tensor);
  own.impl("resize_", &resize);
  own.impl("view", &at::native::view);
  own.impl("as_strided", &at::native::as_strided_tensorimpl);
  own.impl("_reshape_alias", &at::native::_reshape_alias);
  register_kernels_with_formulas(own);
}

}  // namespace

bool is_on_test_device(const std::byte* data, std::size_t bytes) {
  Blocks& all = blocks();
  const std::lock_guard lock(all.mutex);
  auto found = all.bytes.upper_bound(data);
  if (found == all.bytes.begin()) return false;
  --found;
  return data + bytes <= found->first + found->second;
}

std::int64_t bytes_from_test_device() noexcept {
  return bytes_copied_out;
}

c10::Device test_device() {
  static const bool is_registered = [] {
    c10::SetAllocator(kType, allocator());
    static Guard guard;
    c10::impl::device_guard_impl_registry[static_cast<std::size_t>(kType)].store(&guard);
    register_kernels();
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::register_privateuse1_backend("test_device");
    return true;
  }();
  return is_registered ? c10::Device(kType, 0) : c10::Device(c10::DeviceType::CPU);
}

}  // namespace isoshard
