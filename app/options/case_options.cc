// SPDX-License-Identifier: Apache-2.0
// From flags to what cases have in common.
#include "app/options/case_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/program_options/value_semantic.hpp>
#include <cctype>
#include <filesystem>
#include <sstream>

#include "app/options/loss_scale_options.h"
#include "core/base/error.h"
#include "fixtures/cases/presets.h"
#include "fixtures/inputs/inputs.h"
#include "harness/world/machine.h"
#include "subjects/checkpoint/model_folder.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/zoo/registry.h"
#include "suite/reference/lattice_guard.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

template <class T>
void override_with(const ParsedOptions& options, const std::string& name, T& target) {
  if (options.given(name)) target = options.get<T>(name);
}

/// `--dtype fp32,bf16` and `--dtype fp32 bf16` are the same.
Strings split_commas(const Strings& items) {
  Strings result;
  for (const auto& item : items) {
    std::istringstream stream(item);
    for (std::string part; std::getline(stream, part, ',');) {
      if (!part.empty()) result.push_back(part);
    }
  }
  return result;
}

/// Fit for a slug: nothing but letters, digits and _.
std::string slug_name(std::string name) {
  name = name.substr(name.find_last_of('/') + 1);
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name.empty() ? "model" : name;
}

void apply_model(const ParsedOptions& options, std::vector<Case>& cases) {
  if (!options.given("model")) return;
  const auto& name = options.get<std::string>("model");
  std::error_code ignored;
  const bool is_path = std::filesystem::exists(name, ignored) || name.starts_with('.') ||
                       name.starts_with('/') || name.ends_with(".json");
  ModelFolder folder;
  if (is_path) {
    folder = load_model_folder(name);
  } else {
    folder = {builtin_config(name), "", name};
  }
  for (Case& item : cases) {
    item.config = folder.config;
    item.model_name = slug_name(folder.name);
    item.weights_path = folder.weights_path;
    if (is_lattice(item)) use_lattice_settings(item);
    // The built-in text has bytes up to 'z': a smaller vocabulary is trained on random ids, unless
    // asked otherwise.
    const bool fits_text = item.config.vocab_size > 'z';
    if (!options.given("data") && item.data.kind == DataSource::Kind::kText && !fits_text)
      item.data.kind = DataSource::Kind::kRandomIds;
  }
}

void apply_sizes(const ParsedOptions& options, Case& item) {
  override_with(options, "num-layers", item.config.num_layers);
  item.truncated = options.given("num-layers");
  override_with(options, "batch-size", item.batch_size);
  override_with(options, "micro-batches", item.micro_batches);
  override_with(options, "steps", item.steps);
  override_with(options, "seq-length", item.seq_length);
  override_with(options, "seed", item.seed);
  if (options.given("attn-impl"))
    item.attention = parse_attention_impl(options.get<std::string>("attn-impl"));
  if (options.given("reduction-order"))
    item.reduction_order = parse_reduction_order(options.get<std::string>("reduction-order"));
  if (!options.given("data")) return;
  const auto& data = options.get<std::string>("data");
  item.data.kind = data == "random"      ? DataSource::Kind::kRandomIds
                   : is_token_file(data) ? DataSource::Kind::kTokenFile
                                         : DataSource::Kind::kText;
  item.data.path = data == "random" || data == "text" ? std::string() : data;
}

void apply_sampling(const ParsedOptions& options, DataSource& data) {
  if (options.given("data-dtype")) {
    if (data.kind != DataSource::Kind::kTokenFile)
      throw UsageError("--data-dtype is the type of the ids in --data FILE.bin; name such a file");
    data.id_type = parse_id_type(options.get<std::string>("data-dtype"));
  }
  data.shuffle = options.get<bool>("shuffle");
  if (options.given("tail")) data.tail = parse_tail_policy(options.get<std::string>("tail"));
}

void apply_schedule(const ParsedOptions& options, LearningRateSettings& schedule) {
  if (options.given("lr-schedule"))
    schedule.kind = parse_learning_rate_schedule(options.get<std::string>("lr-schedule"));
  override_with(options, "warmup-steps", schedule.warmup_steps);
  override_with(options, "total-steps", schedule.total_steps);
  override_with(options, "min-lr", schedule.min_rate);
  if (options.given("total-steps") && schedule.kind == LearningRateSettings::Kind::kConstant)
    throw UsageError(
        "--total-steps: a constant rate ends nowhere; take --lr-schedule linear or cosine, or "
        "leave it out");
}

