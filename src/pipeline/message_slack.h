// How long each message that goes back between stages may take longer before a step does: its slack.
//
// A step as a graph: what a stage computes is in the order of its table; what it sends goes through its port in the
// order in which it was made; a chunk's forward waits for the message of the chunk before it, its backward for that of
// the chunk behind it. From the seconds of all of these follow the earliest time of everything, the end of the step (of
// each stage's end and what follows it, the latest), and the latest time at which everything may end without moving
// that. The slack of a message is the difference of its two.
//
// Messages whose slack is below what compressing them saves are critical: the others would be compressed for nothing.
// Which they are follows from seconds, not from the order alone: with 4 stages, 16 micro-batches, a backward of two
// forwards and messages of half of one, 23 of 48 have no slack at all, and not all of the epilogue's are among them.
// Where those are compressed others have less slack than before; so that they are looked at again until none is added.
// Then every path as long as the step has compressed messages alone: compressing all would not end it earlier. On the
// way messages came in that others behind them made needless: those without which the step ends as early are taken out
// again, chunk after chunk. Without any one of those that are left it would end later.
//
// Thread: any.
#pragma once

#include <vector>

#include "patterns/pipeline.h"
#include "pipeline/message_set.h"

namespace weft {

struct MessageSeconds {
  double port = 0;  // of its sender, that nothing else passes meanwhile
  double more = 0;  // until it is of use: latency, coding
  double all() const { return port + more; }
};

struct PipelineTimes {
  // Of one micro-batch, of each chunk of the model. `backward`: of zb-h1, of the gradients of inputs; `weights`: of
  // the others, which other schedules have in `backward`.
  std::vector<double> forward, backward, weights;
  // From each chunk to the one behind it, and to the one before it: as it is, and as factors.
  std::vector<MessageSeconds> ahead, back, coded;
  std::vector<double> tail;  // of each stage, behind its last piece: the sum of its gradients
};

struct BackMessage {
  int chunk = 0, micro_batch = 0;  // of the sender
  double slack = 0;
};

// Those that go back, chunk after chunk; `coded` are factors. REQUIRES: as many seconds as chunks, and stages.
std::vector<BackMessage> message_slack(const PipelineShape& shape, const PipelineTimes& times,
                                       const MessageSet& coded);
// When the last stage ends, with what follows.
double step_seconds(const PipelineShape& shape, const PipelineTimes& times, const MessageSet& coded);

// Those that must be factors for a step as short as if all were. A nanosecond counts as nothing.
MessageSet critical_messages(const PipelineShape& shape, const PipelineTimes& times);

}  // namespace weft
