// Tables of moves: what the verifier lets pass, and what it finds in tables that are broken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "step/step_times.h"
#include "step/verify.h"
#include "step/weaver.h"
#include "weft/error.h"

namespace weft {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// embedding | layer (two parts) | head, which also uses the embedding's table and the embedding itself.
ModelShape tied_model() {
  ModelShape shape{.model = "tied",
                   .parameters = {{"table", {8, 2}}, {"attention", {4}}, {"mlp", {4}}, {"norm", {2}}},
                   .blocks = {}};
  shape.blocks.push_back({"embedding", {{.name = "embedding", .gives = {"x"}, .parameters = {0}}}});
  shape.blocks.push_back({"layer",
                          {{.name = "attention", .takes = {"x"}, .gives = {"y"}, .parameters = {1}},
                           {.name = "mlp", .takes = {"y"}, .gives = {"z"}, .parameters = {2}}}});
  shape.blocks.push_back(
      {"head", {{.name = "head", .takes = {"z", "x"}, .gives = {kLoss}, .parameters = {3, 0}}}});
  return shape;
}

enum Number : int { kTable, kRest, kVerdict };  // exchanges

// A hand-made plan: the table's gradient in one exchange, everything else in another, a verdict.
Tables tables_of(const ModelShape& shape, int micro_batches) {
  Tables out;
  const auto gradient = [](const char* name) { return TensorName{TensorName::Of::gradient, name}; };
  out.exchanges = {{.name = "gradient of the table", .group = 1, .slot = 1, .codec = "packed"},
                   {.name = "the rest", .group = 1, .slot = 2, .codec = "packed"},
                   {.name = "verdict", .traffic = TrafficClass::prior, .group = 1, .slot = 3}};
  out.exchanges[kTable].reads = out.exchanges[kTable].writes = {gradient("table")};
  out.exchanges[kRest].reads =
      out.exchanges[kRest].writes = {gradient("attention"), gradient("mlp"), gradient("norm")};
  const std::vector<Piece> pieces = whole_batch(shape.parts(), micro_batches);
  for (Table* table : {&out.first, &out.steady, &out.settle}) {
    std::vector<Piece> order;
    for (int b = 0; b < 3; ++b) order.push_back({Work::update, b, 0, 0});
    if (table->phase == Phase::first) order.clear();
    if (table->phase != Phase::settle) order.insert(order.end(), pieces.begin(), pieces.end());
    Weaver weaver(table->phase, shape, micro_batches, order);
    const Piece first_update{Work::update, 0, 0, 0};
    weaver.before(first_update, wait_of(kTable, weaver.last()));
    weaver.before(first_update, wait_of(kRest, weaver.last()));
    weaver.before(first_update, start_of(kVerdict, weaver.last()));
    weaver.before(first_update, wait_of(kVerdict, weaver.last()));
    weaver.after({Work::backward, 1, 0, micro_batches - 1}, start_inside(kRest));
    weaver.after({Work::backward, 0, 0, micro_batches - 1}, start_inside(kTable));
    *table = weaver.take();
  }
  return out;
}

std::vector<std::string> breaches_of(const Tables& tables, int micro_batches = 1, int verdict = kVerdict) {
  const ModelShape shape = tied_model();
  return verify_alone(
      {.tables = &tables, .shape = &shape, .micro_batches = micro_batches, .verdict = verdict});
}

TEST(Verifier, LetsASoundTablePass) {
  for (const int micro_batches : {1, 2, 5})
    EXPECT_THAT(breaches_of(tables_of(tied_model(), micro_batches), micro_batches), IsEmpty());
}

std::size_t find(const Table& table, const Move& wanted) {
  return static_cast<std::size_t>(std::ranges::find(table.moves, wanted) - table.moves.begin());
}
void erase(Table& table, const Move& move) {
  table.moves.erase(table.moves.begin() + static_cast<std::ptrdiff_t>(find(table, move)));
}
void swap_moves(Table& table, const Move& a, const Move& b) {
  std::swap(table.moves[find(table, a)], table.moves[find(table, b)]);
}

// One change each to a sound plan of two micro-batches, and the sentence that must come.
TEST(Verifier, FindsWhatIsBroken) {
  struct Broken {
    const char* what;
    std::function<void(Tables&)> change;
    const char* sentence;
  };
  const Piece update{Work::update, 1, 0, 0};
  const std::vector<Broken> all{
      {"no start", [](Tables& t) { erase(t.steady, start_inside(kTable)); }, "waits for ever"},
      {"started twice", [](Tables& t) { t.first.moves.push_back(start_of(kTable)); }, "is started twice"},
      {"nobody waits", [](Tables& t) { erase(t.settle, wait_of(kRest, 0)); }, "nobody waits for 'the rest'"},
      {"wrong step", [](Tables& t) { t.steady.moves[find(t.steady, wait_of(kRest, 1))].offset = 0; },
       "waits for ever for 'the rest' of offset 0"},
      {"update before its gradient",
       [&](Tables& t) { swap_moves(t.steady, compute_of({Work::update, 0, 0, 0}), wait_of(kTable, 1)); },
       "update embedding comes before 'gradient of the table' has ended"},
      {"update before the verdict",
       [&](Tables& t) { swap_moves(t.steady, compute_of({Work::update, 0, 0, 0}), wait_of(kVerdict, 1)); },
       "comes before the verdict"},
      {"update left out", [&](Tables& t) { erase(t.steady, compute_of(update)); },
       "'attention' was updated 0 times in 1 steps"},
      {"updated twice", [&](Tables& t) { t.settle.moves.push_back(compute_of(update)); },
       "'attention' was updated 5 times in 4 steps"},
      {"forward before what it takes",
       [](Tables& t) {
         swap_moves(t.first, compute_of({Work::forward, 1, 0, 0}), compute_of({Work::forward, 1, 1, 0}));
       },
       "forward mlp, micro-batch 0 takes 'y', which nobody has given yet"},
      {"forward before its update",
       [&](Tables& t) { swap_moves(t.steady, compute_of(update), compute_of({Work::forward, 1, 0, 0})); },
       "before its last update"},
      {"backward before a reader's",
       [](Tables& t) {
         swap_moves(t.first, compute_of({Work::backward, 0, 0, 1}), compute_of({Work::backward, 2, 0, 1}));
       },
       "backward embedding, micro-batch 1 comes before that of its reader 'head'"},
      {"backward left out", [](Tables& t) { erase(t.first, compute_of({Work::backward, 2, 0, 0})); },
       "starts before the gradient of 'table' is complete"},
      {"start inside an earlier piece",
       [](Tables& t) { swap_moves(t.first, start_inside(kTable), compute_of({Work::backward, 0, 0, 1})); },
       "'gradient of the table' starts before the gradient of 'table' is complete"},
      {"computed twice", [](Tables& t) { t.first.moves.push_back(compute_of({Work::forward, 0, 0, 0})); },
       "forward embedding, micro-batch 0 is computed twice"},
  };
  for (const Broken& broken : all) {
    Tables tables = tables_of(tied_model(), 2);
    broken.change(tables);
    EXPECT_THAT(breaches_of(tables, 2), Contains(HasSubstr(broken.sentence))) << broken.what;
  }
}

// Two ranks: rank 0 sends an activation that rank 1 receives before its forward.
struct Pair {
  ModelShape shape = chain_shape("pair", {{"stage", {{"weight", {4}}}}});
  std::vector<Tables> tables{2};

