// SPDX-License-Identifier: Apache-2.0
// A table of keys. What is of test sets is gathered and put together at the end.
#include "app/options/torchtitan_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <functional>
#include <map>
#include <optional>
#include <sstream>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/suggest.h"
#include "subjects/optim/optimizer.h"
#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

namespace isoshard {
namespace {

/// What a key says, as text, and where it stands.
struct Value {
  std::string key, text;
  bool is_number = false, is_switch = false;
};

/// The parts of a file that make options together.
struct Gathered {
  std::map<std::string, std::string> options;  ///< option -> value
  std::map<std::string, std::string> origins;  ///< option -> key
  std::map<std::string, int> degrees;          ///< "tp" -> 2
  std::map<std::string, std::string> techniques;
  std::string pipeline_schedule;
  int shards = 0, replicas = 1, micro_batch_size = 0;
  bool has_loss_parallel = true;
  double min_rate_factor = 0;
  bool is_selective = false;
  std::string selective_option = "2";  ///< torchtitan's own where none is given
  std::vector<std::string> unused;
};

enum class Kind : std::uint8_t { kNumber, kText, kSwitch, kAny };
using Take = std::function<void(Gathered& all, const Value& value)>;
struct Key {
  std::string name;
  Kind kind = Kind::kAny;
  Take take;
};

[[noreturn]] void refuse(const Value& value, std::string_view must) {
  throw FileError(fmt::format("{} must be {}, got {}", value.key, must, value.text));
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

int whole_number(const Value& value) {
  std::size_t end = 0;
  int number = 0;
  try {
    number = std::stoi(value.text, &end);
  } catch (const std::exception&) {
    end = 0;
  }
  if (end != value.text.size() || end == 0) refuse(value, "a whole number");
  return number;
}

Take option(std::string name) {
  return [name = std::move(name)](Gathered& all, const Value& value) {
    if (const auto found = all.origins.find(name); found != all.origins.end())
      throw FileError(fmt::format("{} and {} must not both be there: they say the same",
                                  found->second, value.key));
    all.options[name] = value.text;
    all.origins[name] = value.key;
  };
}

Take degree(std::string name) {
  return [name = std::move(name)](Gathered& all, const Value& value) {
    const int number = whole_number(value);
    if (number < 1) refuse(value, "at least 1");
    const auto known = all.degrees.find(name);
    if (known != all.degrees.end() && known->second != number)
      refuse(value, fmt::format("{} as in another section", known->second));
    all.degrees[name] = number;
  };
}

Take unused(std::string why) {
  return [why = std::move(why)](Gathered& all, const Value& value) {
    all.unused.push_back(fmt::format("{} ({})", value.key, why));
  };
}

/// A technique that this build lacks may be there if it is off.
Take must_be_off(std::string technique) {
  return [technique = std::move(technique)](Gathered& all, const Value& value) {
    const std::string text = lower(value.text);
    if (text != "false" && text != "0" && !text.empty() && text != "none" && text != "[]")
      refuse(value, fmt::format("off, as this build has no {}", technique));
    all.unused.push_back(fmt::format("{} (it is off)", value.key));
  };
}

Take one_of(std::vector<std::pair<std::string, std::function<void(Gathered&)>>> words) {
  return [words = std::move(words)](Gathered& all, const Value& value) {
    std::vector<std::string> known;
    for (const auto& [word, take] : words) {
      if (lower(value.text) == lower(word)) return take(all);
      known.push_back(word);
    }
    refuse(value, "one of " + join_names(known));
  };
}

void nothing(Gathered&) {}

std::vector<Key> training_keys() {
  const auto reduce_in = [](const char* dtype) {
    return [dtype](Gathered& all) { all.options["reduce-dtype"] = dtype; };
  };
  return {{"training.local_batch_size", Kind::kNumber, option("batch-size")},
          {"training.batch_size", Kind::kNumber, option("batch-size")},
          {"training.seq_len", Kind::kNumber, option("seq-length")},
          {"training.steps", Kind::kNumber, option("steps")},
          {"training.warmup_steps", Kind::kNumber, option("warmup-steps")},
          {"training.max_norm", Kind::kNumber, option("max-grad-norm")},
          {"training.seed", Kind::kNumber, option("seeds")},
          {"debug.seed", Kind::kNumber, option("seeds")},
          {"training.mixed_precision_param", Kind::kText,
           one_of({{"float32", [](Gathered& all) { all.options["dtype"] = "fp32"; }},
                   {"bfloat16",
                    [](Gathered& all) {
                      all.options["dtype"] = "bf16";
                      all.options["master-dtype"] = "fp32";
                    }}})},
          {"training.mixed_precision_reduce", Kind::kText,
           one_of({{"float32", reduce_in("fp32")}, {"bfloat16", reduce_in("bf16")}})},
          {"training.global_batch_size", Kind::kNumber,
           [](Gathered& all, const Value& value) {
             if (whole_number(value) > 0)
               refuse(value, "-1: the control has one micro-batch, and no gradient accumulation");
             all.unused.push_back(value.key + " (it follows)");
           }},
          {"training.enable_cpu_offload", Kind::kSwitch, must_be_off("offload to the CPU")},
          {"training.compile", Kind::kSwitch, must_be_off("compilation")},
          {"training.dataset", Kind::kText, unused("the samples are those of --data")},
          {"training.dataset_path", Kind::kAny, unused("the samples are those of --data")},
          {"training.gc_freq", Kind::kNumber, unused("nothing is collected")},
          {"training.gc_debug", Kind::kSwitch, unused("nothing is collected")},
          {"training.dtype", Kind::kText, one_of({{"float32", nothing}})},
          {"training.deterministic", Kind::kSwitch, unused("every run is")},
          {"debug.deterministic", Kind::kSwitch, unused("every run is")}};
}

std::vector<Key> parallelism_keys() {
  std::vector<Key> keys;
  // Each has stood in other sections before.
  for (const char* const section : {"parallelism", "training", "experimental"}) {
    const auto add = [&](const char* name, Kind kind, Take take) {
      keys.push_back({fmt::format("{}.{}", section, name), kind, std::move(take)});
    };
    add("tensor_parallel_degree", Kind::kNumber, degree("tp"));
    add("context_parallel_degree", Kind::kNumber, degree("cp"));
    add("pipeline_parallel_degree", Kind::kNumber, degree("pp"));
    add("data_parallel_shard_degree", Kind::kNumber, [](Gathered& all, const Value& value) {
      const int number = whole_number(value);
      if (number < 1 && number != -1) refuse(value, "at least 1, or -1");
      all.shards = number;
    });
    add("data_parallel_replicate_degree", Kind::kNumber, [](Gathered& all, const Value& value) {
      all.replicas = whole_number(value);
      if (all.replicas < 1) refuse(value, "at least 1");
    });
    add("pipeline_parallel_schedule", Kind::kText,
        [](Gathered& all, const Value& value) { all.pipeline_schedule = value.text; });
    add("pipeline_parallel_microbatch_size", Kind::kNumber, [](Gathered& all, const Value& value) {
      all.micro_batch_size = whole_number(value);
      if (all.micro_batch_size < 1) refuse(value, "at least 1");
    });
    add("context_parallel_rotate_method", Kind::kText,
        one_of({{"allgather", nothing}, {"alltoall", [](Gathered& all) {
                                           all.techniques["context-attention"] = "ring";
                                         }}}));
    add("disable_loss_parallel", Kind::kSwitch,
        [](Gathered& all, const Value& value) { all.has_loss_parallel = value.text == "false"; });
    add("enable_async_tensor_parallel", Kind::kSwitch, must_be_off("async TP"));
    add("enable_compiled_autograd", Kind::kSwitch, must_be_off("compilation"));
    add("expert_parallel_degree", Kind::kNumber, one_of({{"1", nothing}}));
    add("fsdp_reshard_after_forward", Kind::kText,
        one_of({{"default", nothing}, {"always", nothing}}));
  }
  return keys;
}

std::vector<Key> other_keys() {
  const auto equal = [](double usual) {
    return [usual](Gathered& all, const Value& value) {
      if (std::stod(value.text) != usual)
        refuse(value, fmt::format("{}, which is what this build has", usual));
      all.unused.push_back(value.key + " (it is so)");
    };
  };
  const OptimizerSettings usual;
  return {
      {"model.name", Kind::kText, one_of({{"llama3", nothing}})},
      {"model.flavor", Kind::kText,
       unused("Llama-3-8B is scaled down by the rule of docs/internals/converge.md; --model")},
      {"model.converters", Kind::kAny, must_be_off("converters of models, such as float8")},
      {"model.norm_type", Kind::kText, one_of({{"rmsnorm", nothing}})},
      {"model.tokenizer_path", Kind::kText, unused("tokens are bytes")},
      {"model.hf_assets_path", Kind::kText, unused("tokens are bytes")},
      {"optimizer.name", Kind::kText,
       one_of({{"AdamW", [](Gathered& all) { all.options["optimizer"] = "adamw"; }}})},
      {"optimizer.lr", Kind::kNumber, option("learning-rate")},
      {"optimizer.weight_decay", Kind::kNumber, option("weight-decay")},
      {"optimizer.beta1", Kind::kNumber, equal(usual.beta1)},
      {"optimizer.beta2", Kind::kNumber, equal(usual.beta2)},
      {"optimizer.eps", Kind::kNumber, equal(usual.eps)},
      {"optimizer.implementation", Kind::kText, unused("each optimizer has one implementation")},
      {"optimizer.fused", Kind::kSwitch, unused("each optimizer has one implementation")},
      {"optimizer.early_step_in_backward", Kind::kSwitch, must_be_off("step inside backward")},
      {"lr_scheduler.warmup_steps", Kind::kNumber, option("warmup-steps")},
      {"lr_scheduler.decay_type", Kind::kText,
       one_of({{"linear", [](Gathered& all) { all.options["lr-schedule"] = "linear"; }},
               {"cosine", [](Gathered& all) { all.options["lr-schedule"] = "cosine"; }}})},
      {"lr_scheduler.decay_ratio", Kind::kNumber,
       [](Gathered& all, const Value& value) {
         if (std::stod(value.text) != 1)
           refuse(value, "1 or left out, as rates fall from the end of the warm-up on");
         all.unused.push_back(value.key + " (rates fall from the end of the warm-up on)");
       }},
      {"lr_scheduler.min_lr_factor", Kind::kNumber,
       [](Gathered& all, const Value& value) { all.min_rate_factor = std::stod(value.text); }},
      {"activation_checkpoint.mode", Kind::kText,
       one_of({{"none", nothing},
               {"full", [](Gathered& all) { all.techniques["recompute"] = ""; }},
               {"selective", [](Gathered& all) { all.is_selective = true; }}})},
      {"activation_checkpoint.selective_ac_option", Kind::kAny,
       [](Gathered& all, const Value& value) { all.selective_option = value.text; }},
      {"float8.enable_float8_linear", Kind::kSwitch, must_be_off("float8")},
      {"compile.enable", Kind::kSwitch, must_be_off("compilation")},
      {"compile.components", Kind::kAny, unused("nothing is compiled")}};
}

/// Sections of which nothing matters for what is computed here.
constexpr std::array<std::pair<std::string_view, std::string_view>, 9> kUnusedSections{
    {{"job", "of torchtitan's own files"},
     {"profiling", "nothing is profiled"},
     {"metrics", "numbers are in loss_*.json"},
     {"comm", "ranks are processes of one machine"},
     {"checkpoint", "--init-weights is a seed checkpoint"},
     {"validation", "nothing is validated while training"},
     {"memory_estimation", "memory is checked before ranks start"},
     {"fault_tolerance", "a rank that fails ends the run"},
     {"float8", "it is off unless model.converters says otherwise"}}};

std::vector<Key> all_keys() {
  std::vector<Key> keys = training_keys();
  for (std::vector<Key> more : {parallelism_keys(), other_keys()})
    keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

Value value_of(const std::string& key, const toml::node& node) {
  Value value{key, "", node.is_number(), node.is_boolean()};
  std::ostringstream text;
  if (const auto words = node.value<std::string>(); words.has_value() && node.is_string()) {
    text << *words;
  } else if (node.is_integer()) {
    text << *node.value<std::int64_t>();
  } else if (node.is_floating_point()) {
    text << fmt::format("{}", *node.value<double>());
  } else if (node.is_boolean()) {
    text << (*node.value<bool>() ? "true" : "false");
  } else if (const toml::array* array = node.as_array(); array != nullptr) {
    text << (array->empty() ? "[]" : "a list");
  } else {
    text << "a value of another type";
  }
  value.text = text.str();
  return value;
}

void take_key(const std::vector<Key>& keys, const Value& value, bool is_string, Gathered& all) {
  const std::string section = value.key.substr(0, value.key.find('.'));
  const auto found = std::ranges::find(keys, value.key, &Key::name);
  if (found != keys.end()) {
    if (found->kind == Kind::kNumber && !value.is_number) refuse(value, "a number");
    if (found->kind == Kind::kSwitch && !value.is_switch) refuse(value, "true or false");
    if (found->kind == Kind::kText && !is_string) refuse(value, "a string");
    return found->take(all, value);
  }
  for (const auto& [name, why] : kUnusedSections) {
    if (section == name) return unused(std::string(why))(all, value);
  }
  throw FileError(
      fmt::format("unknown key '{}'{}", value.key, did_you_mean(value.key, torchtitan_keys())));
}

int micro_batches_of(const Gathered& all) {
  const auto batch = all.options.find("batch-size");
  if (batch == all.options.end())
    throw FileError("pipeline_parallel_microbatch_size needs training.local_batch_size, got none");
  const int local = whole_number({all.origins.at("batch-size"), batch->second});
  if (local % all.micro_batch_size != 0)
    throw FileError(
        fmt::format("training.local_batch_size must be a multiple of "
                    "pipeline_parallel_microbatch_size {}, got {}",
                    all.micro_batch_size, local));
  return local / all.micro_batch_size;
}

/// "tp=2,pp=2,..." of what the file has besides data parallelism; empty if it has nothing.
std::string test_of(const Gathered& all) {
  std::vector<std::string> parts;
  const auto degree_of = [&](const char* name) {
    const auto found = all.degrees.find(name);
    return found == all.degrees.end() ? 1 : found->second;
  };
  for (const char* const name : {"tp", "cp", "pp"}) {
    if (degree_of(name) > 1) parts.push_back(fmt::format("{}={}", name, degree_of(name)));
  }
  if (degree_of("tp") > 1 && all.has_loss_parallel) {
    parts.emplace_back("vocab-parallel");
    parts.emplace_back("sequence-parallel");
  }
  if (degree_of("pp") > 1 && !all.pipeline_schedule.empty()) {
    parts.push_back("pipeline-schedule=" + all.pipeline_schedule);
    // torchtitan's own number where a schedule has several
    const std::string schedule = lower(all.pipeline_schedule);
    if (schedule.starts_with("interleaved") || schedule.starts_with("zbv"))
      parts.emplace_back("stages-per-rank=2");
  }
  if (degree_of("pp") > 1 && all.micro_batch_size > 0)
    parts.push_back(fmt::format("micro-batches={}", micro_batches_of(all)));
  for (const auto& [name, value] : all.techniques) {
    const bool is_of_cp = name == "context-attention";
    if (!is_of_cp || degree_of("cp") > 1)
      parts.push_back(value.empty() ? name : name + "=" + value);
  }
  if (all.replicas > 1) parts.push_back(fmt::format("dp-replicate={}", all.replicas));
  return fmt::format("{}", fmt::join(parts, ","));
}

// "2": every second layer. "op": some operations of every layer, which no number depends on.
void choose_layers(Gathered& all) {
  if (!all.is_selective) return;
  if (all.selective_option == "op") {
    all.unused.emplace_back(
        "activation_checkpoint.mode (layers are checkpointed whole, and no number depends on it)");
    return;
  }
  all.techniques["recompute-every"] = all.selective_option;
}

// Other bytes become '?': toml++ 3.3 has undefined behavior where a letter such as U+021A stands
// outside a string. No key and no value that counts has one.
std::string in_ascii(std::string_view text) {
  std::string ascii(text);
  for (char& c : ascii) {
    if (static_cast<unsigned char>(c) >= 0x80) c = '?';
  }
  return ascii;
}

TorchtitanConfig config_of(Gathered all) {
  TorchtitanConfig config;
  choose_layers(all);
  if (all.shards > 0) all.options["dp"] = std::to_string(std::int64_t{all.shards} * all.replicas);
  if (all.min_rate_factor > 0 && !all.options.contains("learning-rate"))
    throw FileError("lr_scheduler.min_lr_factor needs optimizer.lr, got none");
  if (all.min_rate_factor > 0)
    all.options["min-lr"] =
        fmt::format("{}", all.min_rate_factor * std::stod(all.options.at("learning-rate")));
  config.options.assign(all.options.begin(), all.options.end());
  if (std::string test = test_of(all); !test.empty()) config.options.emplace_back("test", test);
  config.unused = std::move(all.unused);
  return config;
}

}  // namespace

std::vector<std::string> torchtitan_keys() {
  std::vector<std::string> names;
  for (Key& key : all_keys()) names.push_back(std::move(key.name));
  for (const auto& [section, why] : kUnusedSections) names.push_back(std::string(section) + ".*");
  return names;
}

TorchtitanConfig parse_torchtitan_config(std::string_view text,
                                         const std::filesystem::path& origin) {
  try {
    const toml::table table = toml::parse(in_ascii(text));
    const std::vector<Key> keys = all_keys();
    Gathered all;
    for (const auto& [section, node] : table) {
      const toml::table* const inner = node.as_table();
      if (inner == nullptr)
        throw FileError(fmt::format("'{}' must be in a section, such as [training]",
                                    std::string_view(section)));
      for (const auto& [name, entry] : *inner) {
        const std::string key =
            fmt::format("{}.{}", std::string_view(section), std::string_view(name));
        take_key(keys, value_of(key, entry), entry.is_string(), all);
      }
    }
    return config_of(std::move(all));
  } catch (const toml::parse_error& error) {
    throw FileError(fmt::format("{}: must be TOML: {} (line {})", origin.string(),
                                error.description(), error.source().begin.line));
  } catch (const FileError& error) {
    throw FileError(fmt::format("{}: {}", origin.string(), error.what()));
  }
}

TorchtitanConfig torchtitan_config(const std::filesystem::path& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return parse_torchtitan_config({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path);
}

}  // namespace isoshard
