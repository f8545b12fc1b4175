// SPDX-License-Identifier: Apache-2.0
/// The cases of a contract that every subject must keep: the registry's subjects x meshes x dtypes.
#pragma once
#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "fixtures/cases/setting.h"
#include "subjects/registry/subject_spec.h"
#include "suite/testing/step_cases.h"

namespace isoshard {

/// kPairs: few cases in which every two values occur together that any case can have. kAll: the
/// full product.
enum class Coverage : std::uint8_t { kPairs, kAll };

/// One combination: a subject, a mesh, a dtype.
struct Combination {
  std::string subject;
  Degrees degrees;
  Dtype dtype = Dtype::kFloat32;
};

/// "megatron dp 2 x tp 3 bf16".
inline std::string describe(const Combination& c) {
  return c.subject + " dp " + std::to_string(c.degrees.dp) + " x tp " +
         std::to_string(c.degrees.tp) + " " + std::string(name_of(c.dtype));
}

struct SubjectCases {
  std::vector<Case> cases;
  /// What is left out, and the reason that the case's own check gives.
  std::vector<std::pair<Combination, std::string>> left_out;
};

inline const std::vector<Degrees>& meshes_of_every_subject() {
  static const std::vector<Degrees> meshes = {
      {.dp = 2}, {.tp = 2}, {.dp = 2, .tp = 2}, {.dp = 3, .tp = 2}, {.dp = 2, .tp = 3}, {.dp = 3}};
  return meshes;
}

inline std::vector<Combination> all_combinations() {
  std::vector<Combination> all;
  for (const SubjectSpec& spec : subject_specs()) {
    if (spec.is_reference()) continue;
    for (const Degrees& degrees : meshes_of_every_subject()) {
      for (const Dtype dtype :
           {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16})
        all.push_back({std::string(spec.name), degrees, dtype});
    }
  }
  return all;
}

/// Of `valid`, so few that every pair of values that occurs in any occurs in one that is chosen.
/// Determinism   a function of its argument: always the first that covers most that is missing.
inline std::vector<Combination> pairwise(const std::vector<Combination>& valid) {
  using Values = std::pair<std::string, std::string>;
  const auto pairs_of = [](const Combination& c) {
    const std::string mesh = std::to_string(c.degrees.dp) + "x" + std::to_string(c.degrees.tp);
    const std::string dtype(name_of(c.dtype));
    return std::vector<Values>{{c.subject, mesh}, {c.subject, dtype}, {mesh, dtype}};
  };
  std::set<Values> missing;
  for (const Combination& c : valid) {
    for (const Values& pair : pairs_of(c)) missing.insert(pair);
  }
  std::vector<Combination> chosen;
  while (!missing.empty()) {
    const auto gain = [&](const Combination& c) {
      const std::vector<Values> pairs = pairs_of(c);
      return std::count_if(pairs.begin(), pairs.end(),
                           [&](const Values& pair) { return missing.contains(pair); });
    };
    const Combination best = *std::max_element(
        valid.begin(), valid.end(),
        [&](const Combination& a, const Combination& b) { return gain(a) < gain(b); });
    for (const Values& pair : pairs_of(best)) missing.erase(pair);
    chosen.push_back(best);
  }
  return chosen;
}

/// `make` makes a combination's case. 16-bit parameters have fp32 masters where the subject demands
/// them. A combination that Case::validate refuses is left out with the reason that it gives.
inline SubjectCases every_subject(Coverage coverage,
                                  const std::function<Case(const Combination&)>& make) {
  SubjectCases result;
  const auto case_of = [&](const Combination& combination) {
    Case item = make(combination);
    if (needs_fp32_masters(item)) item.settings.master_dtype = Dtype::kFloat32;
    return item;
  };
  std::vector<Combination> valid;
  for (const Combination& combination : all_combinations()) {
    try {
      case_of(combination).validate();
      valid.push_back(combination);
    } catch (const UsageError& error) {
      result.left_out.emplace_back(combination, error.what());
    }
  }
  for (const Combination& combination : coverage == Coverage::kAll ? valid : pairwise(valid))
    result.cases.push_back(case_of(combination));
  return result;
}

/// The tiny model's step.
inline Case plain_step(const Combination& c) {
  return step_case(c.subject, c.degrees, c.dtype);
}

}  // namespace isoshard