void apply_settings(const ParsedOptions& options, TrainSettings& settings) {
  if (options.given("optimizer"))
    settings.optimizer.kind = parse_optimizer(options.get<std::string>("optimizer"));
  // A rate that suits SGD is far too large for Adam, whose steps do not depend on the gradient's
  // size: torch's default then.
  if (options.given("optimizer") && settings.optimizer.kind == OptimizerSettings::Kind::kAdamW)
    settings.optimizer.learning_rate = 1e-3;
  override_with(options, "learning-rate", settings.optimizer.learning_rate);
  override_with(options, "weight-decay", settings.optimizer.weight_decay);
  override_with(options, "max-grad-norm", settings.max_grad_norm);
  override_with(options, "bucket-bytes", settings.bucket_bytes);
  if (options.given("loss-mean"))
    settings.loss_mean = parse_loss_mean(options.get<std::string>("loss-mean"));
  override_with(options, "label-smoothing", settings.label_smoothing);
  settings.recompute = settings.recompute || options.get<bool>("recompute");
  apply_schedule(options, settings.schedule);
  if (options.given("autocast"))
    settings.autocast = parse_dtype(options.get<std::string>("autocast"));
  if (options.given("master-dtype"))
    settings.master_dtype = parse_dtype(options.get<std::string>("master-dtype"));
  apply_loss_scale_options(options, settings.loss_scale);
}

/// A vocabulary is split by subjects that have a tp axis; the others of a preset keep it whole.
void apply_vocabulary(const ParsedOptions& options, std::vector<Case>& cases) {
  const bool has_multiple = options.given("vocab-multiple");
  if (!options.get<bool>("vocab-parallel") && !has_multiple) return;
  const std::int64_t multiple = has_multiple ? options.get<std::int64_t>("vocab-multiple") : 1;
  if (multiple < 1)
    throw UsageError(fmt::format("--vocab-multiple {}: it must be at least 1", multiple));
  const auto splits = [](const Case& item) {
    return item.subject == "autotp" || item.subject == "fsdp_tp" || item.subject == "megatron";
  };
  if (std::none_of(cases.begin(), cases.end(), splits)) {
    throw UsageError(
        "--vocab-parallel: none of the subjects splits a vocabulary; take --subjects autotp, "
        "fsdp_tp or megatron");
  }
  for (Case& item : cases) {
    if (splits(item)) item.settings.make_vocab_size_divisible_by = multiple;
  }
}

/// ZeRO is autotp's way over dp; the others of a preset keep their own.
void apply_zero_stage(const ParsedOptions& options, std::vector<Case>& cases) {
  if (!options.given("zero-stage")) return;
  const auto shards = [](const Case& item) { return item.subject == "autotp"; };
  if (std::none_of(cases.begin(), cases.end(), shards)) {
    throw UsageError("--zero-stage: none of the subjects has ZeRO stages; take --subjects autotp");
  }
  for (Case& item : cases) {
    if (shards(item)) item.settings.zero_stage = options.get<int>("zero-stage");
  }
}

/// fsdp_tp's mixed precision policy; the others reduce in the dtype of their gradients, and their
/// output is the head's.
void apply_mixed_precision_policy(const ParsedOptions& options, std::vector<Case>& cases) {
  const auto has_policy = [](const Case& item) { return item.subject == "fsdp_tp"; };
  const auto apply = [&](const char* flag, std::string_view what,
                         std::optional<Dtype> TrainSettings::*dtype) {
    if (!options.given(flag)) return;
    if (std::none_of(cases.begin(), cases.end(), has_policy))
      throw UsageError(fmt::format(
          "--{}: none of the subjects has a dtype of its own for {}; take --subjects fsdp_tp", flag,
          what));
    for (Case& item : cases) {
      if (has_policy(item)) item.settings.*dtype = parse_dtype(options.get<std::string>(flag));
    }
  };
  apply("reduce-dtype", "reductions", &TrainSettings::reduce_dtype);
  apply("output-dtype", "its output", &TrainSettings::output_dtype);
}

