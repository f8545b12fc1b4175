// SPDX-License-Identifier: Apache-2.0
/// Views of one tensor, and the numbers of a run that may explain a factor.
#include "harness/causes/view/evidence.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "harness/ids/phrase.h"
#include "harness/trace/parts.h"
#include "harness/verdict/neighbours.h"

namespace isoshard::detail {
namespace {

/// Larger tensors are judged, but not diagnosed
constexpr std::int64_t kMaxElements = std::int64_t{1} << 26;

struct Formula {
  double value;
  std::string words;
};

/// The plain numbers of a run, each a likely factor by itself.
std::vector<Formula> plain_numbers(const Evidence& e) {
  std::vector<Formula> numbers;
  for (const AxisDegree& a : e.actual.mesh.axes()) {
    if (a.degree > 1)
      numbers.push_back({static_cast<double>(a.degree), std::string(name_of(a.axis))});
  }
  if (const int m = e.num_micro_batches(); m > 1)
    numbers.push_back({static_cast<double>(m), "micro-batches"});
  if (const auto names = e.options.num_names.find(e.wanted.key.name);
      names != e.options.num_names.end() && names->second > 1) {
    numbers.push_back({static_cast<double>(names->second), "number of names"});
  }
  return numbers;
}

/// Stages of a pipeline share nothing that could be counted once for each pair of them, so pp
/// stands in no compound: 4 over two stages is rather a number of micro-batches.
std::vector<Formula> compound_numbers(std::vector<Formula> numbers) {
  std::erase_if(numbers, [](const Formula& number) { return number.words == name_of(Axis::kPp); });
  std::vector<Formula> formulas;
  for (const auto& [d, name] : numbers) {
    formulas.push_back({(d - 1) / d, fmt::format("({0}-1)/{0}", name)});
    formulas.push_back({d * d, fmt::format("{}^2", name)});
    formulas.push_back({1 / (d * d), fmt::format("1/{}^2", name)});
  }
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    for (std::size_t j = 0; j < numbers.size(); ++j) {
      if (i == j) continue;
      const auto& [a, first] = numbers[i];
      const auto& [b, second] = numbers[j];
      if (i < j) formulas.push_back({a * b, fmt::format("{} x {}", first, second)});
      if (i < j) formulas.push_back({1 / (a * b), fmt::format("1/({} x {})", first, second)});
      if (a != b) formulas.push_back({a / b, fmt::format("{}/{}", first, second)});
    }
  }
  return formulas;
}

/// A loss scale: a power of two too large to be a degree.
std::optional<std::string> power_of_two(double factor) {
  constexpr int kSmallestExponent = 6;
  if (!(factor > 0)) return std::nullopt;
  const double exponent = std::round(std::log2(factor));
  if (std::fabs(exponent) < kSmallestExponent || !is_near(factor, std::exp2(exponent), 0.02))
    return std::nullopt;
  return fmt::format("2^{:.0f}", exponent);
}

}  // namespace

bool is_telling(const Values& values) {
  constexpr std::size_t kLeast = 8;
  if (values.numel() < static_cast<std::int64_t>(kLeast)) return false;
  std::set<double> distinct;
  const Values own = values.contiguous();
  for (const double value : own.flat()) {
    if (value != 0) distinct.insert(std::fabs(value));
    if (distinct.size() >= kLeast) return true;
  }
  return false;
}

std::string some_of(const std::set<std::int64_t>& numbers) {
  constexpr int kShown = 6;
  std::vector<std::string> words;
  for (const std::int64_t number : numbers) {
    words.push_back(std::ssize(words) == kShown ? "..." : fmt::format("{}", number));
    if (std::ssize(words) > kShown) break;
  }
  return fmt::format("{}", fmt::join(words, ", "));
}

std::vector<std::int64_t> whole_numbers(const Values& values) {
  const Values own = values.contiguous();
  return {own.flat().begin(), own.flat().end()};
}

