// SPDX-License-Identifier: Apache-2.0
// From calls to records.
#include "suite/record/collective_log.h"

#include <ATen/ATen.h>

#include <utility>

#include "harness/trace/collective_calls.h"
#include "suite/record/observed_comm.h"

namespace isoshard {

void CollectiveLog::record(Sink& sink, const MeshShape& mesh, int rank) const {
  for (const auto& [axis, calls] : calls_) {
    const std::vector<std::int64_t> rows = rows_of(calls);
    const at::Tensor value =
        at::tensor(rows, at::kLong).view({static_cast<std::int64_t>(calls.size()), -1});
    Layout layout = replicated(value.sizes().vec());
    for (const AxisDegree& of : mesh.axes()) {
      if (of.degree > 1)
        layout.placements.push_back(only_at(of.axis, mesh.coordinate(rank, of.axis)));
    }
    sink.on_record({RecordKind::kScalar, collectives_name(axis, rank), std::move(layout), 1.0},
                   value);
  }
}

CommDecorator logged(CommDecorator decorate, std::shared_ptr<std::vector<CollectiveLog>> logs) {
  return [decorate = std::move(decorate), logs = std::move(logs)](
             std::unique_ptr<Communicator> inner, int rank) {
    CollectiveLog& log = logs->at(static_cast<std::size_t>(rank));
    std::unique_ptr<Communicator> logging =
        observed(std::move(inner), [&log, logs](const CollectiveCall& call, int group_size) {
          if (group_size > 1 && call.op != CollectiveOp::kSplit) log.add(call);
        });
    return decorate ? decorate(std::move(logging), rank) : std::move(logging);
  };
}

}  // namespace isoshard
