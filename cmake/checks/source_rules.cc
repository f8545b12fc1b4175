// SPDX-License-Identifier: Apache-2.0
// The rules of source_rules.h, by plain text search: quick, and independent of any compiler.
#include "cmake/checks/source_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <stdexcept>
#include <string_view>

namespace isoshard {
namespace fs = std::filesystem;
namespace {

const std::vector<std::string> kCodeFolders = {"src", "harness", "fixtures", "suite", "conformance",
                                               "app", "bench",   "examples", "cmake"};

bool ends_with_any(const std::string& name, const std::vector<std::string>& endings) {
  return std::ranges::any_of(endings,
                             [&](const std::string& ending) { return name.ends_with(ending); });
}

bool is_code(const fs::path& path) {
  return ends_with_any(path.filename().string(), {".h", ".cc", ".cu", ".cuh", ".inc"});
}

/// True when `path` is `folder` or lies below it; both relative to the root, with forward slashes.
bool is_below(std::string_view path, std::string_view folder) {
  return path.starts_with(folder) && (path.size() == folder.size() || path[folder.size()] == '/');
}

/// The regular files below the folders (those that exist), relative to the root, sorted.
std::vector<fs::path> files_below(const fs::path& root, const std::vector<std::string>& folders,
                                  const std::function<bool(const fs::path&)>& wanted) {
  std::vector<fs::path> found;
  for (const std::string& folder : folders) {
    if (!fs::is_directory(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const fs::path path = entry.path().lexically_relative(root);
      if (entry.is_regular_file() && wanted(path)) found.push_back(path);
    }
  }
  std::ranges::sort(found);
  return found;
}

std::vector<std::string> lines_of(const fs::path& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error(fmt::format("cannot read {}", path.string()));
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

void require_files(const std::vector<fs::path>& files, const fs::path& root) {
  if (files.empty())
    throw std::runtime_error(fmt::format("no file to check below {}", root.string()));
}

std::string trimmed(std::string text) {
  const auto is_padding = [](char c) { return c == ' ' || c == '\t' || c == '`' || c == '\r'; };
  while (!text.empty() && is_padding(text.back())) text.pop_back();
  while (!text.empty() && is_padding(text.front())) text.erase(text.begin());
  return text;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  for (std::string& part : parts) part = trimmed(part);
  return parts;
}

/// The row with the longest folder that holds `path`, or null.
const LayerRow* row_of(const std::vector<LayerRow>& rows, const std::string& path) {
  const LayerRow* best = nullptr;
  for (const LayerRow& row : rows) {
    if (is_below(path, row.folder) && (best == nullptr || row.folder.size() > best->folder.size()))
      best = &row;
  }
  return best;
}

bool may_use_gtest(const std::string& file) {
  static const std::vector<std::string> kFolders = {
      "harness/testing", "suite/testing", "app/testing", "conformance",
      "bench",           "examples",      "cmake"};
  return file.ends_with("_test.cc") ||
         std::ranges::any_of(kFolders,
                             [&](const std::string& folder) { return is_below(file, folder); });
}

/// What is wrong with `included` (the text in quotes) in a file of `row`; empty if nothing is.
std::string layer_problem(const fs::path& root, const std::vector<LayerRow>& rows,
                          const LayerRow& row, const std::string& included) {
  const std::string target = fs::exists(root / "src" / included) ? "src/" + included : included;
  if (!fs::exists(root / target)) {
    // A bare *.inc is made by the build, for the target that includes it.
    if (included.ends_with(".inc") && included.find('/') == std::string::npos) return "";
    return fmt::format(
        "\"{}\" is no file of the repository: root it at the repository or at src/, or write it in "
        "angle brackets",
        included);
  }
  const LayerRow* other = row_of(rows, target);
  const bool allowed =
      other == &row || std::ranges::any_of(row.may_include, [&](const std::string& folder) {
        return is_below(target, folder);
      });
  if (allowed) return "";
  return fmt::format("{} must not include {} (\"{}\"): see docs/internals/layers.md", row.folder,
                     other ? other->folder : target, included);
}

/// Tests may look from above: a unit test stands beside its code and may use what is built on it.
bool is_test_of_layer(const std::string& file, const std::string& included) {
  return file.ends_with("_test.cc") && !included.starts_with("app/") &&
         !included.starts_with("bench/");
}

/// A cycle among folders as "a -> b -> a", or empty. `edges`: folder to the folders that its files
/// include.
std::string find_cycle(const std::map<std::string, std::set<std::string>>& edges) {
  std::map<std::string, int> state;  // 1: on the path, 2: done
  std::vector<std::string> path;
  const std::function<std::string(const std::string&)> visit =
      [&](const std::string& folder) -> std::string {
    state[folder] = 1;
    path.push_back(folder);
    const auto targets = edges.find(folder);
    if (targets != edges.end()) {
      for (const std::string& next : targets->second) {
        if (state[next] == 1) {
          const auto start = std::find(path.begin(), path.end(), next);
          return fmt::format("{} -> {}", fmt::join(start, path.end(), " -> "), next);
        }
        if (state[next] == 2) continue;
        if (std::string cycle = visit(next); !cycle.empty()) return cycle;
      }
    }
    path.pop_back();
    state[folder] = 2;
    return "";
  };
  for (const auto& [folder, targets] : edges) {
    if (state[folder] != 0) continue;
    if (std::string cycle = visit(folder); !cycle.empty()) return cycle;
  }
  return "";
}

/// Which lines of a file include LibTorch, directly or through headers of the tree.
class LibTorchIncludes {
 public:
  struct Line {
    std::size_t number;
    std::string chain;  ///< "a.h -> b.h -> <ATen/ATen.h>"
  };
  explicit LibTorchIncludes(fs::path root) : root_(std::move(root)) {}

  std::vector<Line> of(const std::string& file) {
    static const std::regex kTorch(R"(^\s*#\s*include\s*(<(ATen|c10|torch)/[^>]*>))");
    static const std::regex kOwn(R"(^\s*#\s*include\s*\"([^\"]+)\")");
    std::vector<Line> found;
    const std::vector<std::string> lines = lines_of(root_ / file);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      std::smatch match;
      if (std::regex_search(lines[i], match, kTorch)) {
        found.push_back({i + 1, match[1]});
      } else if (std::regex_search(lines[i], match, kOwn)) {
        const std::string name = match[1];
        const std::string target = fs::exists(root_ / "src" / name) ? "src/" + name : name;
        if (!fs::exists(root_ / target)) continue;
        if (const std::string& chain = chain_of(target); !chain.empty())
          found.push_back({i + 1, fmt::format("{} -> {}", target, chain)});
      }
    }
    return found;
  }

 private:
  /// How a header comes to LibTorch; empty if it does not.
  const std::string& chain_of(const std::string& header) {
    const auto [entry, is_new] = chains_.try_emplace(header);
    if (is_new) {
      const std::vector<Line> lines = of(header);
      if (!lines.empty()) chains_[header] = lines.front().chain;
    }
    return chains_[header];
  }

  fs::path root_;
  std::map<std::string, std::string> chains_;
};

/// Takes // comments away (good enough here: the tree has no block comments around code).
std::string without_comment(const std::string& line) {
  return line.substr(0, line.find("//"));
}

/// Whether a program wrote the file, as its second line says.
bool is_generated(const std::vector<std::string>& lines) {
  return lines.size() > 1 && lines[1].starts_with("// Generated by ");
}

bool is_test(const fs::path& path) {
  return path.filename().string().ends_with("_test.cc");
}

/// "FILE:LINE: " and what `problem` says of the match, for each line of the files whose code, taken
/// without comments, matches one of the patterns; the first one that does counts.
std::vector<std::string> problems_in_code(
    const fs::path& root, const std::vector<fs::path>& files,
    const std::vector<const std::regex*>& patterns,
    const std::function<std::string(const std::string&)>& problem) {
  require_files(files, root);
  std::vector<std::string> problems;
  for (const fs::path& path : files) {
    const std::vector<std::string> lines = lines_of(root / path);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const std::string code = without_comment(lines[i]);
      std::smatch match;
      if (std::ranges::any_of(patterns, [&](const std::regex* pattern) {
            return std::regex_search(code, match, *pattern);
          }))
        problems.push_back(
            fmt::format("{}:{}: {}", path.generic_string(), i + 1, problem(match.str())));
    }
  }
  return problems;
}

}  // namespace

std::vector<LayerRow> read_layers(const fs::path& layers_md) {
  std::vector<LayerRow> rows;
  for (const std::string& line : lines_of(layers_md)) {
    if (!line.starts_with("|")) continue;
    const std::vector<std::string> cells = split(line, '|');
    if (cells.size() < 4 || cells[1] == "folder" || cells[1].starts_with("-")) continue;
    LayerRow row{cells[1], {}};
    for (const std::string& entry : split(cells[2], ',')) {
      if (!entry.empty() && entry != "-") row.may_include.push_back(entry);
    }
    rows.push_back(row);
  }
  if (rows.empty())
    throw std::runtime_error(fmt::format("{} holds no table of layers", layers_md.string()));
  return rows;
}

std::vector<std::string> check_layering(const fs::path& root, const std::vector<LayerRow>& rows) {
  static const std::regex kOwn(R"(^\s*#\s*include\s*\"([^\"]+)\")");
  static const std::regex kGtest(R"(^\s*#\s*include\s*[<\"](gtest|gmock)/)");
  const std::vector<fs::path> files = files_below(root, kCodeFolders, is_code);
  require_files(files, root);
  std::vector<std::string> problems;
  for (const fs::path& path : files) {
    const std::string file = path.generic_string();
    const bool is_pch = file == "cmake/pch.h";
    const LayerRow* row = row_of(rows, file);
    if (row == nullptr) {
      problems.push_back(
          fmt::format("{}:1: its folder is in no row of docs/internals/layers.md", file));
      continue;
    }
    const std::vector<std::string> lines = lines_of(root / path);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      std::smatch match;
      if (std::regex_search(lines[i], match, kGtest)) {
        if (!may_use_gtest(file) && !is_pch)
          problems.push_back(fmt::format("{}:{}: GoogleTest is for *_test.cc files", file, i + 1));
      } else if (std::regex_search(lines[i], match, kOwn)) {
        // Examples are projects of their own: they include what lies beside them.
        const bool is_own =
            row->folder == "examples" && fs::exists((root / path).parent_path() / match[1].str());
        const std::string problem = is_own ? "" : layer_problem(root, rows, *row, match[1]);
        if (!problem.empty() && !is_test_of_layer(file, match[1]))
          problems.push_back(fmt::format("{}:{}: {}", file, i + 1, problem));
      }
    }
  }
  return problems;
}