Shape place_of(const PartStats& part, bool flat) {
  if (flat) return {part.range.global_begin, part.range.count};
  Shape place = part.box.global_offset;
  place.insert(place.end(), part.box.size.begin(), part.box.size.end());
  return place;
}

std::string parent_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return std::string(name.substr(0, dot == std::string_view::npos ? 0 : dot));
}

bool lies_in(const Box& box, const Shape& shape) {
  if (box.size.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (box.global_offset[d] < 0 || box.global_offset[d] + box.size[d] > shape[d]) return false;
  }
  return true;
}

bool is_near(double a, double b, double relative) noexcept {
  return std::fabs(a - b) <= relative * std::fabs(b);  // false for a NaN
}

Evidence::Evidence(const Reference& reference_in, const Record& wanted_in, const Trace& actual_in,
                   const std::vector<Held>& held_in, const TensorResult& result_in,
                   const JudgePolicy& options_in)
    : reference(reference_in),
      wanted(wanted_in),
      actual(actual_in),
      held(held_in),
      result(result_in),
      options(options_in) {
  if (numel_of(wanted.layout.global_shape) <= kMaxElements) collect_views();
}

namespace {

/// A box of a matrix or vector among flat ranges: of one range the whole rows in it, of several the
/// rows of which they hold the same columns. `first` is where its first element stands in the local
/// tensor, `step` from row to row.
struct FlatBox {
  Box box;
  std::int64_t first = 0, step = 0;
};

std::optional<FlatBox> box_among(const std::vector<FlatRange>& ranges, const Shape& shape) {
  if (ranges.empty() || shape.empty() || shape.size() > 2) return std::nullopt;
  const FlatRange& range = *std::max_element(
      ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.count < b.count; });
  if (shape.size() == 1)
    return FlatBox{{{0}, {range.global_begin}, {range.count}}, range.local_begin, 0};
  const std::int64_t columns = shape[1], row = range.global_begin / columns,
                     column = range.global_begin % columns;
  const std::int64_t first_row = (range.global_begin + columns - 1) / columns,
                     end_row = (range.global_begin + range.count) / columns;
  if (end_row > first_row) {
    const std::int64_t first = range.local_begin + first_row * columns - range.global_begin;
    return FlatBox{{{0, 0}, {first_row, 0}, {end_row - first_row, columns}}, first, columns};
  }
  // the end of one row and the beginning of the next
  if (column + range.count > columns) return std::nullopt;
  FlatBox found{{{0, 0}, {row, column}, {0, range.count}}, range.local_begin, range.count};
  for (const FlatRange& other : ranges) {
    if (other.local_begin < range.local_begin) continue;
    const std::int64_t next = row + found.box.size[0];
    if (other.count != range.count || other.global_begin != next * columns + column) break;
    if (other.local_begin != found.first + found.box.size[0] * range.count) break;
    ++found.box.size[0];
  }
  return found;
}

}  // namespace

// What is not finite in one box says nothing of the others, either; nor is anything told beside
// what is not finite in the reference.
void Evidence::add_views(int rank, const std::vector<std::pair<Box, Values>>& boxes) {
  const auto is_finite = [](double value) { return std::isfinite(value); };
  std::vector<View> own;
  for (const auto& [box, values] : boxes) {
    own.push_back({rank, box, values, whole.cut(box.global_offset, box.size)});
    if (!own.back().actual.all(is_finite) || !own.back().expected.all(is_finite)) return;
  }
  views.insert(views.end(), own.begin(), own.end());
}

void Evidence::collect_views() {
  if (reference.find(wanted.key) == nullptr) return;
  whole = reference_value(wanted.key) / wanted.grad_scale;
  for (const Held& h : held) add_views(h.rank->rank, own_boxes(*h.rank, *h.record));
}

Shape index_of(const Box& box, std::int64_t element) {
  Shape index = box.global_offset;
  for (std::size_t d = index.size(); d-- > 0;) {
    index[d] += element % box.size[d];
    element /= box.size[d];
  }
  return index;
}

