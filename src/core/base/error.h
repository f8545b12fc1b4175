// SPDX-License-Identifier: Apache-2.0
/// The exceptions of the project: one base, one class per cause. harness/cli maps each to an exit
/// code.
///
/// A message carries the offending values and says what to do. Library code throws these; it never
/// prints or exits.
#pragma once
#include <stdexcept>

namespace isoshard {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A wrong flag, name, degree or combination of settings; found before any rank starts.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A missing, unreadable or malformed input file. The message starts with the file's path.
class FileError : public Error {
 public:
  using Error::Error;
};

/// Tensors or buffers whose shapes, dtypes or counts do not fit together.
class ShapeError : public Error {
 public:
  using Error::Error;
};

/// A mesh or layout that does not fit the world or the tensor.
class MeshError : public Error {
 public:
  using Error::Error;
};

/// A collective that failed: mismatched calls, an aborted world, a lost rank.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A deadline that passed.
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

/// Something went wrong around the run: a crashed rank, an exhausted resource, an incomplete
/// result.
class InfrastructureError : public Error {
 public:
  using Error::Error;
};

/// A part that this build does not contain.
class NotBuiltError : public Error {
 public:
  using Error::Error;
};

/// A comparison that compared nothing and so proves nothing.
class VacuousError : public Error {
 public:
  using Error::Error;
};

/// A golden that is missing, stale or refused.
class GoldenError : public Error {
 public:
  using Error::Error;
};

}  // namespace isoshard