std::vector<std::string> check_folder_cycles(const fs::path& root) {
  static const std::regex kOwn(R"(^\s*#\s*include\s*\"([^\"]+)\")");
  const std::vector<fs::path> files = files_below(
      root, kCodeFolders, [](const fs::path& path) { return is_code(path) && !is_test(path); });
  require_files(files, root);
  std::map<std::string, std::set<std::string>> edges;
  for (const fs::path& path : files) {
    for (const std::string& line : lines_of(root / path)) {
      std::smatch match;
      if (!std::regex_search(line, match, kOwn)) continue;
      const fs::path included = match[1].str();
      const fs::path target =
          fs::exists(root / "src" / included) ? fs::path("src") / included : included;
      if (!fs::exists(root / target)) continue;
      const std::string from = path.parent_path().generic_string(),
                        to = target.parent_path().generic_string();
      if (from != to) edges[from].insert(to);
    }
  }
  const std::string cycle = find_cycle(edges);
  if (cycle.empty()) return {};
  return {fmt::format("folders include each other: {}; move what they share below both", cycle)};
}

std::vector<std::string> check_judge_without_libtorch(const fs::path& root) {
  static const std::vector<std::string> kFolders = {
      "src/core/base",    "src/core/memory",    "src/core/comm",   "src/core/mesh",
      "src/core/observe", "src/core/io",        "harness/stats",   "harness/trace",
      "harness/bundle",   "harness/evidence",   "harness/verdict", "harness/causes",
      "harness/judge",    "harness/ranks",      "harness/curve",   "harness/golden",
      "harness/report",   "harness/cli",        "harness/compare", "harness/plot",
      "app/judge",        "harness/checkpoints"};
  // What takes at::Tensor stands beside what takes bytes.
  static const std::set<std::string> kTensorLayers = {"src/core/comm/tensor.h",
                                                      "src/core/comm/tensor.cc",
                                                      "src/core/io/tensor_files.h",
                                                      "src/core/io/tensor_files.cc",
                                                      "src/core/observe/sink.h",
                                                      "src/core/observe/sink.cc",
                                                      "src/core/observe/loss_scaled_sink.h"};
  const std::vector<fs::path> files = files_below(root, kFolders, [](const fs::path& path) {
    return is_code(path) && !is_test(path) && !kTensorLayers.contains(path.generic_string());
  });
  require_files(files, root);
  LibTorchIncludes includes(root);
  std::vector<std::string> problems;
  for (const fs::path& path : files) {
    for (const auto& [line, chain] : includes.of(path.generic_string())) {
      problems.push_back(
          fmt::format("{}:{}: the judge must need no LibTorch, but this includes {}; take a "
                      "HostTensor, or move the code to harness/recorder",
                      path.generic_string(), line, chain));
    }
  }
  return problems;
}