/// megatron's own settings; 16-bit parameters of it always have fp32 masters.
void apply_megatron(const ParsedOptions& options, std::vector<Case>& cases) {
  const auto is_megatron = [](const Case& item) { return item.subject == "megatron"; };
  for (const char* const flag : {"sequence-parallel", "distributed-optimizer"}) {
    if (options.get<bool>(flag) && std::none_of(cases.begin(), cases.end(), is_megatron)) {
      throw UsageError(
          fmt::format("--{}: none of the subjects has it; take --subjects megatron", flag));
    }
  }
  for (Case& item : cases) {
    if (!is_megatron(item)) continue;
    TrainSettings& settings = item.settings;
    settings.sequence_parallel =
        settings.sequence_parallel || options.get<bool>("sequence-parallel");
    settings.distributed_optimizer =
        settings.distributed_optimizer || options.get<bool>("distributed-optimizer");
    if (size_of(item.dtype) < size_of(Dtype::kFloat32) && !options.given("master-dtype"))
      settings.master_dtype = Dtype::kFloat32;
  }
}

/// Refuses what no dtype could make fit; what may fit is tried.
void require_memory(const Case& item) {
  // trace_capacity counts 8 bytes for what may have 2, and everything twice
  constexpr std::size_t kGenerosity = 16;
  constexpr double kGiB = 1 << 30;
  const auto needed = trace_capacity(item) / kGenerosity,
             there = static_cast<std::size_t>(this_machine().memory_bytes);
  if (needed <= there) return;
  throw UsageError(fmt::format(
      "{} needs at least {:.3g} GiB of memory, the machine has {:.3g}; take fewer tokens, layers "
      "or parameters",
      item.slug(), static_cast<double>(needed) / kGiB, static_cast<double>(there) / kGiB));
}

}  // namespace

Strings list_option(const ParsedOptions& options, const std::string& name) {
  if (!options.given(name)) return {};
  Strings items = split_commas(options.get<Strings>(name));
  if (items.empty())
    throw UsageError(
        fmt::format("--{}: nothing selected; name at least one, or leave it out", name));
  return items;
}

Strings subjects_option(const ParsedOptions& options) {
  Strings subjects = list_option(options, "subjects");
  std::replace(subjects.begin(), subjects.end(), std::string("deepspeed"), std::string("autotp"));
  for (const char* const name : {"fsdp", "fsdp2"})
    std::replace(subjects.begin(), subjects.end(), std::string(name), std::string("fsdp_tp"));
  return subjects;
}

void apply_subject_options(const ParsedOptions& options, std::vector<Case>& cases) {
  apply_vocabulary(options, cases);
  apply_zero_stage(options, cases);
  apply_megatron(options, cases);
  apply_mixed_precision_policy(options, cases);
}

