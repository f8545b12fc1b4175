// SPDX-License-Identifier: Apache-2.0
/// Facts of how an implementation spreads a model over its ranks, whatever the settings say.
#pragma once

namespace isoshard {

/// Code that depends on one of these facts asks for it, not for the subject's name or for a setting
/// that the subject happens to take. Each strategy has its traits beside its declared arithmetic.
struct SubjectTraits {
  /// A rank keeps its rows of each parameter over dp and cp, and gathers the rest for each layer.
  bool shards_parameters = false;
  /// Embedding and head are split over tp.
  bool splits_vocabulary = false;
  /// Layers that read the same input (q, k and v; gate and up) are one parameter.
  bool fuses_layers = false;
  /// The gradients of a step are added up in one buffer, in fp32 or wider.
  bool buffers_gradients = false;
  /// 16-bit parameters have fp32 masters.
  bool needs_fp32_masters = false;
};

}  // namespace isoshard
