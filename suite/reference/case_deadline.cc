// SPDX-License-Identifier: Apache-2.0
// Floating-point operations over a slow rate.
#include "suite/reference/case_deadline.h"

#include <algorithm>

#include "subjects/model/model.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {

std::chrono::milliseconds case_deadline(const Case& c) {
  if (c.deadline.count() > 0) return c.deadline;
  constexpr double kBase_s = 120, kMost_s = 7 * 24 * 3600.0, kRate = 0.5e9;
  constexpr double kPerParameterAndToken = 6;  // forward 2, backward 4
  double parameters = 0;
  for (const ParameterSpec& spec : make_model(c.config, c.attention)->parameters()) {
    double elements = 1;
    for (const auto size : spec.shape) elements *= static_cast<double>(size);
    parameters += elements;
  }
  const double tokens = static_cast<double>(c.degrees.dp) * static_cast<double>(c.batch_size) *
                        c.micro_batches * static_cast<double>(c.seq_length);
  const double seconds = kBase_s + kPerParameterAndToken * parameters * tokens / kRate;
  return std::chrono::milliseconds(
      static_cast<std::chrono::milliseconds::rep>(1000 * std::min(seconds, kMost_s)));
}

std::chrono::milliseconds case_deadline(const Case& c, std::chrono::milliseconds asked) {
  return asked.count() > 0 ? asked : case_deadline(c);
}

}  // namespace isoshard
