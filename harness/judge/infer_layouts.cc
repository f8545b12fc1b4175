// SPDX-License-Identifier: Apache-2.0
/// Every way in which the axes of a mesh may cut a tensor is tried.
#include "harness/judge/infer_layouts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <vector>

#include "harness/ids/rule.h"
#include "harness/trace/parts.h"
#include "harness/trace/wanted_record.h"

namespace isoshard {
namespace {

/// Which part of a dim a rank holds. Where an axis has more ranks than the dim has parts, such as
/// four ranks for two heads of keys and values, several ranks hold the same one.
enum class Parts : std::uint8_t {
  kOwn,         ///< each rank another
  kNeighbours,  ///< ranks 0 and 1 hold part 0, ranks 2 and 3 part 1
  kTurns,       ///< ranks 0 and 2 hold part 0, ranks 1 and 3 part 1
};

/// What an axis of the mesh does: the dim that it cuts, or -1 for copies.
struct Cut {
  int dim = -1;
  Parts parts = Parts::kOwn;
};

/// Of each axis, in the mesh's order.
using Reading = std::vector<Cut>;

/// One rank's record of a tensor.
struct Part {
  RankTrace* rank;
  Record* record;
};

class Inference {
 public:
  Inference(const MeshShape& mesh, const Reference& reference, const Record& wanted,
            std::vector<Part>& parts, const std::filesystem::path& file)
      : mesh_(mesh), reference_(reference), wanted_(wanted), parts_(parts), file_(file) {
    for (const Part& part : parts) local_[part.rank->rank] = part.record->local_shape;
  }

  void run() {
    std::vector<Reading> readings;
    std::vector<std::vector<Layout>> layouts;
    for (const Reading& reading : all_readings()) {
      std::optional<std::vector<Layout>> found = layouts_of(reading);
      // readings that put every element at the same place are one
      if (!found.has_value() || std::ranges::find_if(layouts, [&](const auto& other) {
                                  return boxes_of_all(other) == boxes_of_all(*found);
                                }) != layouts.end())
        continue;
      readings.push_back(reading);
      layouts.push_back(std::move(*found));
    }
    if (layouts.empty()) refuse("no axis of the mesh cuts it so that the ranks' shapes fit");
    const std::size_t best = layouts.size() == 1 ? 0 : best_of(readings, layouts);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      Record& record = *parts_[i].record;
      record.layout = layouts[best][i];
      record.parts = parts_of(record, mesh_, parts_[i].rank->rank);
    }
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    std::vector<std::string> shapes;
    for (const auto& [rank, shape] : local_)
      shapes.push_back(fmt::format("[{}]", fmt::join(shape, ", ")));
    isoshard::refuse(file_, RuleId::kLayoutNotInferable,
                     {{"tensor", describe(wanted_.key)},
                      {"problem", what},
                      {"reference", wanted_.layout.global_shape},
                      {"shapes", shapes}});
  }

  std::vector<Reading> all_readings() const {
    std::vector<Reading> readings = {{}};
    const int dims = static_cast<int>(wanted_.layout.global_shape.size());
    for (const AxisDegree& axis : mesh_.axes()) {
      std::vector<Reading> longer;
      for (const Reading& reading : readings) {
        const bool may_cut = axis.degree > 1 && !is_held_at_one(axis.axis);
        for (int dim = -1; dim < (may_cut ? dims : 0); ++dim) {
          for (const Parts parts : {Parts::kOwn, Parts::kNeighbours, Parts::kTurns}) {
            if (dim < 0 && parts != Parts::kOwn) continue;
            longer.push_back(reading);
            longer.back().push_back({dim, parts});
          }
        }
      }
      readings = std::move(longer);
    }
    return readings;
  }

  /// Whether only ranks at one coordinate of the axis hold the tensor: it does not cut it.
  bool is_held_at_one(Axis axis) const {
    return std::ranges::any_of(
        parts_, [&](const Part& part) { return part.record->layout.find(axis) != nullptr; });
  }