std::vector<std::string> check_folder_sizes(const fs::path& root) {
  constexpr int kMostFiles = 25;
  const std::vector<fs::path> files = files_below(
      root, kCodeFolders, [](const fs::path& path) { return is_code(path) && !is_test(path); });
  require_files(files, root);
  std::map<std::string, int> count;
  for (const fs::path& path : files) ++count[path.parent_path().generic_string()];
  std::vector<std::string> problems;
  for (const auto& [folder, number] : count) {
    if (number > kMostFiles) {
      problems.push_back(
          fmt::format("{}: {} source files, at most {} may be in one folder; make sub-folders",
                      folder, number, kMostFiles));
    }
  }
  return problems;
}

std::vector<std::string> check_line_lengths(const fs::path& root) {
  constexpr std::size_t kMostColumns = 100;
  std::vector<fs::path> files = files_below(root, kCodeFolders, [](const fs::path& path) {
    return is_code(path) || path.filename() == "CMakeLists.txt" ||
           ends_with_any(path.filename().string(), {".cmake", ".sh", ".py"});
  });
  require_files(files, root);
  std::vector<std::string> problems;
  for (const fs::path& path : files) {
    const std::vector<std::string> lines = lines_of(root / path);
    if (is_generated(lines)) continue;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      // Bytes of a UTF-8 character after its first are no columns.
      const auto columns = std::ranges::count_if(
          lines[i], [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
      if (static_cast<std::size_t>(columns) <= kMostColumns) continue;
      problems.push_back(fmt::format("{}:{}: {} columns, at most {} are allowed",
                                     path.generic_string(), i + 1, columns, kMostColumns));
    }
  }
  return problems;
}

std::vector<std::string> check_time_limits(const fs::path& root) {
  constexpr int kLeastSeconds = 600;
  static const std::regex kLimit(R"rx(\bTIMEOUT ([0-9]{1,6})\b)rx");
  const std::vector<fs::path> files = files_below(root, kCodeFolders, [](const fs::path& path) {
    const std::string name = path.filename().string();
    return name == "CMakeLists.txt" || (name.starts_with("Isoshard") && name.ends_with(".cmake"));
  });
  require_files(files, root);
  std::vector<std::string> problems;
  for (const fs::path& path : files) {
    const std::vector<std::string> lines = lines_of(root / path);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      std::smatch match;
      if (!std::regex_search(lines[i], match, kLimit) || std::stoi(match[1]) >= kLeastSeconds)
        continue;
      problems.push_back(fmt::format("{}:{}: the TIMEOUT of a test must be at least {}, got {}",
                                     path.generic_string(), i + 1, kLeastSeconds, match[1].str()));
    }
  }
  return problems;
}