  Pair() {
    for (int r = 0; r < 2; ++r) {
      Tables& t = tables[static_cast<std::size_t>(r)];
      t.exchanges = {{.name = r == 0 ? "send" : "receive",
                      .kind = r == 0 ? Exchange::Kind::send : Exchange::Kind::receive,
                      .traffic = TrafficClass::blocking,
                      .group = 7,
                      .slot = 4,
                      .peer = 1 - r,
                      .codec = "low-rank"},
                     {.name = "gradients", .group = 1, .slot = 1}};
      t.exchanges[1].reads = t.exchanges[1].writes = {{TensorName::Of::gradient, "weight"}};
      for (Table* table : {&t.first, &t.steady, &t.settle}) {
        std::vector<Piece> order;
        if (table->phase != Phase::first) order.push_back({Work::update, 0, 0, 0});
        if (table->phase != Phase::settle) {
          order.push_back({Work::forward, 0, 0, 0});
          order.push_back({Work::backward, 0, 0, 0});
        }
        Weaver weaver(table->phase, shape, 1, order);
        const Piece forward{Work::forward, 0, 0, 0}, backward{Work::backward, 0, 0, 0};
        if (r == 0) {
          weaver.after(forward, start_of(0));
          weaver.after(backward, wait_of(0, 0));
        } else {
          weaver.before(forward, start_of(0));
          weaver.before(forward, wait_of(0, 0));
        }
        weaver.after(backward, start_inside(1));
        weaver.before({Work::update, 0, 0, 0}, wait_of(1, weaver.last()));
        *table = weaver.take();
      }
    }
  }
  std::vector<std::string> breaches() const {
    std::vector<VerifiedRank> ranks;
    for (const Tables& t : tables) ranks.push_back({.tables = &t, .shape = &shape});
    return verify(ranks);
  }
};

TEST(Verifier, EverySendHasItsReceiveWithTheSameCodec) {
  EXPECT_THAT(Pair().breaches(), IsEmpty());
  Pair other_codec;
  other_codec.tables[1].exchanges[0].codec = "bf16";
  EXPECT_THAT(other_codec.breaches(),
              Contains(HasSubstr("'send' has the codec 'low-rank', and 'bf16' on rank 1")));
  Pair other_slot;
  other_slot.tables[1].exchanges[0].slot = 5;
  EXPECT_THAT(other_slot.breaches(), Contains(HasSubstr("'send' has no receive on rank 1")));
  Pair two_sends;
  two_sends.tables[1].exchanges[0].kind = Exchange::Kind::send;
  EXPECT_THAT(two_sends.breaches(), Contains(HasSubstr("has no receive")));
  Pair other_class;
  other_class.tables[1].exchanges[1].traffic = TrafficClass::delayed;
  EXPECT_THAT(other_class.breaches(), Contains(HasSubstr("'gradients' is of another class on rank 1")));
}

TEST(Verifier, FindsRanksThatWaitForEachOther) {
  // Both wait for the other's part of the collective before they start their own.
  Pair circle;
  for (Tables& t : circle.tables) {
    t.exchanges.push_back({.name = "second", .group = 1, .slot = 9});
    for (Table* table : {&t.first, &t.steady}) {
      const bool is_first = &t == &circle.tables[0];
      table->moves.insert(table->moves.begin(), is_first ? wait_of(1, 0) : start_of(2));
      table->moves.push_back(is_first ? start_of(2) : wait_of(2, 0));
    }
  }
  EXPECT_THAT(circle.breaches(), Contains(HasSubstr("waits for ever")));
}

TEST(Shapes, ThatDoNotHoldTogetherAreRefused) {
  tied_model().check();
  const auto refused = [](const std::function<void(ModelShape&)>& change) {
    ModelShape shape = tied_model();
    change(shape);
    EXPECT_THROW(shape.check(), UsageError);
  };
  refused([](ModelShape& s) { s.parameters[1].name = "table"; });
  refused([](ModelShape& s) { s.blocks[1].parts[0].takes = {"nothing"}; });
  refused([](ModelShape& s) { s.blocks[1].parts[1].gives = {"y"}; });
  refused([](ModelShape& s) { s.blocks[1].parts[0].parameters = {2}; });
  refused([](ModelShape& s) { s.parameters.push_back({"unused", {3}}); });
  refused([](ModelShape& s) { s.blocks[2].parts[0].gives = {"logits"}; });
  refused([](ModelShape& s) { s.blocks[1].parts.clear(); });
  EXPECT_EQ(tied_model().block_of(0), 0);
  EXPECT_EQ(tied_model().ready_after(3, 4), (Piece{Work::backward, 2, 0, 3}));
  EXPECT_EQ(tied_model().trained({false, true, true, true}).parameters.front().name, "attention");
}

// A clock that is moved by hand through a table: every piece takes so many seconds, every wait ten.
StepTimes walked(StepClock& clock, const Table& table, double& at, const std::function<double(Piece)>& takes,
                 const std::function<void(Piece, double)>& inside = {}) {
  const auto now = [&at] { return from_seconds(at); };
  clock.begin(table);
  for (const Move& move : table.moves) {
    if (move.kind == Move::Kind::compute) {
      clock.computing(now());
      if (inside) inside(move.piece, at);
      at += takes(move.piece);
      clock.computed(move.piece, now());
    } else if (move.kind == Move::Kind::wait) {
      clock.waited(now(), from_seconds(at + 10));
      at += 10;
    }
  }
  clock.end(now());
  return clock.times();
}

TEST(StepTimes, PiecesHaveNeitherWaitsNorHandOvers) {
  const ModelShape shape = tied_model();
  const Tables tables = tables_of(shape, 1);
  StepClock clock(shape);
  double at = 5;
  const auto takes = [](Piece piece) {
    return piece.work == Work::update ? 1.0 : piece.work == Work::forward ? 2.0 : 4.0;
  };
  EXPECT_FALSE(walked(clock, tables.first, at, takes).steady);
  EXPECT_EQ(clock.times().other, 0);
  at += 3;  // the next batch is made
  // The gradient of "mlp" is there after 1 of the 8 seconds of its block's backward, that of "attention" after
  // 3 of its part's 4; handing either over takes half a second.
  const auto inside = [&](Piece piece, double began) {
    if (piece.work != Work::backward || piece.block != 1) return;
    const int parameter = piece.part == 1 ? 2 : 1;
    const double when = began + (piece.part == 1 ? 1 : 3);
    clock.handed_over(parameter, from_seconds(when), from_seconds(when + 0.5));
    at += 0.5;
  };
  const StepTimes times = walked(clock, tables.steady, at, takes, inside);
  EXPECT_TRUE(times.steady);
  EXPECT_THAT(times.forward, ::testing::ElementsAre(2, 4, 2));
  EXPECT_THAT(times.backward, ::testing::ElementsAre(4, 8, 4));
  EXPECT_THAT(times.update, ::testing::ElementsAre(1, 1, 1));
  EXPECT_THAT(times.ready, ::testing::ElementsAre(1, 7.0 / 8, 1.0 / 8, 1));
  EXPECT_DOUBLE_EQ(times.waited,
                   10.0 * static_cast<double>(std::ranges::count_if(tables.steady.moves, [](const Move& m) {
                     return m.kind == Move::Kind::wait;
                   })));
  EXPECT_DOUBLE_EQ(times.handed_over, 1);
  EXPECT_DOUBLE_EQ(times.other, 3);
  // Settling changes nothing of it.
  walked(clock, tables.settle, at, takes);
  EXPECT_EQ(numbers_of(clock.times()), numbers_of(times));
}

TEST(StepTimes, OnlyTheLastMicroBatchHasABackwardThatLetsGradientsGo) {
  const ModelShape shape = tied_model();
  const Tables tables = tables_of(shape, 3);
  StepClock clock(shape);
  double at = 0;
  const auto takes = [](Piece piece) { return piece.work == Work::forward ? 2.0 : 4.0; };
  const StepTimes times = walked(clock, tables.first, at, takes);
  EXPECT_THAT(times.backward, ::testing::ElementsAre(4, 8, 4));
  // Two more forwards of 8 s and two earlier backwards of 16 s stand behind the first forward.
  EXPECT_THAT(times.forward, ::testing::ElementsAre(2, 4, 2 + 2 * 8 + 2 * 16));
}

TEST(StepTimes, MediansAreOfEachNumber) {
  std::vector<StepTimes> steps(3);
  for (std::size_t i = 0; i < 3; ++i) {
    steps[i].forward = {static_cast<double>(i)};
    steps[i].backward = {static_cast<double>((i + 1) % 3)};
    steps[i].update = steps[i].ready = {0.5};
    steps[i].other = static_cast<double>((i + 2) % 3);
  }
  EXPECT_THAT(numbers_of(median_of(steps)), ::testing::ElementsAre(1, 1, 0.5, 0.5, 0, 0, 1));
}

}  // namespace
}  // namespace weft
