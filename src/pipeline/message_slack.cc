#include "pipeline/message_slack.h"

#include <algorithm>
#include <limits>

namespace weft {

namespace {

constexpr double kNoEnd = std::numeric_limits<double>::infinity();

// Pieces and messages of a step, in the order in which they can happen.
class Graph {
 public:
  Graph(const PipelineShape& shape, const PipelineTimes& times, const MessageSet& coded)
      : shape_(shape), times_(times), coded_(coded) {
    std::vector<Stage> stages;
    stages.reserve(static_cast<std::size_t>(shape.stages));
    for (int s = 0; s < shape.stages; ++s) stages.push_back({pipeline_order(shape, s)});
    for (bool moved = true; moved;) {
      moved = false;
      for (int s = 0; s < shape.stages; ++s) {
        Stage& stage = stages[static_cast<std::size_t>(s)];
        while (stage.next < stage.order.size() && add(stage, stage.order[stage.next])) {
          ++stage.next;
          moved = true;
        }
      }
    }
    for (int s = 0; s < shape.stages; ++s)
      end_ = std::max(end_, ends_[index(stages[static_cast<std::size_t>(s)].last)] +
                                times.tail[static_cast<std::size_t>(s)]);
    for (int s = 0; s < shape.stages; ++s) {
      double& latest = latest_[index(stages[static_cast<std::size_t>(s)].last)];
      latest = std::min(latest, end_ - times.tail[static_cast<std::size_t>(s)]);
    }
    // (Nodes stand behind what they wait for.)
    for (std::size_t n = nodes_.size(); n-- > 0;) {
      for (const Wait& wait : nodes_[n].waits) {
        double& latest = latest_[index(wait.node)];
        latest = std::min(latest, latest_[n] - nodes_[n].seconds - wait.more);
      }
    }
  }

  double end() const { return end_; }
  std::vector<BackMessage> slack() const {
    std::vector<BackMessage> out;
    for (int c = 1; c < shape_.all_chunks(); ++c) {
      for (int m = 0; m < shape_.micro_batches; ++m) {
        const std::size_t node = index(back_[place(c, m)]);
        out.push_back({c, m, latest_[node] - ends_[node]});
      }
    }
    return out;
  }

 private:
  struct Wait {
    int node = -1;
    double more = 0;  // behind its end
  };
  struct Node {
    double seconds = 0;
    std::vector<Wait> waits;
  };
  struct Stage {
    std::vector<StageItem> order;
    std::size_t next = 0;  // of them
    int last = -1;         // piece, and message through its port
    int port = -1;
  };
  static std::size_t index(int node) { return static_cast<std::size_t>(node); }
  std::size_t place(int chunk, int micro_batch) const {
    return index(chunk) * static_cast<std::size_t>(shape_.micro_batches) + index(micro_batch);
  }
  MessageSeconds seconds_of(bool forward, int chunk, int micro_batch) const {
    if (forward) return times_.ahead[index(chunk)];
    return coded_.has(chunk, micro_batch) ? times_.coded[index(chunk)] : times_.back[index(chunk)];
  }

  int add_node(double seconds, std::vector<Wait> waits) {
    double begins = 0;
    for (const Wait& wait : waits) begins = std::max(begins, ends_[index(wait.node)] + wait.more);
    ends_.push_back(begins + seconds);
    latest_.push_back(kNoEnd);
    nodes_.push_back({seconds, std::move(waits)});
    return static_cast<int>(nodes_.size()) - 1;
  }

  // False: what it waits for has not been made.
  bool add(Stage& stage, const StageItem& item) {
    const bool forward = item.work == Work::forward, weights = item.work == Work::weight_gradient;
    const int from = forward ? item.chunk - 1 : item.chunk + 1;
    std::vector<Wait> waits;
    if (!weights && from >= 0 && from < shape_.all_chunks()) {
      const int message = (forward ? ahead_ : back_)[place(from, item.micro_batch)];
      if (message < 0) return false;
      waits.push_back({message, seconds_of(forward, from, item.micro_batch).more});
    }
    if (stage.last >= 0) waits.push_back({stage.last, 0});
    const std::vector<double>& seconds = forward   ? times_.forward
                                         : weights ? times_.weights
                                                   : times_.backward;
    stage.last = add_node(seconds[index(item.chunk)], std::move(waits));
    const int to = forward ? item.chunk + 1 : item.chunk - 1;
    if (weights || to < 0 || to >= shape_.all_chunks()) return true;
    std::vector<Wait> behind{{stage.last, 0}};
    if (stage.port >= 0) behind.push_back({stage.port, 0});
    stage.port = add_node(seconds_of(forward, item.chunk, item.micro_batch).port, std::move(behind));
    (forward ? ahead_ : back_)[place(item.chunk, item.micro_batch)] = stage.port;
    return true;
  }

  const PipelineShape& shape_;
  const PipelineTimes& times_;
  const MessageSet& coded_;
  std::vector<Node> nodes_;
  std::vector<double> ends_, latest_;  // of each: when it ends, and when it may at the latest
  // Messages by chunk and micro-batch of their sender; -1: not made yet.
  std::vector<int> ahead_ =
      std::vector<int>(static_cast<std::size_t>(shape_.all_chunks() * shape_.micro_batches), -1);
  std::vector<int> back_ = ahead_;
  double end_ = 0;
};

}  // namespace

std::vector<BackMessage> message_slack(const PipelineShape& shape, const PipelineTimes& times,
                                       const MessageSet& coded) {
  return Graph(shape, times, coded).slack();
}

double step_seconds(const PipelineShape& shape, const PipelineTimes& times, const MessageSet& coded) {
  return Graph(shape, times, coded).end();
}

namespace {

// (A step is no longer for a message more: one that cannot be missed now cannot be missed behind others, either.)
MessageSet trimmed(const PipelineShape& shape, const PipelineTimes& times, const MessageSet& messages) {
  constexpr double kNothing = 1e-9;
  const double end = step_seconds(shape, times, messages) + kNothing;
  MessageSet out = messages;
  for (const auto& [chunk, micro_batch] : messages.messages()) {
    out.remove(chunk, micro_batch);
    if (step_seconds(shape, times, out) > end) out.add(chunk, micro_batch);
  }
  return out;
}

}  // namespace

MessageSet critical_messages(const PipelineShape& shape, const PipelineTimes& times) {
  MessageSet out(shape.micro_batches);
  for (int before = -1; before < out.count();) {
    before = out.count();
    for (const BackMessage& message : message_slack(shape, times, out)) {
      const auto chunk = static_cast<std::size_t>(message.chunk);
      const double saving = times.back[chunk].all() - times.coded[chunk].all();
      if (message.slack < saving) out.add(message.chunk, message.micro_batch);
    }
  }
  return trimmed(shape, times, out);
}

}  // namespace weft