  std::string words_of(const Reading& reading) const {
    std::vector<std::string> words;
    for (std::size_t i = 0; i < reading.size(); ++i) {
      if (reading[i].dim < 0) continue;
      constexpr std::string_view kHow[] = {"", ", neighbors alike", ", in turns"};
      words.push_back(fmt::format("{}:shard({}{})", name_of(mesh_.axes()[i].axis), reading[i].dim,
                                  kHow[static_cast<std::size_t>(reading[i].parts)]));
    }
    return words.empty() ? "replicated" : fmt::format("{}", fmt::join(words, " "));
  }

  /// Of each rank's record; none if the ranks' shapes do not fit.
  std::optional<std::vector<Layout>> layouts_of(const Reading& reading) const {
    std::vector<Layout> layouts;
    for (const Part& part : parts_) {
      const std::optional<Box> box = box_of(reading, part.rank->rank);
      if (!box.has_value()) return std::nullopt;
      Layout layout;
      layout.global_shape = wanted_.layout.global_shape;
      layout.placements = part.record->layout.placements;  // only_at
      layout.explicit_parts = true;
      if (numel_of(box->size) > 0) layout.boxes = {*box};
      layouts.push_back(std::move(layout));
    }
    return layouts;
  }

  static std::vector<std::vector<Box>> boxes_of_all(const std::vector<Layout>& layouts) {
    std::vector<std::vector<Box>> boxes;
    for (const Layout& layout : layouts) boxes.push_back(layout.boxes);
    return boxes;
  }

  std::optional<Box> box_of(const Reading& reading, int rank) const {
    const Shape& whole = wanted_.layout.global_shape;
    const Shape& own = local_.at(rank);
    if (own.size() != whole.size()) return std::nullopt;
    Box box{Shape(whole.size(), 0), Shape(whole.size(), 0), own};
    for (std::size_t d = 0; d < whole.size(); ++d) {
      std::vector<Cutting> cutting;
      for (std::size_t i = 0; i < reading.size(); ++i) {
        if (reading[i].dim == static_cast<int>(d))
          cutting.push_back({mesh_.axes()[i].axis, reading[i].parts});
      }
      const std::optional<std::int64_t> offset = offset_of(cutting, d, rank);
      if (!offset.has_value()) return std::nullopt;
      box.global_offset[d] = *offset;
    }
    return box;
  }

  /// An axis that cuts a dim, and which parts its ranks hold.
  struct Cutting {
    Axis axis;
    Parts parts;
  };

  /// Where the rank's part of dim d begins; none if the sizes do not add up to the whole.
  std::optional<std::int64_t> offset_of(const std::vector<Cutting>& cutting, std::size_t d,
                                        int rank) const {
    const std::int64_t whole = wanted_.layout.global_shape[d], own = local_.at(rank)[d];
    if (cutting.empty()) return own == whole ? std::optional<std::int64_t>(0) : std::nullopt;
    if (cutting.size() == 1 && cutting[0].parts == Parts::kOwn)
      return offset_among(cutting[0].axis, d, rank);
    std::int64_t size = whole, offset = 0;
    for (const auto& [axis, parts] : cutting) {
      const std::int64_t degree = mesh_.degree(axis), coordinate = mesh_.coordinate(rank, axis);
      std::int64_t number = degree;  // of different parts
      if (parts != Parts::kOwn) {
        // one axis alone has copies: with two, nothing says how many parts each makes
        if (cutting.size() > 1 || own == 0 || whole % own != 0) return std::nullopt;
        number = whole / own;
        if (number < 2 || number == degree || degree % number != 0) return std::nullopt;
      }
      if (size % number != 0) return std::nullopt;
      size /= number;
      offset +=
          size * (parts == Parts::kTurns ? coordinate % number : coordinate / (degree / number));
    }
    return size == own ? std::optional(offset) : std::nullopt;
  }