std::vector<std::pair<Box, Values>> kept_boxes(const RankTrace& rank, const Record& record,
                                               const Shape& global_shape) {
  if (!record.kept || rank.arena == nullptr || is_partial(record.layout)) return {};
  const Values own = Values(rank.tensor(record)) / record.grad_scale;
  if (is_flat(record.layout)) {
    const std::optional<FlatBox> part = box_among(record.layout.flat, global_shape);
    if (!part.has_value() || !lies_in(part->box, global_shape)) return {};
    return {
        {part->box,
         own.flattened().narrow(0, part->first, numel_of(part->box.size)).reshape(part->box.size)}};
  }
  std::vector<std::pair<Box, Values>> boxes;
  for (const PartStats& part : record.parts) {
    // of another shape
    if (!lies_in(part.box, global_shape)) return {};
    boxes.emplace_back(part.box, own.cut(part.box.local_offset, part.box.size));
  }
  return boxes;
}

std::vector<std::pair<Box, Values>> Evidence::own_boxes(const RankTrace& rank,
                                                        const Record& record) const {
  return kept_boxes(rank, record, wanted.layout.global_shape);
}

std::optional<std::pair<Box, Values>> Evidence::own_box(const RankTrace& rank,
                                                        const Record& record) const {
  std::vector<std::pair<Box, Values>> boxes = own_boxes(rank, record);
  return boxes.size() == 1 ? std::optional(std::move(boxes.front())) : std::nullopt;
}

std::optional<Box> Evidence::place_on(const Held& holder) const {
  const Record& record = *holder.record;
  std::optional<Box> place;
  if (is_flat(record.layout)) {
    if (const auto part = box_among(record.layout.flat, wanted.layout.global_shape))
      place = part->box;
  } else if (record.parts.size() == 1) {
    place = record.parts[0].box;
  }
  return place.has_value() && lies_in(*place, wanted.layout.global_shape) ? place : std::nullopt;
}

Values Evidence::parameter_read(const std::string& name) const {
  RecordKey key{wanted.key.step, RecordKind::kParam, name, 0};
  if (key.step > 0) key = record_before(key);
  return reference.find(key) == nullptr ? Values() : reference_value(key);
}

std::optional<double> Evidence::scalar(int step, NameRole role) const {
  const RecordKey key = scalar_key(step, role);
  return reference.find(key) == nullptr ? std::nullopt : std::optional(reference_value(key).item());
}

bool Evidence::is_right(const RecordKey& key) const {
  // What a run need not record, or cannot: clipped gradients, and what is before the first step.
  bool is_known = key.step < 0 || role_of(key) == NameRole::kClipped;
  for (const RankTrace& rank : actual.ranks) {
    const Record* const record = rank.find(key);
    if (record == nullptr) continue;
    is_known = true;
    for (const PartStats& part : record->parts) {
      if (part.stats.nonfinite_mismatch != 0 || part.stats.relative_error() > tolerance())
        return false;
    }
  }
  return is_known;
}

const Held* Evidence::held_by(int rank) const {
  for (const Held& h : held) {
    if (h.rank->rank == rank) return &h;
  }
  return nullptr;
}

const View* Evidence::view_of(int rank) const {
  const View* only = nullptr;
  for (const View& view : views) {
    if (view.rank != rank) continue;
    if (only != nullptr) return nullptr;
    only = &view;
  }
  return only;
}

const View* Evidence::first_bad_view() const {
  for (const int rank : bad_ranks()) {
    for (const View& view : views) {
      if (view.rank == rank && distance(view.actual, view.expected) > 0) return &view;
    }
  }
  return nullptr;
}

double Evidence::tolerance() const {
  return std::max(4 * result.comparison.allowed_relative_error, 1e-6);
}

double Evidence::noise() const {
  constexpr double kMost = 0.02;  // of an element that went through 16 bits
  return std::min(tolerance(), kMost);
}

