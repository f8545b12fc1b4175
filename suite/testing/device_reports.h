// SPDX-License-Identifier: Apache-2.0
/// Runs that `compare` judges once on this CPU and once with a comparer, for tests on an emulated
/// grid and on a GPU. They need no file of the tree.
#pragma once
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "harness/bundle/bundle.h"
#include "harness/compare/compare.h"
#include "harness/report/text/text_report.h"
#include "harness/stats/device/test_pairs.h"
#include "harness/testing/synthetic.h"
#include "harness/testing/test_folder.h"

namespace isoshard::device_reports {

/// In what two reports differ, in words; empty: their texts are equal, and so are the statistics of
/// each tensor but for the order of their sums.
inline std::string difference_of(const Report& got, const Report& want) {
  std::string words;
  if (got.exit_code != want.exit_code)
    words += fmt::format("exit code: got {}, want {}\n", got.exit_code, want.exit_code);
  const TextOptions all{.verdict = {.all_tensors = true}};
  if (text_of(got, all) != text_of(want, all))
    words += fmt::format("text: got\n{}\nwant\n{}\n", text_of(got, all), text_of(want, all));
  if (got.cases.size() != want.cases.size()) return words + "another number of cases\n";
  for (std::size_t c = 0; c < got.cases.size(); ++c) {
    const Verdict& a = *got.cases[c].verdict;
    const Verdict& b = *want.cases[c].verdict;
    if (a.tensors.size() != b.tensors.size()) return words + "another number of tensors\n";
    for (std::size_t t = 0; t < a.tensors.size(); ++t) {
      const std::string of_tensor = difference(a.tensors[t].stats, b.tensors[t].stats);
      if (!of_tensor.empty())
        words += fmt::format("{}:\n{}", describe(b.tensors[t].key), of_tensor);
    }
  }
  return words;
}

/// One change of what the ranks of a run record.
struct Written {
  std::string name;
  std::function<void(at::Tensor& tensor)> change;
};

/// Of the weight's gradient on the last rank; each is seen, but for the first.
inline std::vector<Written> written_runs() {
  return {{"right", [](at::Tensor&) {}},
          {"one_element", [](at::Tensor& t) { t.flatten()[t.numel() - 3] += 1; }},
          {"scaled", [](at::Tensor& t) { t.mul_(2); }},
          {"negated", [](at::Tensor& t) { t.neg_(); }},
          {"nan", [](at::Tensor& t) { t.flatten()[5] = NAN; }},
          {"infinite", [](at::Tensor& t) { t.flatten()[7] = INFINITY; }},
          {"shifted", [](at::Tensor& t) { t.copy_(t.clone().roll(1)); }}};
}

/// Writes "reference", with responses, and a run of six ranks for each of written_runs(): tensors
/// of several blocks, whole and cut along each dim, in several dtypes.
class WrittenRuns {
 public:
  WrittenRuns() {
    using namespace synthetic;
    const auto reference = synthetic::reference(body([](at::Tensor&) {}, 0, false), [&](int i) {
      return body([](at::Tensor&) {}, 1e-4 * (i + 1), false);
    });
    write_bundle(folder_ / "reference", reference, kSettings);
    for (const Written& written : written_runs()) {
      Trace trace =
          synthetic::run(kDp2Tp3, nullptr, body(written.change, 0, true), Keep::kEverything);
      trace.subject = "ddp";
      trace.case_slug = written.name;
      write_bundle(folder_ / written.name, trace, kSettings);
    }
  }

  [[nodiscard]] ComparePlan plan(const std::string& name, Comparer* comparer) const {
    ComparePlan plan;
    plan.reference = folder_ / "reference";
    plan.actual = folder_ / name;
    plan.comparer = comparer;
    return plan;
  }

 private:
  static constexpr const char* kSettings =
      R"({"training": {"dtype": "fp32", "optimizer": {"kind": "sgd"}}})";

  static synthetic::Body body(std::function<void(at::Tensor&)> change, double noise, bool is_cut) {
    using namespace synthetic;
    return [change = std::move(change), noise, is_cut](Sink& sink, int rank) {
      const auto add = [&](RecordKind kind, const char* name, const at::Tensor& plain, int dim,
                           Axis axis = Axis::kTp) {
        const at::Tensor whole =
            kind == RecordKind::kParam
                ? plain
                : (plain.to(at::kDouble) * (1 + noise * at::sin(plain.to(at::kDouble) * 37)))
                      .to(plain.scalar_type());
        const bool cut = is_cut && dim >= 0;
        const std::int64_t part = cut ? whole.size(dim) / kDp2Tp3.degree(axis) : 0;
        at::Tensor local =
            cut ? whole.narrow(dim, kDp2Tp3.coordinate(rank, axis) * part, part).clone()
                : whole.clone();
        if (std::string(name) == "w" && kind == RecordKind::kGrad && rank == 5) change(local);
        sink.on_record(site(kind, name,
                            cut ? layout_of(whole.sizes().vec(), {shard(axis, dim)})
                                : layout_of(whole.sizes().vec())),
                       local.contiguous());
      };
      add(RecordKind::kParam, "w", values({96, 210}, 1), 0);
      add(RecordKind::kActivation, "x", values({150, 120}, 2), 1);
      add(RecordKind::kActivation, "y", values({3, 7000}, 3), 1, Axis::kDp);
      add(RecordKind::kActivation, "z", values({60, 50, 9}, 4, at::kDouble), 2);
      add(RecordKind::kActivationGrad, "x", values({120, 150}, 5), 1);
      add(RecordKind::kGrad, "w", values({96, 210}, 6), 0);
    };
  }

  TestFolder folder_;
};

}  // namespace isoshard::device_reports
