// SPDX-License-Identifier: Apache-2.0
/// Fields in their order.
#include "harness/world/attached/report_message.h"

#include <cstring>
#include <string>
#include <string_view>

#include "harness/world/forked/frames.h"

namespace isoshard {
namespace {

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::byte> as_bytes(std::string_view text) {
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

void write(PayloadWriter& to, const RankReport& report) {
  to.number(static_cast<std::uint64_t>(report.rank))
      .number(static_cast<std::uint64_t>(report.end))
      .number(static_cast<std::uint64_t>(report.code))
      .text(report.message)
      .text(report.where)
      .text(report.phase)
      .text(report.standard_output)
      .text(report.standard_error)
      .text(as_text(report.result))
      .number(static_cast<std::uint64_t>(report.peak_rss_kib))
      .number(report.failures.size());
  for (const ForwardedFailure& failure : report.failures) {
    to.text(failure.file)
        .number(static_cast<std::uint64_t>(failure.line))
        .text(failure.text)
        .number(failure.fatal ? 1 : 0);
  }
}

RankReport read(PayloadReader& from) {
  RankReport report;
  report.rank = static_cast<int>(from.number());
  report.end = static_cast<RankEnd>(from.number());
  report.code = static_cast<int>(from.number());
  report.message = from.text();
  report.where = from.text();
  report.phase = from.text();
  report.standard_output = from.text();
  report.standard_error = from.text();
  report.result = as_bytes(from.text());
  report.peak_rss_kib = static_cast<long>(from.number());
  for (std::uint64_t left = from.number(); left > 0; --left) {
    ForwardedFailure failure;
    failure.file = from.text();
    failure.line = static_cast<int>(from.number());
    failure.text = from.text();
    failure.fatal = from.number() != 0;
    report.failures.push_back(std::move(failure));
  }
  return report;
}

std::vector<std::byte> bytes_of(const PayloadWriter& writer) {
  return {writer.bytes().begin(), writer.bytes().end()};
}

}  // namespace

std::vector<std::byte> message_of(const RankReport& report, const std::string& file_error) {
  PayloadWriter writer;
  write(writer, report);
  writer.text(file_error);
  return bytes_of(writer);
}

RankReport rank_report_of(std::span<const std::byte> message, std::string& file_error) {
  PayloadReader reader(message);
  RankReport report = read(reader);
  file_error = reader.text();
  return report;
}

std::vector<std::byte> message_of(const WorldReport& report) {
  PayloadWriter writer;
  writer.text(report.name).number(report.ranks.size());
  for (const RankReport& rank : report.ranks) write(writer, rank);
  writer.number(static_cast<std::uint64_t>(report.culprit))
      .text(report.cause)
      .number(report.interrupted ? 1 : 0)
      .text(report.file_error)
      .number(static_cast<std::uint64_t>(report.host_pause.count()));
  return bytes_of(writer);
}

WorldReport world_report_of(std::span<const std::byte> message) {
  PayloadReader reader(message);
  WorldReport report;
  report.name = reader.text();
  for (std::uint64_t left = reader.number(); left > 0; --left) report.ranks.push_back(read(reader));
  report.culprit = static_cast<int>(reader.number());
  report.cause = reader.text();
  report.interrupted = reader.number() != 0;
  report.file_error = reader.text();
  report.host_pause = std::chrono::milliseconds(reader.number());
  return report;
}

}  // namespace isoshard
