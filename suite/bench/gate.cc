// SPDX-License-Identifier: Apache-2.0
// The twin, its verdict, and where that is remembered.
#include "suite/bench/gate.h"

#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "core/base/atomic_file.h"
#include "core/base/sha256.h"
#include "core/io/json.h"
#include "fixtures/cases/setting.h"
#include "harness/report/text/text_report.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/machine.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/registry/subject_spec.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/lattice_guard.h"
#include "suite/verify/verify.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kHeadDim = 8, kShortest = 24, kVocabulary = 96, kPositions = 512;

double num_parameters(const Case& c) {
  double parameters = 0;
  for (const ParameterSpec& spec : make_model(c.config, c.attention)->parameters()) {
    double elements = 1;
    for (const std::int64_t size : spec.shape) elements *= static_cast<double>(size);
    parameters += elements;
  }
  return parameters;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void shrink_model(Case& twin, int num_stages) {
  ModelConfig& m = twin.config;
  const std::int64_t tp = twin.degrees.tp,
                     ratio = std::max<std::int64_t>(m.num_heads / m.num_kv_heads, 1);
  // kv heads that are copied over tp stay copied
  const bool are_copied = m.num_kv_heads < tp;
  const std::int64_t kv_heads =
      are_copied ? m.num_kv_heads : tp * (m.num_kv_heads / tp > 1 ? 2 : 1);
  const std::int64_t heads_a_kv_head =
      are_copied ? tp / m.num_kv_heads : std::min<std::int64_t>(ratio, 2);
  const bool is_padded = m.vocab_size % tp != 0;
  m.num_kv_heads = kv_heads;
  m.num_heads = kv_heads * heads_a_kv_head;
  m.head_dim = kHeadDim;
  m.hidden_size = m.num_heads * kHeadDim;
  m.intermediate_size = round_up(2 * m.hidden_size, tp);
  m.vocab_size = round_up(kVocabulary, tp) + (is_padded ? 1 : 0);
  m.num_layers = std::max(2, num_stages);
  m.max_positions = kPositions;
  if (twin.settings.recompute_every > 1)
    m.num_layers = std::max<std::int64_t>(m.num_layers, twin.settings.recompute_every);
}

/// The build id that the linker wrote, or the file's name where it wrote none.
int add_object(dl_phdr_info* info, std::size_t, void* text) {
  std::string id = info->dlpi_name != nullptr ? info->dlpi_name : "";
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    if (header.p_type != PT_NOTE) continue;
    const auto* at = reinterpret_cast<const std::byte*>(info->dlpi_addr + header.p_vaddr);
    const std::byte* const end = at + header.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof(note));
      constexpr std::size_t kAlign = 4;
      const auto padded = [](std::size_t n) { return (n + kAlign - 1) / kAlign * kAlign; };
      const std::byte* const name = at + sizeof(note);
      const std::byte* const value = name + padded(note.n_namesz);
      if (value + note.n_descsz > end) break;
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0)
        id = sha256_hex({value, note.n_descsz});
      at = value + padded(note.n_descsz);
    }
  }
  static_cast<std::string*>(text)->append(id).append("\n");
  return 0;
}

std::string program_text() {
  std::string text;
  ::dl_iterate_phdr(add_object, &text);
  // without a build id the program is known by its size and time
  std::error_code ignored;
  const fs::path self = fs::read_symlink("/proc/self/exe", ignored);
  text += fmt::format("{} {}\n", fs::file_size(self, ignored),
                      fs::last_write_time(self, ignored).time_since_epoch().count());
  return text;
}

fs::path file_of(const fs::path& folder, const std::string& key) {
  return folder / (key.substr(0, 32) + ".json");
}

/// The strength that is remembered; empty if nothing is.
std::string remembered_here(const fs::path& folder, const std::string& key) {
  std::error_code ignored;
  const fs::path file = file_of(folder, key);
  if (folder.empty() || !fs::is_regular_file(file, ignored)) return "";
  try {
    const nlohmann::json stored = read_json_file(file);
    return stored.at("key") == key ? stored.at("strength").get<std::string>() : "";
  } catch (const std::exception&) {
    return "";  // it is verified again, and written anew
  }
}

/// The same on all processes that verify together: what the folder of process 0 says counts, if
/// programs and CPUs of all are the same.
std::string remembered(const fs::path& folder, const std::string& key) {
  const std::string here = remembered_here(folder, key);
  Peers* const peers = default_launcher().peers();
  if (peers == nullptr) return here;
  struct Known {
    std::array<char, 64> key{}, strength{};
    bool operator==(const Known&) const = default;
  } own;
  key.copy(own.key.data(), own.key.size());
  here.copy(own.strength.data(), own.strength.size() - 1);
  std::vector<Known> all(static_cast<std::size_t>(peers->count()));
  peers->gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  const bool are_alike =
      std::ranges::all_of(all, [&](const Known& known) { return known.key == all.front().key; });
  return are_alike ? std::string(all.front().strength.data()) : "";
}

