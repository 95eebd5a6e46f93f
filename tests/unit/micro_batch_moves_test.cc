// Exchanges that happen in every micro-batch: what the verifier lets pass, and what it finds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "step/verify.h"
#include "step/weaver.h"

namespace weft {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

enum Number : int { kGradients, kThere, kBack };  // exchanges

// a gives x, which travels; b takes what has arrived. Backward the gradient of x travels the other way.
ModelShape travelling() {
  ModelShape shape{.model = "travelling", .parameters = {{"a", {4}}, {"b", {4}}}, .blocks = {}};
  shape.blocks.push_back({"a", {{.name = "a", .gives = {"x"}, .parameters = {0}}}});
  shape.blocks.push_back({"b", {{.name = "b", .takes = {"x"}, .gives = {kLoss}, .parameters = {1}}}});
  return shape;
}

Tables tables_of(const ModelShape& shape, int micro_batches) {
  Tables out;
  out.groups = {{1, {0, 1}}};
  out.exchanges = {
      {.name = "gradients", .group = 1, .slot = 1},
      {.name = "there", .traffic = TrafficClass::blocking, .group = 1, .slot = 2, .each_micro_batch = true},
      {.name = "back", .traffic = TrafficClass::blocking, .group = 1, .slot = 3, .each_micro_batch = true}};
  out.exchanges[kGradients].reads = {{TensorName::Of::gradient, "a"}, {TensorName::Of::gradient, "b"}};
  out.exchanges[kThere].reads = {{TensorName::Of::activation, "x"}};
  out.exchanges[kBack].reads = {{TensorName::Of::gradient, "x"}};
  for (Exchange& exchange : out.exchanges) exchange.writes = exchange.reads;
  const std::vector<Piece> pieces = whole_batch(shape.parts(), micro_batches);
  for (Table* table : {&out.first, &out.steady, &out.settle}) {
    std::vector<Piece> order;
    if (table->phase != Phase::first) order = {{Work::update, 0, 0, 0}, {Work::update, 1, 0, 0}};
    if (table->phase != Phase::settle) order.insert(order.end(), pieces.begin(), pieces.end());
    Weaver weaver(table->phase, shape, micro_batches, order);
    weaver.before({Work::update, 0, 0, 0}, wait_of(kGradients, weaver.last()));
    weaver.after({Work::backward, 0, 0, micro_batches - 1}, start_inside(kGradients));
    for (int m = 0; m < micro_batches; ++m) {
      weaver.before({Work::forward, 0, 0, m}, announce_of(kThere, m));
      weaver.after({Work::forward, 0, 0, m}, start_of(kThere, 0, m));
      weaver.before({Work::forward, 1, 0, m}, wait_of(kThere, 0, m));
      weaver.after({Work::backward, 1, 0, m}, start_of(kBack, 0, m));
      weaver.before({Work::backward, 0, 0, m}, wait_of(kBack, 0, m));
    }
    *table = weaver.take();
  }
  return out;
}

std::vector<std::string> breaches_of(const Tables& tables, int micro_batches) {
  const ModelShape shape = travelling();
  return verify_alone({.tables = &tables, .shape = &shape, .micro_batches = micro_batches}).breaches;
}

TEST(MicroBatchMoves, ASoundTablePasses) {
  for (const int micro_batches : {1, 2, 4})
    EXPECT_THAT(breaches_of(tables_of(travelling(), micro_batches), micro_batches), IsEmpty());
}

TEST(MicroBatchMoves, WhatIsBrokenIsFound) {
  const auto replace = [](Tables& t, const Move& from, const Move& to) {
    for (Table* table : {&t.first, &t.steady}) std::ranges::replace(table->moves, from, to);
  };
  const auto erase = [](Tables& t, const Move& move) {
    for (Table* table : {&t.first, &t.steady}) std::erase(table->moves, move);
  };
  const auto swap_first = [](Tables& t, const Move& a, const Move& b) {
    std::iter_swap(std::ranges::find(t.first.moves, a), std::ranges::find(t.first.moves, b));
  };
  const Move second_forward = compute_of({Work::forward, 1, 0, 1}),
             second_backward = compute_of({Work::backward, 0, 0, 1});
  struct Broken {
    const char* what;
    std::function<void(Tables&)> change;
    const char* sentence;
  };
  for (const Broken& broken : std::vector<Broken>{
           {"the second is not started", [&](Tables& t) { erase(t, start_of(kThere, 0, 1)); },
            "waits for ever for 'there'"},
           {"the second is never started nor awaited",
            [&](Tables& t) {
              erase(t, start_of(kBack, 0, 1));
              erase(t, wait_of(kBack, 0, 1));
            },
            "'back' is not started in step 0, micro-batch 1"},
           {"the second is not awaited", [&](Tables& t) { erase(t, wait_of(kThere, 0, 1)); },
            "takes 'x', which nobody has given yet"},
           {"the first is awaited in its place",
            [&](Tables& t) { replace(t, wait_of(kThere, 0, 1), wait_of(kThere, 0, 0)); }, "is awaited twice"},
           {"started twice", [&](Tables& t) { replace(t, start_of(kBack, 0, 1), start_of(kBack, 0, 0)); },
            "is started twice"},
           {"awaited behind its reader",
            [&](Tables& t) { swap_first(t, wait_of(kThere, 0, 1), second_forward); },
            "takes 'x', which nobody has given yet"},
           {"its gradient is awaited behind its giver",
            [&](Tables& t) { swap_first(t, wait_of(kBack, 0, 1), second_backward); },
            "comes before 'back' has ended"},
           {"a micro-batch that is not there",
            [&](Tables& t) { replace(t, start_of(kThere, 0, 1), start_of(kThere, 0, 2)); },
            "has no micro-batch 2"},
           {"an exchange of the step, of a micro-batch",
            [&](Tables& t) { t.first.moves.push_back(wait_of(kGradients, 0, 1)); }, "has no micro-batch 1"},
           {"a tensor of one micro-batch", [&](Tables& t) { t.exchanges[kThere].reads[0].micro_batch = 1; },
            "which the model does not have"}}) {
    Tables tables = tables_of(travelling(), 2);
    broken.change(tables);
    EXPECT_THAT(breaches_of(tables, 2), Contains(HasSubstr(broken.sentence))) << broken.what;
  }
}

// One rank thinks that it happens once.
TEST(MicroBatchMoves, RanksThatDisagreeAreFound) {
  const ModelShape shape = travelling();
  const Tables mine = tables_of(shape, 1);
  Tables other = mine;
  other.exchanges[kThere].each_micro_batch = false;
  const VerifiedRank ranks[] = {{.tables = &mine, .shape = &shape, .micro_batches = 1},
                                {.tables = &other, .shape = &shape, .micro_batches = 1}};
  EXPECT_THAT(verify(ranks).breaches, Contains(HasSubstr("is not of each micro-batch on rank")));
}

}  // namespace
}  // namespace weft
