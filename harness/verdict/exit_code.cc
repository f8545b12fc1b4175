// SPDX-License-Identifier: Apache-2.0
/// Maps verdicts and exceptions to exit codes.
#include "harness/verdict/exit_code.h"

#include "core/base/error.h"

namespace isoshard {

int exit_code_of(Status status) noexcept {
  switch (status) {
    case Status::kConforms:
      return kExitConforms;
    case Status::kDiverges:
    case Status::kVacuous:
      return kExitDiverges;
    case Status::kIncomplete:
      return kExitInfrastructure;
  }
  return kExitInfrastructure;
}

int exit_code_of(const std::exception& error) noexcept {
  // MeshError and ShapeError that reach the top come from settings that do not fit, found before
  // ranks start.
  if (dynamic_cast<const UsageError*>(&error) != nullptr ||
      dynamic_cast<const MeshError*>(&error) != nullptr)
    return kExitUsage;
  if (dynamic_cast<const FileError*>(&error) != nullptr) return kExitBadInput;
  if (dynamic_cast<const GoldenError*>(&error) != nullptr) return kExitGolden;
  if (dynamic_cast<const VacuousError*>(&error) != nullptr) return kExitDiverges;
  return kExitInfrastructure;
}

namespace {
int severity(int code) noexcept {
  switch (code) {
    case kExitConforms:
      return 0;
    case kExitGolden:
      return 1;
    case kExitDiverges:
      return 2;
    case kExitBadInput:
      return 3;
    case kExitUsage:
      return 4;
    case kExitInfrastructure:
      return 5;
    case kExitHangup:
      return 6;
    case kExitTerminated:
      return 7;
    case kExitInterrupted:
      return 8;
    default:
      return 5;
  }
}
}  // namespace

int combine_exit_codes(int a, int b) noexcept {
  return severity(a) >= severity(b) ? a : b;
}

}  // namespace isoshard
