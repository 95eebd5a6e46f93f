// Messages and receives that wait for each other, by (source, identity), first in first out. A hash table of
// intrusive chains: nothing is allocated per entry, and the table grows only while the number of waiting
// entries does.
//
// Node: `MatchKey key; Node* match_next; Node* match_previous;`
#pragma once

#include <cstddef>
#include <vector>

#include "transports/match_key.h"

namespace weft {

template <class Node>
class MatchTable {
 public:
  void push(Node& node) {
    if (size_ >= chains_.size()) grow();
    append(node);
    ++size_;
  }
  // The oldest node with this key; null if there is none.
  Node* front(const MatchKey& key) {
    if (size_ == 0) return nullptr;
    for (Node* node = chain(key).first; node != nullptr; node = node->match_next) {
      if (node->key == key) return node;
    }
    return nullptr;
  }
  // The same, taken out.
  Node* pop(const MatchKey& key) {
    Node* node = front(key);
    if (node != nullptr) erase(*node);
    return node;
  }
  // REQUIRES: in the table.
  void erase(Node& node) {
    Chain& c = chain(node.key);
    (node.match_previous != nullptr ? node.match_previous->match_next : c.first) = node.match_next;
    (node.match_next != nullptr ? node.match_next->match_previous : c.last) = node.match_previous;
    node.match_next = node.match_previous = nullptr;
    --size_;
  }
  std::size_t size() const { return size_; }
  template <class F>
  void for_each(F f) const {  // f may not change the table
    for (const Chain& c : chains_) {
      for (Node* node = c.first; node != nullptr; node = node->match_next) f(*node);
    }
  }

 private:
  struct Chain {
    Node* first = nullptr;
    Node* last = nullptr;
  };
  Chain& chain(const MatchKey& key) { return chains_[hash_of(key) & (chains_.size() - 1)]; }
  void append(Node& node) {
    Chain& c = chain(node.key);
    node.match_next = nullptr;
    node.match_previous = c.last;
    (c.last != nullptr ? c.last->match_next : c.first) = &node;
    c.last = &node;
  }
  void grow() {
    std::vector<Chain> old(chains_.empty() ? 64 : 2 * chains_.size());
    old.swap(chains_);
    for (const Chain& c : old) {  // chain order is kept, so order within a key is too
      for (Node* node = c.first; node != nullptr;) {
        Node* next = node->match_next;
        append(*node);
        node = next;
      }
    }
  }
  std::vector<Chain> chains_;
  std::size_t size_ = 0;
};

}  // namespace weft