  /// Of parts of any sizes along one axis, in rank order.
  std::optional<std::int64_t> offset_among(Axis axis, std::size_t d, int rank) const {
    std::int64_t before = 0, sum = 0;
    for (const int other : mesh_.group_of(rank, axis)) {
      const auto found = local_.find(other);
      if (found == local_.end() || found->second.size() <= d) return std::nullopt;
      if (mesh_.coordinate(other, axis) < mesh_.coordinate(rank, axis)) before += found->second[d];
      sum += found->second[d];
    }
    return sum == wanted_.layout.global_shape[d] ? std::optional(before) : std::nullopt;
  }

  /// Sum of squares of the differences, over all ranks; copies count as often as they are held.
  double error_of(const std::vector<Layout>& layouts) const {
    Stats sum;
    std::vector<std::byte> scratch;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      Record record = *parts_[i].record;
      record.layout = layouts[i];
      const HostTensor local = parts_[i].rank->tensor(record);
      for (PartStats& part : parts_of(record, mesh_, parts_[i].rank->rank)) {
        if (numel_of(part, false) == 0) continue;
        compare_part(part, record, packed(record, part, local.bytes.data(), scratch),
                     reference_.bytes(wanted_), wanted_.dtype, wanted_.grad_scale, nullptr);
        merge(sum, part.stats);
      }
    }
    return sum.nonfinite_mismatch > 0 ? HUGE_VAL : sum.sum_sq_diff;
  }

  std::size_t best_of(const std::vector<Reading>& readings,
                      const std::vector<std::vector<Layout>>& layouts) const {
    constexpr double kMuchLess = 0.01;  // of the squared error
    std::vector<std::pair<double, std::size_t>> errors;
    for (std::size_t i = 0; i < layouts.size(); ++i) errors.emplace_back(error_of(layouts[i]), i);
    std::sort(errors.begin(), errors.end());
    // where several readings are right in every bit, each gives the same verdict
    if (errors[0].first != 0 && !(errors[0].first < kMuchLess * errors[1].first))
      refuse(fmt::format("\"{}\" and \"{}\" fit alike", words_of(readings[errors[0].second]),
                         words_of(readings[errors[1].second])));
    return errors[0].second;
  }

  const MeshShape& mesh_;
  const Reference& reference_;
  const Record& wanted_;
  std::vector<Part>& parts_;
  const std::filesystem::path& file_;
  std::map<int, Shape> local_;
};

/// What the record is compared with; none: the reference says nothing of it.
std::optional<Record> likeness_of(const Reference& reference, const RecordKey& key,
                                  const JudgePolicy& policy) {
  if (const auto wanted = wanted_of(reference, key, policy)) return wanted->record;
  if (role_of(key) != NameRole::kReadAgain || key.step < 1) return std::nullopt;
  const int before = key.step - 1;
  const Record* const found =
      reference.find({before, RecordKind::kParam, base_of(key).name, before == 0 ? 1 : 0});
  return found == nullptr ? std::nullopt : std::optional(*found);
}

}  // namespace

void infer_layouts(Bundle& judged, const Reference& reference, const JudgePolicy& policy,
                   const std::filesystem::path& file) {
  std::map<RecordKey, std::vector<Part>> open;
  for (RankTrace& rank : judged.trace.ranks) {
    for (Record& record : rank.records) {
      if (judged.inferred.contains(record.key)) open[record.key].push_back({&rank, &record});
    }
  }
  for (auto& [key, parts] : open) {
    for (const Part& part : parts) {
      if (!part.record->kept) refuse(file, RuleId::kInferredNotKept, {{"tensor", describe(key)}});
    }
    if (const auto wanted = likeness_of(reference, key, policy)) {
      Inference(judged.trace.mesh, reference, *wanted, parts, file).run();
      continue;
    }
    for (const Part& part : parts)
      part.record->parts = parts_of(*part.record, judged.trace.mesh, part.rank->rank);
  }
  judged.inferred.clear();
}

}  // namespace isoshard
