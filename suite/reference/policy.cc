// SPDX-License-Identifier: Apache-2.0
// From a case to its policy, in one place.
#include "suite/reference/policy.h"

#include "subjects/registry/subject_spec.h"
#include "subjects/train/trainer.h"
#include "suite/reference/lattice_guard.h"

namespace isoshard {

JudgePolicy policy_of(const Case& c) {
  JudgePolicy policy;
  if (is_lattice(c)) policy.level = Level::kExact;
  policy.coarsest = c.coarsest_dtype();
  policy.mask = c.settings.optimizer.kind == OptimizerSettings::Kind::kAdamW;
  const OptimizerSettings& optimizer = c.settings.optimizer;
  if (policy.mask) {
    policy.step_rule = {.learning_rate = optimizer.learning_rate,
                        .weight_decay = optimizer.weight_decay,
                        .beta1 = optimizer.beta1,
                        .beta2 = optimizer.beta2,
                        .eps = optimizer.eps};
  }
  policy.activation_grad_scale = is_reference(c.subject) ? 1 : c.degrees.dp * c.degrees.cp;
  // A head of keys and values that several tp ranks have copies of: each rank's gradient is of its
  // own queries.
  policy.partial.emplace();
  if (c.config.num_kv_heads < c.config.num_heads) {
    for (const char* point : {"k_proj", "v_proj", "k_norm", "k_rope"})
      policy.partial->push_back(std::string("activation_grad/*.") + point);
  }
  policy.max_grad_norm = c.settings.max_grad_norm;
  for (const ParameterSpec& spec : make_model(c.config, c.attention)->parameters()) {
    // the embedding's and the head's
    if (spec.param_class == ParamClass::kTied) policy.num_names[spec.name] = 2;
  }
  return policy;
}

JudgePolicy exact_policy_of(const Case& c) {
  JudgePolicy policy = policy_of(c);
  policy.level = Level::kExact;
  return policy;
}

}  // namespace isoshard