void remember(const fs::path& folder, const GateResult& result) {
  const Peers* const peers = default_launcher().peers();
  if (folder.empty() || (peers != nullptr && peers->index() != 0)) return;
  try {
    fs::create_directories(folder);
    const nlohmann::json stored = {
        {"key", result.key}, {"strength", result.strength}, {"case", result.twin}};
    write_file_atomically(file_of(folder, result.key), stored.dump(1) + "\n");
  } catch (const std::exception&) {
    // the next run verifies again
  }
}

}  // namespace

std::string_view name_of(GateState state) noexcept {
  switch (state) {
    case GateState::kConforms:
      return "conforms";
    case GateState::kRemembered:
      return "remembered";
    case GateState::kTrusted:
      return "trusted";
    case GateState::kUngated:
      return "ungated";
    case GateState::kFails:
      break;
  }
  return "fails";
}

Case twin_of(const Case& item) {
  Case twin = item;
  NdSettings& nd = twin.settings.nd;
  const int num_stages = item.degrees.pp * nd.stages_per_rank;
  const double whole = num_parameters(item);
  if (!is_lattice(item)) shrink_model(twin, num_stages);
  if (!nd.layers_per_stage.empty()) {
    nd.layers_per_stage.assign(nd.layers_per_stage.size(), 1);
    twin.config.num_layers = static_cast<std::int64_t>(nd.layers_per_stage.size());
  }
  twin.model_name = "twin_" + item.config.model_type;
  twin.weights_path.clear();
  twin.truncated = false;
  twin.generic_weights = true;
  twin.data = {};
  twin.data.kind = DataSource::Kind::kRandomIds;
  twin.batch_size = std::min<std::int64_t>(item.batch_size, 2);
  twin.micro_batches = std::min(item.micro_batches, std::max(2, num_stages));
  twin.seq_length = round_up(kShortest, std::int64_t{2} * item.degrees.cp * item.degrees.tp);
  twin.steps = 1;
  twin.resumed.reset();
  twin.reload_after = 0;
  twin.save_path.clear();
  twin.settings.schedule = {};
  const double share = num_parameters(twin) / whole;
  twin.settings.bucket_bytes = std::max<std::int64_t>(
      1024, static_cast<std::int64_t>(share * static_cast<double>(item.settings.bucket_bytes)));
  return twin;
}

std::string gate_key(const Case& twin) {
  const Machine machine = this_machine();
  std::string text = fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n", twin.slug(), twin.reference_slug(),
                                 twin.settings.bucket_bytes, bundle_training(twin).dump(),
                                 machine.cpu, machine.cpu_features);
  text += device_collectives(twin).words;
  text += default_launcher().name();
  // once, as the file may be replaced while this process runs
  static const std::string program = program_text();
  text += program;
  return sha256_hex(std::as_bytes(std::span(text.data(), text.size())));
}

fs::path gate_folder(const fs::path& otherwise) {
  const auto folder_in = [](const char* variable) -> fs::path {
    const char* const value = std::getenv(variable);
    return value == nullptr || *value != '/' ? fs::path() : fs::path(value);
  };
  if (const fs::path cache = folder_in("XDG_CACHE_HOME"); !cache.empty())
    return cache / "isoshard" / "gate";
  if (const fs::path home = folder_in("HOME"); !home.empty())
    return home / ".cache" / "isoshard" / "gate";
  return otherwise;
}

GateResult pass_gate(const Case& item, const fs::path& folder, const std::string& fault) {
  GateResult result;
  if (is_reference(item.subject)) {
    result.state = GateState::kTrusted;
    return result;
  }
  const Case twin = twin_of(item);
  twin.validate();
  result.twin = twin.slug();
  result.key = gate_key(twin);
  if (fault.empty()) result.strength = remembered(folder, result.key);
  if (!result.strength.empty()) {
    result.state = GateState::kRemembered;
    return result;
  }
  VerifyObserver nobody;
  VerifyPlan plan;
  plan.cases = {twin};
  plan.fault = fault;
  Report report = verify(plan, nobody);
  result.exit_code = report.exit_code;
  if (report.exit_code != kExitConforms || report.cases.size() != 1 ||
      !report.cases[0].verdict.has_value()) {
    result.state = GateState::kFails;
    result.report = std::move(report);
    result.exit_code = std::max(result.exit_code, 1);
    return result;
  }
  result.state = GateState::kConforms;
  result.strength = name_of(report.cases[0].verdict->strength);
  if (fault.empty()) remember(folder, result);
  return result;
}

}  // namespace isoshard
