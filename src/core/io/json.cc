// SPDX-License-Identifier: Apache-2.0
// A SAX handler that builds the value and enforces the limits while it goes.
#include "core/io/json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/printable.h"

namespace isoshard {
namespace {

using Json = nlohmann::json;

/// Called by nlohmann's parser, which keeps its own stack on the heap: depth costs no call stack.
class StrictBuilder : public nlohmann::json_sax<Json> {
 public:
  StrictBuilder(const std::filesystem::path& path, const JsonLimits& limits)
      : path_(path), limits_(limits) {}
  [[nodiscard]] Json take() { return std::move(root_); }

  bool null() override { return scalar(nullptr); }
  bool boolean(bool value) override { return scalar(value); }
  bool number_integer(number_integer_t value) override { return scalar(value); }
  bool number_unsigned(number_unsigned_t value) override { return scalar(value); }
  bool number_float(number_float_t value, const string_t&) override { return scalar(value); }
  bool string(string_t& value) override { return scalar(std::move(value)); }
  bool binary(binary_t&) override { refuse("binary values are not JSON"); }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [entry, inserted] = open_.back()->get_ref<Json::object_t&>().emplace(name, nullptr);
    if (!inserted) refuse(fmt::format("duplicate key '{}' in one object", printable(name)));
    slot_ = &entry->second;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const Json::exception& error) override {
    constexpr std::size_t kLongestReason = 300;
    refuse(fmt::format("is not strict JSON at byte {}: {}", position,
                       printable(error.what(), kLongestReason)));
  }

 private:
  [[noreturn]] void refuse(const std::string& problem) const {
    throw FileError(fmt::format("{}: {}", path_.string(), problem));
  }

  Json* place(Json value) {
    if (++num_values_ > limits_.max_values)
      refuse(fmt::format("must hold at most {} JSON values, got more", limits_.max_values));
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *slot_ = std::move(value);
    return slot_;
  }
  bool scalar(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json container) {
    if (open_.size() >= limits_.max_depth)
      refuse(fmt::format("must nest at most {} levels deep, got more", limits_.max_depth));
    open_.push_back(place(std::move(container)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::filesystem::path& path_;
  const JsonLimits& limits_;
  Json root_;
  // a container is only added to while it is the innermost, so the pointers stay valid
  std::vector<Json*> open_;
  Json* slot_ = nullptr;  // where the value of the last key goes
  std::size_t num_values_ = 0;
};

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::filesystem::path& path,
                          const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    throw FileError(fmt::format("{}: must have at most {} bytes of JSON, got {}", path.string(),
                                limits.max_bytes, text.size()));
  }
  // The parser below would skip it, RFC 8259 section 8.1 forbids it.
  if (text.starts_with("\xEF\xBB\xBF"))
    throw FileError(
        fmt::format("{}: starts with a byte-order mark; save it as plain UTF-8", path.string()));
  // The parser below would take a NUL for the end of the text and ignore what follows.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw FileError(fmt::format("{}: is not strict JSON at byte {}: a NUL", path.string(), nul));
  }
  StrictBuilder builder(path, limits);
  Json::sax_parse(text.begin(), text.end(), &builder, Json::input_format_t::json, /*strict=*/true,
                  /*ignore_comments=*/false);
  return builder.take();
}

nlohmann::json read_json_file(const std::filesystem::path& path, const JsonLimits& limits) {
  const MappedFile file(path);
  return parse_json({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}, path,
                    limits);
}

}  // namespace isoshard
