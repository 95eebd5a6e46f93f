// What a stage of a pipeline keeps of the messages that arrive, counted by hand.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "patterns/pipeline.h"

namespace weft::reference {

// How many messages a stage keeps at most, counted in its list of items: a receive is posted `stages` items in front of
// the one that it is for (halves that make gradients of weights are none of these), and kept until the last item of its
// chunk and micro-batch has ended: the backward, or its second half. `forgets`: as if nothing was let go before the end.
inline int most_kept(const PipelineShape& shape, int stage, bool forgets = false) {
  const std::vector<StageItem> all = pipeline_order(shape, stage);
  const bool splits = shape.schedule == PipelineSchedule::zb_h1;
  std::vector<StageItem> receiving;
  std::ranges::copy_if(all, std::back_inserter(receiving),
                       [](const StageItem& item) { return item.work != Work::weight_gradient; });
  const auto arrives = [&](const StageItem& item) {
    return item.work == Work::forward ? item.chunk > 0 : item.chunk + 1 < shape.all_chunks();
  };
  int kept = 0, most = 0;
  std::size_t posted = 0, begun = 0;
  for (const StageItem& item : all) {
    if (item.work != Work::weight_gradient) ++begun;
    for (; posted < std::min(receiving.size(), begun + static_cast<std::size_t>(shape.stages)); ++posted)
      kept += arrives(receiving[posted]) ? 1 : 0;
    // (In front of the first item those of as many items are posted, and then one more.)
    most = std::max(most, kept);
    const bool last = item.work == (splits ? Work::weight_gradient : Work::backward);
    if (last && !forgets) kept -= (item.chunk > 0 ? 1 : 0) + (item.chunk + 1 < shape.all_chunks() ? 1 : 0);
  }
  return most;
}

}  // namespace weft::reference