void declare_case_options(OptionTable& table) {
  auto add = table.options.add_options();
  add("model", po::value<std::string>(),
      "built-in name, config.json, or Hugging Face folder (its weights are used)");
  add("num-layers", po::value<std::int64_t>(), "cut the model to this many layers");
  add("tp", po::value<int>(), "tensor-parallel degree");
  add("dp", po::value<int>(), "data-parallel degree");
  add("num-workers", po::value<int>(),
      "number of ranks: must be tp x dp; of ddp alone it is the dp degree");
  add("attn-impl", po::value<std::string>(), "eager or sdpa");
  add("batch-size", po::value<std::int64_t>(), "samples per data-parallel rank");
  add("micro-batches", po::value<int>(), "per step: gradients add up over them (default: 1)");
  add("seq-length", po::value<std::int64_t>(), "tokens per sample");
  add("data", po::value<std::string>(),
      "text (the built-in one, where the vocabulary has its bytes), random, the path of a text "
      "file, or of ids (FILE.bin, "
      "FILE.safetensors)");
  add("data-dtype", po::value<std::string>(),
      "type of the ids in FILE.bin: uint16 uint32 int64 ... (default: derived from ids and "
      "vocabulary)");
  add("shuffle", po::bool_switch(), "take the samples of each epoch in a seeded random order");
  add("tail", po::value<std::string>(),
      "end of an epoch that does not fill a global batch: drop it, pad with its first samples, or "
      "error");
  add("seed", po::value<std::uint64_t>(), "of weights and random data");
  add("label-smoothing", po::value<double>(),
      "probability that the labels give to the other entries together, in [0, 1)");
  add("dropout", po::value<double>(),
      "probability of every dropout that the model has, in [0, 1) (default: those of its config)");
  add("recompute", po::bool_switch(),
      "activation checkpointing: of a layer only the input is kept, and it runs again in backward");
  add("vocab-parallel", po::bool_switch(),
      "split embedding, head and loss along the vocabulary over tp (autotp, fsdp_tp; megatron "
      "always does)");
  add("vocab-multiple", po::value<std::int64_t>(),
      "the same, the vocabulary padded to a multiple of this x tp (default 1)");
  add("autocast", po::value<std::string>()->implicit_value("bf16"),
      "bf16 (without a value) or fp16: fp32 parameters, matrix products in this dtype, as "
      "torch.autocast");
  add("sequence-parallel", po::bool_switch(),
      "megatron: split activations between the regions of tp along the sequence over tp");
  add("distributed-optimizer", po::bool_switch(),
      "megatron: masters and optimizer state are spread over dp, bucket by bucket");
  add("bucket-bytes", po::value<std::int64_t>(),
      "most bytes of gradients that are reduced over dp at once (default: 26214400, 25 MiB)");
  add("zero-stage", po::value<int>(),
      "autotp: 0 (default), 1: masters and optimizer state are spread over dp, 2: gradients, too");
  add("master-dtype", po::value<std::string>(),
      "of the weights that the optimizer steps and of its state, at least as wide as --dtype "
      "(default: the parameters' own)");
  add("reduce-dtype", po::value<std::string>(),
      "fsdp_tp: what gradients are rounded to before they are averaged over dp (default: --dtype)");
  add("output-dtype", po::value<std::string>(),
      "fsdp_tp: what the model's output is converted to before the loss (default: as the head "
      "gives it)");
  declare_loss_scale_options(table);
  add("loss-mean", po::value<std::string>(),
      "global (over all counted tokens), local (mean of rank means) or sum (no mean)");
  add("optimizer", po::value<std::string>(), "sgd or adamw");
  add("learning-rate", po::value<double>(), "step size (default: 0.1 for sgd, 0.001 for adamw)");
  add("lr-schedule", po::value<std::string>(),
      "of the learning rate: constant (default), linear or cosine");
  add("warmup-steps", po::value<std::int64_t>(),
      "steps in which the rate rises from 0 (default: 0)");
  add("total-steps", po::value<std::int64_t>(),
      "step at which linear and cosine end, warm-up included (default: --steps)");
  add("min-lr", po::value<double>(), "rate at which linear and cosine end (default: 0)");
  add("weight-decay", po::value<double>(), "weight decay");
  add("max-grad-norm", po::value<double>(), "clip by this global norm; 0: do not clip");
  add("reduction-order", po::value<std::string>(),
      "in which ranks add: ordered (default), ring, tree");
  declare_input_options(table);
  table.aliases = {{"tp-size", "tp"},
                   {"dp-size", "dp"},
                   {"model-name", "model"},
                   {"lr", "learning-rate"},
                   {"subject", "subjects"},
                   {"dtypes", "dtype"},
                   {"init-weights-path", "init-weights"},
                   {"gradient-accumulation-steps", "micro-batches"},
                   {"layers", "num-layers"},
                   {"num-steps", "steps"},
                   {"debug-steps", "steps"},
                   {"impl", "subjects"},
                   {"clip", "max-grad-norm"},
                   {"make-vocab-size-divisible-by", "vocab-multiple"},
                   {"seq-len", "seq-length"},
                   {"data-path", "data"}};
}

void apply_case_options(const ParsedOptions& options, const InputFiles& inputs,
                        std::vector<Case>& cases) {
  apply_model(options, cases);
  for (Case& item : cases) {
    apply_sizes(options, item);
    apply_sampling(options, item.data);
    read_inputs_from(inputs, options.given("seq-length"), item);
    apply_settings(options, item.settings);
    if (options.given("dropout")) set_dropout(item.config, options.get<double>("dropout"));
  }
}

void require_usable(const std::vector<Case>& cases, Recorded recorded) {
  for (const Case& item : cases) {
    item.validate();
    Case kept = item;
    if (recorded == Recorded::kNumbers) kept.steps = 1;
    require_memory(kept);
    require_counted_tokens(item, CaseData(item));
    require_exact(item);
  }
  // A file that does not fit the config is refused here, before any rank starts. All cases have the
  // same one.
  require_usable_weights(cases.front());
}

}  // namespace isoshard