std::vector<std::string> check_subject_names(const fs::path& root) {
  static const std::regex kRow(R"rx(\.name = "(\w+)")rx");
  static const std::regex kConstant(R"rx(std::string_view k\w+Name = "(\w+)")rx");
  std::set<std::string> names;
  for (const fs::path& path :
       files_below(root, {"src/subjects/registry", "src/core/base"}, is_code)) {
    const bool is_row = is_below(path.generic_string(), "src/subjects/registry");
    for (const std::string& line : lines_of(root / path)) {
      std::smatch match;
      if (std::regex_search(line, match, is_row ? kRow : kConstant)) names.insert(match[1]);
    }
  }
  if (names.empty())
    throw std::runtime_error(fmt::format("no row of a subject below {}", root.string()));
  const std::regex comparison(
      fmt::format(R"rx(([=!]=\s*"({0})")|("({0})"\s*[=!]=))rx", fmt::join(names, "|")));
  const std::vector<fs::path> files = files_below(root, kCodeFolders, [](const fs::path& path) {
    return is_code(path) && !is_test(path) &&
           !is_below(path.generic_string(), "src/subjects/registry");
  });
  return problems_in_code(root, files, {&comparison}, [](const std::string& match) {
    return fmt::format("comparison with a subject's name ({}): ask its row in subjects/registry",
                       match);
  });
}

