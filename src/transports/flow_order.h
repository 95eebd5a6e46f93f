// First in, first out within a flow. A link that is shared in quanta, or that delays at random, may finish a
// short message before a longer one that was posted earlier to the same peer with the same identity; the
// contract of a transport forbids to hand it over first. Messages enter when they are posted and leave when
// they are handed over; only the first of its flow may be.
//
// O(1) a message, nothing is allocated per message.
#pragma once

#include "base/identity.h"
#include "transports/match_table.h"

namespace weft {

struct FlowNode {
  MatchKey key;  // the flow: the rank at the other end and the identity
  FlowNode* match_next = nullptr;
  FlowNode* match_previous = nullptr;
  FlowNode* ahead = nullptr;
  FlowNode* behind = nullptr;
};

class FlowOrder {
 public:
  void enter(FlowNode& node) {
    node.ahead = last_.pop(node.key);
    node.behind = nullptr;
    if (node.ahead != nullptr) node.ahead->behind = &node;
    last_.push(node);
  }
  static bool is_first(const FlowNode& node) { return node.ahead == nullptr; }
  // Takes a node out, from any place. Gives the one behind it (which may now be the first), or null.
  FlowNode* leave(FlowNode& node) {
    if (node.behind == nullptr) {
      last_.erase(node);
      if (node.ahead != nullptr) last_.push(*node.ahead);
    } else {
      node.behind->ahead = node.ahead;
    }
    if (node.ahead != nullptr) node.ahead->behind = node.behind;
    return node.behind;
  }

 private:
  MatchTable<FlowNode> last_;  // of each flow
};

}  // namespace weft
