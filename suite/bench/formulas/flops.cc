// SPDX-License-Identifier: Apache-2.0
// Products of each layer and of the head.
#include "suite/bench/formulas/flops.h"

#include <algorithm>

#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

double wide(std::int64_t size) {
  return static_cast<double>(size);
}

bool is_product(const ParameterSpec& spec) {
  return spec.shape.size() == 2 && spec.name.find("embed") == std::string::npos &&
         spec.name.find("wte") == std::string::npos && spec.name.find("wpe") == std::string::npos;
}

/// Weights that every token is multiplied with: those of the layers, and the head's, tied or not.
struct Products {
  double layers = 0, head = 0;
};

Products products_of(const Case& c) {
  Products products;
  const auto model = make_model(c.config, c.attention);
  products.head = wide(c.config.vocab_size) * wide(c.config.hidden_size);
  const std::string head = model->head_module() + ".weight";
  for (const ParameterSpec& spec : model->parameters()) {
    if (!is_product(spec) || spec.name == head) continue;
    products.layers += wide(spec.shape[0]) * wide(spec.shape[1]);
  }
  return products;
}

}  // namespace

double samples_per_step(const Case& c) {
  return wide(c.degrees.dp) * wide(c.batch_size) * wide(c.micro_batches);
}

double tokens_per_step(const Case& c) {
  return samples_per_step(c) * wide(c.seq_length);
}

StepFlops step_flops(const Case& c) {
  const Products products = products_of(c);
  const ModelConfig& m = c.config;
  // scores and their product with values, each sequence x sequence x heads x head dim
  const double attention = 4 * wide(c.seq_length) * wide(m.num_heads) * wide(m.head_dim);
  const double layers = 2 * products.layers + wide(m.num_layers) * attention,
               forward = layers + 2 * products.head;
  StepFlops flops;
  flops.model = 3 * forward * tokens_per_step(c);
  const int every = c.settings.recompute_every;
  const double again = every == 0 ? 0
                                  : std::max<double>(1, wide(m.num_layers / every)) /
                                        std::max(1.0, wide(m.num_layers));
  flops.hardware = flops.model + again * layers * tokens_per_step(c);
  return flops;
}

}  // namespace isoshard