std::vector<std::string> check_degree_pairs(const fs::path& root) {
  static const std::regex kPair(
      R"(\bint\s+(dp|tp|pp|cp|ep)\s*,\s*(const\s+)?(int\s+)?(dp|tp|pp|cp|ep)\b)");
  const std::vector<fs::path> files = files_below(root, kCodeFolders, is_code);
  require_files(files, root);
  std::vector<std::string> problems;
  for (const fs::path& path : files) {
    const std::vector<std::string> lines = lines_of(root / path);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      std::string code = without_comment(lines[i]);
      if (i + 1 < lines.size()) code += " " + trimmed(without_comment(lines[i + 1]));
      std::smatch match;
      if (!std::regex_search(code, match, kPair)) continue;
      // A pair that begins on the next line is found there.
      if (static_cast<std::size_t>(match.position()) >= without_comment(lines[i]).size()) continue;
      problems.push_back(fmt::format("{}:{}: a pair of ints ({}): take Degrees or a MeshShape",
                                     path.generic_string(), i + 1, match.str()));
    }
  }
  return problems;
}

std::vector<std::string> check_record_names(const fs::path& root) {
  static const std::regex kSuffix(
      R"rx("([^"]*[}*/])?\.(clipped|micro_batch|read|partial|recomputed|master|exp_avg|)rx"
      R"rx(exp_avg_sq|momentum_buffer)")rx");
  static const std::regex kScalar(
      "RecordKind::kScalar,"
      R"rx( "\w)rx");
  const std::vector<fs::path> files = files_below(root, kCodeFolders, [](const fs::path& path) {
    const std::string name = path.generic_string();
    return is_code(path) && !is_test(path) && name != "src/core/observe/record_name.cc" &&
           !is_below(name, "src/subjects/optim") && !is_below(name, "examples");
  });
  return problems_in_code(root, files, {&kSuffix, &kScalar}, [](const std::string& match) {
    return fmt::format(
        "a part of a record's name ({}): use NameRole and core/observe/record_name.h", match);
  });
}

std::vector<std::string> check_sentences(const fs::path& root) {
  static const std::regex kSearch(
      R"rx(\b(diagnosis|reason|evidence|what|cause\.text|rule\.text)(\(\))?\.)rx"
      R"rx((r?find\w*|substr|starts_with|ends_with|contains|erase)\()rx");
  static const std::regex kParse(
      R"rx(\b(sto[dfil]+|strto\w+|from_chars|sscanf|regex_\w+)\(.*)rx"
      R"rx(\b(diagnosis|reason|evidence|what|cause\.text|rule\.text)\b)rx");
  const std::vector<fs::path> files =
      files_below(root, {"harness", "suite", "app", "conformance"},
                  [](const fs::path& path) { return is_code(path) && !is_test(path); });
  return problems_in_code(root, files, {&kSearch, &kParse}, [](const std::string& match) {
    return fmt::format(
        "reads a sentence ({}): use the id and the values of the finding, cause or rule", match);
  });
}

std::vector<std::string> check_licence_lines(const fs::path& root) {
  std::vector<std::string> folders = kCodeFolders;
  folders.insert(folders.end(), {"tools", "python", ".ci", ".github"});
  std::vector<fs::path> files = files_below(root, folders, [](const fs::path& path) {
    const std::string name = path.filename().string();
    return is_code(path) || name == "CMakeLists.txt" ||
           ends_with_any(name, {".cmake", ".sh", ".py", ".yml"}) ||
           (path.parent_path().filename() == ".ci" && !path.has_extension());
  });
  for (const char* name : {"CMakeLists.txt", "CTestConfig.cmake", "isoshard"}) {
    if (fs::exists(root / name)) files.emplace_back(name);
  }
  require_files(files, root);
  std::vector<std::string> problems;
  for (const fs::path& path : files) {
    std::vector<std::string> lines = lines_of(root / path);
    lines.resize(std::min<std::size_t>(lines.size(), 3));
    const bool found = std::ranges::any_of(lines, [](const std::string& line) {
      return line.find("SPDX-License-Identifier: Apache-2.0") !=
             std::string::npos;  // this line itself is no licence line
    });
    if (!found)
      problems.push_back(fmt::format("{}:1: add an SPDX-License-Identifier: Apache-2.0 comment",
                                     path.generic_string()));
  }
  std::ranges::sort(problems);
  return problems;
}

std::vector<std::string> check_device_literals(const fs::path& root) {
  static const std::regex kDevice(
      R"(\bk(CUDA|CPU)\b|DeviceType::(CUDA|CPU)|\"(cuda|cpu)(:[0-9]+)?\"|\.(cuda|cpu)\(\))");
  const std::vector<fs::path> files =
      files_below(root, {"src/subjects/model", "src/subjects/parallel", "src/subjects/optim"},
                  [](const fs::path& path) { return is_code(path) && !is_test(path); });
  return problems_in_code(root, files, {&kDevice}, [](const std::string& match) {
    return fmt::format("device literal {}: take the device from a tensor", match);
  });
}

std::vector<std::string> check_orphan_tests(const fs::path& root,
                                            const fs::path& compile_commands) {
  const std::vector<fs::path> tests = files_below(root, kCodeFolders, is_test);
  require_files(tests, root);
  std::ifstream stream(compile_commands);
  if (!stream) throw std::runtime_error(fmt::format("cannot read {}", compile_commands.string()));
  static const std::regex kInclude("^#include \"([^\"]+)\"");
  std::set<fs::path> compiled;
  for (const nlohmann::json& entry : nlohmann::json::parse(stream)) {
    const fs::path source =
        entry.at("directory").get<fs::path>() / entry.at("file").get<std::string>();
    compiled.insert(fs::weakly_canonical(source));
    if (source.parent_path().filename() != "Unity" || !fs::exists(source)) continue;
    // A file that CMake made to include several sources.
    for (const std::string& line : lines_of(source)) {
      std::smatch match;
      if (std::regex_search(line, match, kInclude)) compiled.insert(fs::path(match[1].str()));
    }
  }
  std::vector<std::string> problems;
  for (const fs::path& test : tests) {
    if (compiled.contains(fs::weakly_canonical(root / test))) continue;
    problems.push_back(fmt::format(
        "{}:1: no target compiles this test: add it to an isoshard_test()", test.generic_string()));
  }
  return problems;
}

std::vector<std::string> check_contracts_page(const fs::path& root) {
  // \s also spans lines: a long TEST_F( is broken after its first argument.
  static const std::regex kTest(R"(\b(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\))");
  static const std::regex kName(R"(`([^`]+)`)");
  std::set<std::string> known;
  for (const fs::path& path : files_below(
           root, kCodeFolders, [](const fs::path& file) { return file.extension() == ".cc"; })) {
    const std::string text = fmt::format("{}", fmt::join(lines_of(root / path), "\n"));
    for (std::sregex_iterator match(text.begin(), text.end(), kTest), end; match != end; ++match) {
      known.insert((*match)[1].str() + "." + (*match)[2].str());
    }
  }
  for (const std::string& line : lines_of(root / "docs/reference/faults.md")) {
    std::smatch match;
    if (line.starts_with("| `") && std::regex_search(line, match, kName)) known.insert(match[1]);
  }
  const std::vector<std::string> lines = lines_of(root / "docs/reference/contracts.md");
  std::vector<std::string> problems;
  std::size_t num_names = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (!lines[i].starts_with("|")) continue;
    for (std::sregex_iterator name(lines[i].begin(), lines[i].end(), kName), end; name != end;
         ++name, ++num_names) {
      if (known.contains((*name)[1])) continue;
      problems.push_back(
          fmt::format("docs/reference/contracts.md:{}: no test or fault is called {}", i + 1,
                      (*name)[1].str()));
    }
  }
  if (num_names == 0) throw std::runtime_error("docs/reference/contracts.md names no test");
  if (!fs::exists(root / "docs/internals/failures.md")) return problems;
  static const std::regex kCase(R"(`([A-Z]\w+\.[A-Z]\w+)`)");
  const std::vector<std::string> failures = lines_of(root / "docs/internals/failures.md");
  for (std::size_t i = 0; i < failures.size(); ++i) {
    for (std::sregex_iterator name(failures[i].begin(), failures[i].end(), kCase), end; name != end;
         ++name) {
      if (known.contains((*name)[1])) continue;
      problems.push_back(fmt::format("docs/internals/failures.md:{}: no test is called {}", i + 1,
                                     (*name)[1].str()));
    }
  }
  return problems;
}

}  // namespace isoshard