bool Evidence::explains(const Values& candidate, const Values& target, double error) const {
  const double left = distance(candidate, target);
  return left <= tolerance() * norm_of(target) && left <= 0.25 * error;
}

bool Evidence::explains_each(const Values& candidate, const View& view) const {
  const double error = distance(view.actual, view.expected);
  if (error == 0 || !explains(candidate, view.actual, error)) return false;
  const Values made = candidate.contiguous(), seen = view.actual.contiguous(),
               right = view.expected.contiguous();
  const double typical =
      norm_of(seen) / std::sqrt(static_cast<double>(std::max<std::int64_t>(seen.numel(), 1)));
  const double near = 4 * noise();
  for (std::size_t i = 0; i < seen.flat().size(); ++i) {
    const double value = seen.flat()[i];
    const double allowed =
        0.25 * std::fabs(value - right.flat()[i]) + near * std::max(std::fabs(value), typical);
    if (!(std::fabs(made.flat()[i] - value) <= allowed)) return false;
  }
  return true;
}

std::optional<double> Evidence::factor_on(const View& view) const {
  if (distance(view.actual, view.expected) <= tolerance() * norm_of(view.expected)) return 1;
  const double squares = dot(view.expected, view.expected);
  if (!is_telling(view.expected) || !is_telling(view.actual)) return std::nullopt;
  const double factor = dot(view.actual, view.expected) / squares;
  return explains_each(factor * view.expected, view) ? std::optional(factor) : std::nullopt;
}

std::vector<const View*> Evidence::bad_views() const {
  std::vector<const View*> bad;
  for (const int rank : bad_ranks()) {
    bool is_known = false;
    for (const View& view : views) {
      if (view.rank != rank) continue;
      is_known = true;
      if (distance(view.actual, view.expected) > 0) bad.push_back(&view);
    }
    if (!is_known) return {};
  }
  return bad;
}

NamedValue Evidence::on_bad_ranks() const {
  const auto words = [&]() -> std::string {
    if (bad_ranks().size() >= held.size()) return "";
    if (const auto axis = axis_of(bad_ranks()))
      return phrase(PhraseId::kOn, {{"where", coordinates_in_words(bad_ranks(), *axis)}});
    return phrase(PhraseId::kOnRanks, {{"ranks", bad_ranks()}});
  };
  return NamedValue::words("on_ranks", words());
}

int Evidence::num_micro_batches() const {
  int most = 0;
  for (const Record& record : reference.trace().ranks.at(0).records) {
    const bool passes =
        record.key.kind == RecordKind::kActivation || record.key.kind == RecordKind::kDataId;
    if (passes && record.key.step == wanted.key.step) most = std::max(most, record.key.call + 1);
  }
  return most;
}

std::optional<std::string> Evidence::formula_of(double factor, double relative) const {
  // A schedule knows no mesh: degrees that fit its rates do so by chance.
  if (role_of(wanted.key) == NameRole::kLearningRate) return std::nullopt;
  const std::vector<Formula> numbers = plain_numbers(*this);
  std::vector<std::string> fitting;
  for (const auto& [value, words] : numbers) {
    if (is_near(factor, value, relative)) fitting.push_back(words);
    if (is_near(factor, 1 / value, relative)) fitting.push_back("1/" + words);
  }
  if (fitting.empty()) {
    for (const auto& [value, words] : compound_numbers(numbers)) {
      if (fitting.empty() && is_near(factor, value, relative)) fitting.push_back(words);
    }
  }
  if (fitting.empty() && is_near(factor, -1, relative)) fitting.emplace_back("sign");
  if (fitting.empty()) {
    if (const auto power = power_of_two(factor)) fitting.push_back(*power);
  }
  if (fitting.empty()) return std::nullopt;
  return fmt::format("{}", fmt::join(fitting, " or "));
}

