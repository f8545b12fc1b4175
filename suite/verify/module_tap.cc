// SPDX-License-Identifier: Apache-2.0
// One table of cells in shared memory, a cell for each part of each module on each rank.
#include "suite/verify/module_tap.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <span>
#include <tuple>
#include <type_traits>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "harness/trace/parts.h"

namespace isoshard {
namespace {

constexpr std::size_t kMaxParts = 16;  ///< of one tensor on one rank
constexpr std::size_t kMaxDims = 4;
constexpr std::int64_t kMaxKeptBytes = std::int64_t{320} << 20;  ///< of one module

/// Where a part lies: equal on ranks that hold copies of it.
struct Place {
  std::array<std::int64_t, kMaxDims> offset{}, size{};
  auto operator<=>(const Place&) const = default;
};

struct Cell {
  Place place;
  double sum_sq = 0;
  std::uint64_t digest = 0;  ///< of its bytes
  Stats from_baseline;
  bool is_filled = false;
};

/// Of one module; written by every rank that holds the elements, with equal values.
struct FirstElements {
  std::array<double, kListedElements> values{};
  std::array<bool, kListedElements> is_there{};
};

/// What rank 0 holds of one parameter's gradient.
struct LocalGradient {
  double norm = 0;
  bool is_sharded = false, is_there = false;
};
static_assert(std::is_trivially_destructible_v<Cell> &&
              std::is_trivially_destructible_v<FirstElements> &&
              std::is_trivially_destructible_v<LocalGradient>);

/// Zeroed pages, shared with forked processes; what is not touched costs nothing.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : bytes_(std::max<std::size_t>(bytes, 1)) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
      throw InfrastructureError(fmt::format("no shared memory of {} bytes for the tables: {}",
                                            bytes_, std::strerror(errno)));
    data_ = static_cast<std::byte*>(at);
  }
  ~SharedMemory() { munmap(data_, bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

bool is_listed(const Record& record) {
  const RecordKey& key = record.key;
  return key.step == 0 && key.call == 0 &&
         (key.kind == RecordKind::kActivation || key.kind == RecordKind::kActivationGrad) &&
         !record.layout.global_shape.empty() && is_listed_module(key.name);
}

/// Elements that dp rank 0 holds of a global batch: its samples come first.
std::int64_t numel_on_first(const Record& record, int dp) {
  return numel_of(record.layout.global_shape) / dp;
}

struct Module {
  std::string name;
  std::int64_t numel = 0;  ///< on dp rank 0
  std::int64_t kept = 0;   ///< of them, the first ones are kept of a baseline: whole rows
  Dtype dtype = Dtype::kFloat32;
  std::size_t store_offset = 0;
};

}  // namespace

struct ModuleTap::Impl {
  MeshShape mesh;
  std::vector<Module> modules;
  std::map<std::string, std::size_t, std::less<>> index;
  std::shared_ptr<const ModuleTap> baseline;
  bool keeps = false;
  std::unique_ptr<SharedMemory> cells, firsts, store, gradients;
  std::map<std::string, std::size_t, std::less<>> parameters;

  [[nodiscard]] Cell* cells_of(int rank, std::size_t module, bool gradient) const {
    const std::size_t record =
        (static_cast<std::size_t>(rank) * modules.size() + module) * 2 + (gradient ? 1 : 0);
    return reinterpret_cast<Cell*>(cells->data()) + record * kMaxParts;
  }
  [[nodiscard]] FirstElements& first_of(std::size_t module) const {
    return reinterpret_cast<FirstElements*>(firsts->data())[module];
  }

  [[nodiscard]] LocalGradient& gradient_of(std::size_t parameter) const {
    return reinterpret_cast<LocalGradient*>(gradients->data())[parameter];
  }

  void look_at_gradient(int rank, const Site& site, const at::Tensor& value) const {
    const auto found = parameters.find(site.name);
    if (rank != 0 || found == parameters.end()) return;
    const at::Tensor local = value.detach().to(at::kCPU).contiguous();
    const auto* const bytes = static_cast<const std::byte*>(local.const_data_ptr());
    Stats own;
    accumulate(own, bytes, dtype_of(local), bytes, dtype_of(local), local.numel(), 0);
    gradient_of(found->second) = {own.nan_actual + own.inf_actual > 0
                                      ? std::nan("")
                                      : std::sqrt(own.sum_sq_actual) / site.grad_scale,
                                  local.numel() < numel_of(site.layout.global_shape), true};
  }

  void look(int rank, const Site& site, const at::Tensor& value) const {
    if (site.kind == RecordKind::kGrad) {
      look_at_gradient(rank, site, value);
      return;
    }
    const auto found = index.find(site.name);
    if (found == index.end() || is_partial(site.layout) || is_flat(site.layout)) return;
    const at::Tensor local = value.detach().to(at::kCPU).contiguous();
    const bool gradient = site.kind == RecordKind::kActivationGrad;
    Record record;
    record.key = {0, site.kind, site.name, 0};
    record.dtype = dtype_of(local);
    record.layout = site.layout;
    record.local_shape.assign(local.sizes().begin(), local.sizes().end());
    Cell* cell = cells_of(rank, found->second, gradient);
    const std::vector<PartStats> parts = parts_of(record, mesh, rank);
    if (parts.size() > kMaxParts || record.local_shape.size() > kMaxDims) return;
    for (const PartStats& part : parts) {
      if (numel_of(part.box.size) == 0) continue;
      new (cell) Cell;
      std::copy(part.box.global_offset.begin(), part.box.global_offset.end(),
                cell->place.offset.begin());
      std::copy(part.box.size.begin(), part.box.size.end(), cell->place.size.begin());
      look_at_part(found->second, record, part,
                   static_cast<const std::byte*>(local.const_data_ptr()), *cell);
      cell->sum_sq /= site.grad_scale * site.grad_scale;
      cell->is_filled = true;
      ++cell;
    }
  }

  /// Of dp rank 0, places in the global tensor are places in its own samples.
  void look_at_part(std::size_t module, const Record& record, const PartStats& part,
                    const std::byte* local, Cell& cell) const {
    std::vector<std::byte> scratch;
    const std::byte* const values = packed(record, part, local, scratch);
    Stats own;
    const std::int64_t numel = numel_of(part.box.size);
    accumulate(own, values, record.dtype, values, record.dtype, numel, 0);
    cell.digest = digest_of(values, static_cast<std::size_t>(numel) * size_of(record.dtype));
    cell.sum_sq = own.nan_actual + own.inf_actual > 0 ? std::nan("") : own.sum_sq_actual;
    if (record.key.kind == RecordKind::kActivationGrad) return;
    const Module* other = baseline == nullptr ? nullptr : baseline->impl_->find(record.key.name);
    for_each_run(part, record, [&](std::int64_t to, std::int64_t done, std::int64_t count) {
      const std::byte* const run = values + done * static_cast<std::int64_t>(size_of(record.dtype));
      remember_first(module, run, record.dtype, to, count);
      if (keeps) store_run(modules[module], record.dtype, run, to, count);
      if (other == nullptr || to >= other->kept) return;
      accumulate(cell.from_baseline, baseline->impl_->stored(*other, to), other->dtype, run,
                 record.dtype, std::min(count, other->kept - to), to);
    });
  }

  void remember_first(std::size_t module, const std::byte* values, Dtype dtype, std::int64_t to,
                      std::int64_t count) const {
    FirstElements& first = first_of(module);
    for (std::int64_t i = 0; i < count && to + i < kListedElements; ++i) {
      first.values[static_cast<std::size_t>(to + i)] = value_at(values, dtype, i);
      first.is_there[static_cast<std::size_t>(to + i)] = true;
    }
  }

  void store_run(const Module& module, Dtype dtype, const std::byte* values, std::int64_t to,
                 std::int64_t count) const {
    if (to >= module.kept) return;
    if (dtype != module.dtype)
      throw InfrastructureError(fmt::format("{} is {}, its reference {}", module.name,
                                            name_of(dtype), name_of(module.dtype)));
    std::memcpy(stored(module, to), values,
                static_cast<std::size_t>(std::min(count, module.kept - to)) * size_of(dtype));
  }

  [[nodiscard]] std::byte* stored(const Module& module, std::int64_t at) const {
    return store->data() + module.store_offset +
           static_cast<std::size_t>(at) * size_of(module.dtype);
  }
  [[nodiscard]] const Module* find(std::string_view name) const {
    const auto found = index.find(name);
    return found == index.end() ? nullptr : &modules[found->second];
  }

  struct Gathered {
    bool is_there = false;
    double norm = 0, local_norm = 0;
    std::uint64_t digest = 0;
    Stats from_baseline;
  };

  /// Adds up the cells of dp rank 0's tp group, each place once.
  [[nodiscard]] Gathered gather(std::size_t module, bool gradient) const {
    Gathered all;
    std::map<Place, std::uint64_t> seen;
    double sum_sq = 0, local_sum_sq = 0;
    for (int rank = 0; rank < mesh.world_size(); ++rank) {
      if (mesh.coordinate(rank, Axis::kDp) != 0) continue;
      const Cell* cell = cells_of(rank, module, gradient);
      for (std::size_t part = 0; part < kMaxParts && cell[part].is_filled; ++part) {
        if (rank == 0) local_sum_sq += cell[part].sum_sq;
        if (!seen.emplace(cell[part].place, cell[part].digest).second) continue;
        sum_sq += cell[part].sum_sq;
        merge(all.from_baseline, cell[part].from_baseline);
      }
    }
    all.is_there = !seen.empty();
    all.norm = std::sqrt(sum_sq);
    all.local_norm = std::sqrt(local_sum_sq);
    std::vector<std::uint64_t> words;
    for (const auto& [place, digest] : seen) {
      for (const auto& numbers : {place.offset, place.size})
        words.insert(words.end(), numbers.begin(), numbers.end());
      words.push_back(digest);
    }
    const auto bytes = std::as_bytes(std::span(words));
    all.digest = digest_of(bytes.data(), bytes.size());
    return all;
  }
};

ModuleTap::ModuleTap(const Case& item, const Reference& records,
                     std::shared_ptr<const ModuleTap> baseline, bool keeps)
    : impl_(std::make_shared<Impl>()) {
  impl_->mesh = item.mesh();
  impl_->baseline = std::move(baseline);
  impl_->keeps = keeps;
  std::size_t store_bytes = 0;
  for (const Record& record : records.trace().ranks.at(0).records) {
    if (!is_listed(record) || record.key.kind != RecordKind::kActivation) continue;
    Module module{record.key.name, numel_on_first(record, item.degrees.dp), 0, record.dtype,
                  store_bytes};
    const std::int64_t row = record.layout.global_shape.back(),
                       size = static_cast<std::int64_t>(size_of(record.dtype));
    module.kept =
        row == 0
            ? 0
            : std::min(module.numel, std::max<std::int64_t>(kMaxKeptBytes / (row * size), 1) * row);
    store_bytes += static_cast<std::size_t>((module.kept * size + 63) / 64 * 64);
    impl_->index.emplace(module.name, impl_->modules.size());
    impl_->modules.push_back(std::move(module));
  }
  for (const Record& record : records.trace().ranks.at(0).records) {
    const RecordKey& key = record.key;
    if (key.kind == RecordKind::kGrad && key.step == 0 && key.call == 0 &&
        !is_gradient_besides(key))
      impl_->parameters.emplace(key.name, impl_->parameters.size());
  }
  impl_->gradients =
      std::make_unique<SharedMemory>(impl_->parameters.size() * sizeof(LocalGradient));
  const std::size_t num_cells =
      static_cast<std::size_t>(item.world_size()) * impl_->modules.size() * 2 * kMaxParts;
  impl_->cells = std::make_unique<SharedMemory>(num_cells * sizeof(Cell));
  impl_->firsts = std::make_unique<SharedMemory>(impl_->modules.size() * sizeof(FirstElements));
  if (keeps) impl_->store = std::make_unique<SharedMemory>(store_bytes);
}

ModuleTap::~ModuleTap() = default;

TapObserver ModuleTap::on_rank(int rank) const {
  if (impl_->mesh.coordinate(rank, Axis::kDp) != 0) return {};
  // A point passes once in each micro-batch and step: the first time counts.
  const auto seen = std::make_shared<std::set<std::pair<RecordKind, std::string>>>();
  return [impl = impl_, rank, seen](const Site& site, const at::Tensor& value) {
    if (seen->emplace(site.kind, site.name).second) impl->look(rank, site, value);
  };
}

std::vector<ModuleNumbers> ModuleTap::numbers() const {
  std::vector<ModuleNumbers> result;
  for (std::size_t m = 0; m < impl_->modules.size(); ++m) {
    ModuleNumbers numbers;
    numbers.name = impl_->modules[m].name;
    numbers.numel = impl_->modules[m].numel;
    const Impl::Gathered output = impl_->gather(m, false), gradient = impl_->gather(m, true);
    if (!output.is_there) continue;
    numbers.output_norm = output.norm;
    numbers.local_output_norm = output.local_norm;
    numbers.output_digest = output.digest;
    numbers.from_baseline = output.from_baseline;
    if (gradient.is_there) {
      numbers.gradient_norm = gradient.norm;
      numbers.local_gradient_norm = gradient.local_norm;
      numbers.gradient_digest = gradient.digest;
    }
    const FirstElements& first = impl_->first_of(m);
    for (std::size_t i = 0; i < first.values.size() && first.is_there[i]; ++i)
      numbers.first.push_back(first.values[i]);
    result.push_back(std::move(numbers));
  }
  return result;
}

ModuleTap::LocalGradients ModuleTap::local_gradients() const {
  LocalGradients result;
  for (const auto& [name, index] : impl_->parameters) {
    const LocalGradient& gradient = impl_->gradient_of(index);
    if (!gradient.is_there) continue;
    result.norms[name] = gradient.norm;
    if (gradient.is_sharded) result.sharded.insert(name);
  }
  return result;
}

std::vector<ModuleNumbers> module_numbers(const Case& item, const Reference& reference) {
  std::vector<ModuleNumbers> result;
  const auto norm_of = [&](const Record& record) {
    Stats own;
    const std::byte* bytes = reference.bytes(record);
    accumulate(own, bytes, record.dtype, bytes, record.dtype,
               numel_on_first(record, item.degrees.dp), 0);
    return own.nan_actual + own.inf_actual > 0 ? std::nan("")
                                               : std::sqrt(own.sum_sq_actual) / record.grad_scale;
  };
  for (const Record& record : reference.trace().ranks.at(0).records) {
    if (!is_listed(record) || record.key.kind != RecordKind::kActivation) continue;
    ModuleNumbers numbers;
    numbers.name = record.key.name;
    numbers.numel = numel_on_first(record, item.degrees.dp);
    numbers.output_norm = norm_of(record);
    const Record* gradient = reference.find({0, RecordKind::kActivationGrad, record.key.name, 0});
    if (gradient != nullptr) numbers.gradient_norm = norm_of(*gradient);
    for (std::int64_t i = 0; i < std::min(numbers.numel, kListedElements); ++i)
      numbers.first.push_back(value_at(reference.bytes(record), record.dtype, i));
    result.push_back(std::move(numbers));
  }
  return result;
}

}  // namespace isoshard