Cause Evidence::scale_cause(double factor, NamedValues more) const {
  const auto made = [&](CauseId id, NamedValues values) {
    values.emplace_back("scale", factor);
    values.insert(values.end(), more.begin(), more.end());
    return make_cause(id, std::move(values));
  };
  const double ratio = clip_ratio(), below = norm_over_limit(wanted.key.step);
  const bool is_clipped = stage_of(wanted.key) > Stage::kGradNorm;
  if (is_clipped && ratio > 1 && is_near(factor, ratio, 0.01))
    return made(CauseId::kClippingNotApplied, {});
  if (is_clipped && ratio > 1 && is_near(factor, 1 / ratio, 1e-3))
    return made(CauseId::kClippedTwice, {});
  if (is_clipped && below < 1 && is_near(factor, 1 / below, 1e-3))
    return made(CauseId::kScaledUpToLimit, {});
  if (const auto formula = formula_of(factor))
    return made(CauseId::kScaleOfFormula, {{"formula", *formula}});
  if (const auto step = norm_clipped_by(factor))
    return made(CauseId::kClippedByOtherNorm, {{"step", *step}});
  const bool looks_like_one = fmt::format("{:.4g}", factor) == "1" && factor != 1;
  if (!looks_like_one) return made(CauseId::kScale, {});
  return made(CauseId::kScaleNearOne,
              {{"sign", factor < 1 ? "-" : "+"}, {"away", std::abs(factor - 1)}});
}

double Evidence::clip_ratio() const {
  return clip_ratio_of(wanted.key.step);
}

double Evidence::clip_ratio_of(int step) const {
  return std::max(1.0, norm_over_limit(step));
}

double Evidence::norm_over_limit(int step) const {
  if (options.max_grad_norm <= 0) return step == wanted.key.step ? factor_taken_out() : 1;
  const double norm = scalar(step, NameRole::kGradNorm).value_or(0);
  return norm > 0 ? norm / options.max_grad_norm : 1;
}

double Evidence::factor_taken_out() const {
  constexpr double kNear = 1e-4;  // as for norms
  const RecordKey base = base_of(wanted.key);
  if (role_of(wanted.key) != NameRole::kClipped || whole.numel() < 2 ||
      reference.find(base) == nullptr)
    return 1;
  const Values gradient = reference_value(base);
  const double clipped = norm_of(whole);
  if (gradient.shape() != whole.shape() || clipped == 0) return 1;
  const double factor = norm_of(gradient) / clipped;
  return norm_of(gradient - whole / (1 / factor)) <= kNear * norm_of(gradient) ? factor : 1;
}

std::optional<int> Evidence::norm_clipped_by(double factor) const {
  constexpr double kNear = 1e-4;  // two norms are seldom so near to each other
  constexpr int kStepsBehind = 4;
  if (stage_of(wanted.key) != Stage::kClippedGrad || is_near(factor, 1, kNear)) return std::nullopt;
  for (int back = 1; back <= std::min(wanted.key.step, kStepsBehind); ++back) {
    if (is_near(factor, clip_ratio() / clip_ratio_of(wanted.key.step - back), kNear))
      return wanted.key.step - back;
  }
  return std::nullopt;
}

std::string Evidence::coordinates_in_words(const std::vector<int>& ranks, Axis axis) const {
  std::set<int> coordinates;
  for (const int rank : ranks) coordinates.insert(actual.mesh.coordinate(rank, axis));
  return phrase(PhraseId::kCoordinates, {{"axis", name_of(axis)}, {"coordinates", coordinates}});
}

std::optional<Axis> Evidence::axis_of(const std::vector<int>& ranks) const {
  for (const AxisDegree& axis : actual.mesh.axes()) {
    if (axis.degree == 1) continue;
    std::set<int> coordinates;
    for (const int rank : ranks) coordinates.insert(actual.mesh.coordinate(rank, axis.axis));
    if (static_cast<int>(coordinates.size()) == axis.degree) continue;
    const auto each = static_cast<std::size_t>(actual.mesh.world_size() / axis.degree);
    if (ranks.size() == coordinates.size() * each) return axis.axis;
  }
  return std::nullopt;
}

}  // namespace isoshard::detail
