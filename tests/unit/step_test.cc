// Tables of moves: what the verifier lets pass, and what it finds in tables that are broken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>

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

enum Number : int { kTable, kRest, kVerdict, kPlan, kSum, kNorm };  // exchanges

constexpr Piece kFirstUpdate{Work::update, 0, 0, 0}, kLayerUpdate{Work::update, 1, 0, 0},
    kLastUpdate{Work::update, 2, 0, 0};
constexpr Piece kAttention{Work::forward, 1, 0, 0}, kMlp{Work::forward, 1, 1, 0},
    kHead{Work::forward, 2, 0, 0};

TensorName gradient(const char* name) { return {TensorName::Of::gradient, name}; }
TensorName activation(const char* name) { return {TensorName::Of::activation, name}; }
TensorName parameter(const char* name) { return {TensorName::Of::parameter, name}; }

// A hand-made plan: the table's gradient in one exchange, everything else in another, a verdict, a comparison
// of plans; the sum of an activation, which is announced; a parameter that is handed out in every step.
Tables tables_of(const ModelShape& shape, int micro_batches) {
  Tables out;
  out.groups = {{1, {0, 1}}};
  out.exchanges = {{.name = "gradient of the table", .group = 1, .slot = 1, .codec = "packed"},
                   {.name = "the rest", .group = 1, .slot = 2, .codec = "packed"},
                   {.name = "verdict", .traffic = TrafficClass::prior, .group = 1, .slot = 3},
                   {.name = "plan", .group = 1, .slot = 4, .at_installation = true},
                   {.name = "sum of y", .traffic = TrafficClass::blocking, .group = 1, .slot = 5},
                   {.name = "norm of rank 0", .traffic = TrafficClass::prior, .group = 1, .slot = 6}};
  out.exchanges[kTable].reads = out.exchanges[kTable].writes = {gradient("table")};
  out.exchanges[kRest].reads =
      out.exchanges[kRest].writes = {gradient("attention"), gradient("mlp"), gradient("norm")};
  out.exchanges[kSum].reads = out.exchanges[kSum].writes = {activation("y")};
  out.exchanges[kNorm].reads = out.exchanges[kNorm].writes = {parameter("norm")};
  const std::vector<Piece> pieces = whole_batch(shape.parts(), micro_batches);
  for (Table* table : {&out.first, &out.steady, &out.settle}) {
    std::vector<Piece> order;
    for (int b = 0; b < 3; ++b) order.push_back({Work::update, b, 0, 0});
    if (table->phase == Phase::first) order.clear();
    if (table->phase != Phase::settle) order.insert(order.end(), pieces.begin(), pieces.end());
    Weaver weaver(table->phase, shape, micro_batches, order);
    weaver.before(kFirstUpdate, wait_of(kTable, weaver.last()));
    weaver.before(kFirstUpdate, wait_of(kRest, weaver.last()));
    weaver.before(kFirstUpdate, start_of(kVerdict, weaver.last()));
    weaver.before(kFirstUpdate, wait_of(kVerdict, weaver.last()));
    weaver.after({Work::backward, 1, 0, micro_batches - 1}, start_inside(kRest));
    weaver.after({Work::backward, 0, 0, micro_batches - 1}, start_inside(kTable));
    if (table->phase == Phase::first) {
      weaver.at_begin(wait_of(kPlan, 0));
      weaver.at_begin(start_of(kNorm));
    } else if (table->phase == Phase::steady) {
      weaver.after(kLastUpdate, start_of(kNorm));
    }
    weaver.before(kAttention, announce_of(kSum));
    weaver.after(kAttention, start_of(kSum));
    weaver.before(kMlp, wait_of(kSum, 0));
    weaver.before(kHead, wait_of(kNorm, 0));
    *table = weaver.take();
  }
  return out;
}

std::vector<std::string> breaches_of(const Tables& tables, int micro_batches = 1, int verdict = kVerdict) {
  const ModelShape shape = tied_model();
  return verify_alone(
             {.tables = &tables, .shape = &shape, .micro_batches = micro_batches, .verdict = verdict})
      .breaches;
}

TEST(Verifier, LetsASoundTablePass) {
  for (const int micro_batches : {1, 2, 5})
    EXPECT_THAT(breaches_of(tables_of(tied_model(), micro_batches), micro_batches), IsEmpty());
}

std::size_t find(const Table& table, const Move& wanted) {
  const auto found = std::ranges::find(table.moves, wanted);
  EXPECT_NE(found, table.moves.end());
  return static_cast<std::size_t>(found - table.moves.begin());
}
void erase(Table& table, const Move& move) {
  table.moves.erase(table.moves.begin() + static_cast<std::ptrdiff_t>(find(table, move)));
}
void insert_before(Table& table, const Move& place, const Move& move) {
  table.moves.insert(table.moves.begin() + static_cast<std::ptrdiff_t>(find(table, place)), move);
}
void swap_moves(Table& table, const Move& a, const Move& b) {
  std::swap(table.moves[find(table, a)], table.moves[find(table, b)]);
}
void erase_all(Tables& tables, int exchange, std::optional<Move::Kind> kind = {}) {
  for (Table* table : {&tables.first, &tables.steady, &tables.settle}) {
    std::erase_if(table->moves, [&](const Move& m) {
      return m.kind != Move::Kind::compute && m.exchange == exchange && kind.value_or(m.kind) == m.kind;
    });
  }
}

struct Broken {
  const char* what;
  std::function<void(Tables&)> change;
  const char* sentence;
};

// One change each to a sound plan of two micro-batches, and the sentence that must come.
void expect_found(const std::vector<Broken>& all) {
  for (const Broken& broken : all) {
    Tables tables = tables_of(tied_model(), 2);
    broken.change(tables);
    EXPECT_THAT(breaches_of(tables, 2), Contains(HasSubstr(broken.sentence))) << broken.what;
  }
}

TEST(Verifier, FindsBrokenStartsAndWaits) {
  expect_found({
      {"no start", [](Tables& t) { erase(t.steady, start_inside(kTable)); }, "waits for ever"},
      {"started twice", [](Tables& t) { t.first.moves.push_back(start_of(kTable)); }, "is started twice"},
      {"started, though at installation", [](Tables& t) { t.first.moves.push_back(start_of(kPlan)); },
       "'plan' is started twice"},
      {"nobody waits", [](Tables& t) { erase(t.settle, wait_of(kRest, 0)); }, "nobody waits for 'the rest'"},
      {"nobody waits for what is there from the beginning",
       [](Tables& t) { erase(t.first, wait_of(kPlan, 0)); }, "nobody waits for 'plan'"},
      {"every wait has vanished", [](Tables& t) { erase_all(t, kSum, Move::Kind::wait); },
       "nobody waits for 'sum of y'"},
      {"every move has vanished", [](Tables& t) { erase_all(t, kVerdict); },
       "'verdict' is not started in step 0"},
      {"vanished from the first table alone",
       [](Tables& t) {
         erase(t.first, start_of(kNorm));
         erase(t.first, wait_of(kNorm, 0));
       },
       "'norm of rank 0' is not started in step 0"},
      {"vanished from the steady table alone",
       [](Tables& t) {
         erase(t.steady, start_of(kNorm));
         erase(t.steady, wait_of(kNorm, 0));
       },
       "'norm of rank 0' is not started in step 1"},
      {"awaited twice", [](Tables& t) { t.first.moves.push_back(wait_of(kSum, 0)); },
       "'sum of y' is awaited twice"},
      {"wrong step", [](Tables& t) { t.steady.moves[find(t.steady, wait_of(kRest, 1))].offset = 0; },
       "waits for ever for 'the rest' of offset 0"},
      {"announced, never started", [](Tables& t) { t.settle.moves.push_back(announce_of(kSum)); },
       "'sum of y' is announced and never started"},
      {"announced twice", [](Tables& t) { insert_before(t.first, start_of(kSum), announce_of(kSum)); },
       "'sum of y' is announced twice before it is started"},
      {"announced, started inside a piece",
       [](Tables& t) {
         for (Table* table : {&t.first, &t.steady}) table->moves[find(*table, start_of(kSum))].inside = true;
       },
       "'sum of y' is announced twice before it is started"},
      {"one slot for two", [](Tables& t) { t.exchanges[kSum].slot = t.exchanges[kPlan].slot; },
       "'plan' and 'sum of y' have the same slot of one group"},
      {"a group of nobody", [](Tables& t) { t.exchanges[kSum].group = 8; },
       "'sum of y' is of a group whose members nobody knows"},
      {"an exchange that is not there", [](Tables& t) { t.first.moves.push_back(start_of(9)); },
       "there is no exchange 9"},
  });
}

TEST(Verifier, FindsBrokenPieces) {
  expect_found({
      {"update left out", [](Tables& t) { erase(t.steady, compute_of(kLayerUpdate)); },
       "'attention' was updated 0 times in 1 steps"},
      {"updated twice", [](Tables& t) { t.settle.moves.push_back(compute_of(kLayerUpdate)); },
       "'attention' was updated 5 times in 4 steps"},
      {"forward before what it takes",
       [](Tables& t) { swap_moves(t.first, compute_of(kAttention), compute_of(kMlp)); },
       "forward mlp, micro-batch 0 takes 'y', which nobody has given yet"},
      {"forward before its update",
       [](Tables& t) { swap_moves(t.steady, compute_of(kLayerUpdate), compute_of(kAttention)); },
       "before its last update"},
      {"backward before a reader's",
       [](Tables& t) {
         swap_moves(t.first, compute_of({Work::backward, 0, 0, 1}), compute_of({Work::backward, 2, 0, 1}));
       },
       "backward embedding, micro-batch 1 comes before that of its reader 'head'"},
      {"backward before its forward",
       [](Tables& t) { swap_moves(t.first, compute_of(kHead), compute_of({Work::backward, 2, 0, 0})); },
       "backward head, micro-batch 0 comes before its forward"},
      {"update before any step", [](Tables& t) { t.first.moves.push_back(compute_of(kLastUpdate)); },
       "update head has no step to update with"},
      {"backward left out", [](Tables& t) { erase(t.first, compute_of({Work::backward, 2, 0, 0})); },
       "starts before the gradient of 'table' is complete"},
      {"forward left out, of one micro-batch",
       [](Tables& t) { erase(t.steady, compute_of({Work::forward, 1, 1, 1})); },
       "forward mlp, micro-batch 1 is not computed"},
      {"nothing is computed",
       [](Tables& t) {
         for (Table* table : {&t.first, &t.steady})
           std::erase_if(table->moves, [](const Move& m) {
             return m.kind == Move::Kind::compute && m.piece.work != Work::update;
           });
         for (Exchange& e : t.exchanges) e.reads.clear();
       },
       "backward embedding, micro-batch 0 is not computed"},
      {"computed twice", [](Tables& t) { t.first.moves.push_back(compute_of({Work::forward, 0, 0, 0})); },
       "forward embedding, micro-batch 0 is computed twice"},
      {"computed where nothing is trained", [](Tables& t) { t.settle.moves.push_back(compute_of(kHead)); },
       "forward head, micro-batch 0 is no work of a table that settles"},
      {"a piece that is not there",
       [](Tables& t) { t.first.moves.push_back(compute_of({Work::forward, 1, 2, 0})); },
       "the model has no part 2 of block 1"},
  });
}

TEST(Verifier, FindsAVerdictThatIsNotThere) {
  EXPECT_THAT(breaches_of(tables_of(tied_model(), 2), 2, 6), Contains(HasSubstr("there is no verdict")));
}

TEST(Verifier, FindsTensorsThatAreNotReady) {
  expect_found({
      {"update before its gradient",
       [](Tables& t) { swap_moves(t.steady, compute_of(kFirstUpdate), wait_of(kTable, 1)); },
       "update embedding comes before 'gradient of the table' has ended"},
      {"update before the verdict",
       [](Tables& t) { swap_moves(t.steady, compute_of(kFirstUpdate), wait_of(kVerdict, 1)); },
       "comes before the verdict"},
      {"start inside an earlier piece",
       [](Tables& t) { swap_moves(t.first, start_inside(kTable), compute_of({Work::backward, 0, 0, 1})); },
       "'gradient of the table' starts before the gradient of 'table' is complete"},
      {"a gradient of the next step",
       [](Tables& t) {
         Move ahead = start_inside(kTable);
         ahead.offset = -1;
         t.first.moves.push_back(ahead);
       },
       "'gradient of the table' starts before the gradient of 'table' is complete"},
      {"a gradient that the next step has added to",
       [](Tables& t) {
         t.exchanges[kVerdict].reads = {gradient("norm")};
         for (const Move& move : {start_of(kVerdict, 1), wait_of(kVerdict, 1)}) {
           erase(t.steady, move);
           t.steady.moves.push_back(move);
         }
       },
       "'verdict' starts after the gradient of 'norm' has become that of another step"},
      {"a gradient that nobody sums", [](Tables& t) { t.exchanges[kTable].writes.clear(); },
       "no exchange writes the gradient of 'table'"},
      {"a gradient that is summed twice",
       [](Tables& t) { t.exchanges[kVerdict].writes = {gradient("table")}; },
       "'gradient of the table' and 'verdict' both write the gradient of 'table'"},
      {"an activation before it was computed",
       [](Tables& t) { swap_moves(t.first, start_of(kSum), compute_of(kAttention)); },
       "'sum of y' starts before 'y' was computed"},
      {"an activation before its exchange has ended",
       [](Tables& t) { swap_moves(t.first, wait_of(kSum, 0), compute_of(kMlp)); },
       "forward mlp, micro-batch 0 takes 'y', which nobody has given yet"},
      {"a parameter that is written while it is used",
       [](Tables& t) { swap_moves(t.first, wait_of(kNorm, 0), compute_of(kHead)); },
       "forward head, micro-batch 0 reads 'norm' while 'norm of rank 0' is under way"},
      {"a parameter that is written while it is updated",
       [](Tables& t) { swap_moves(t.steady, start_of(kNorm), compute_of(kLastUpdate)); },
       "update head writes 'norm' while 'norm of rank 0' is under way"},
      {"a parameter that is read while it is updated",
       [](Tables& t) {
         t.exchanges[kNorm].writes.clear();
         swap_moves(t.steady, start_of(kNorm), compute_of(kLastUpdate));
       },
       "update head writes 'norm' while 'norm of rank 0' is under way"},
      {"two exchanges that write a parameter",
       [](Tables& t) {
         t.exchanges[kSum].reads.clear();
         t.exchanges[kSum].writes = {parameter("norm")};
       },
       "'sum of y' writes 'norm' while 'norm of rank 0' is under way"},
      {"a parameter that is not there", [](Tables& t) { t.exchanges[kNorm].reads = {parameter("nonsense")}; },
       "'norm of rank 0' exchanges 'nonsense' of micro-batch 0, which the model does not have"},
      {"a micro-batch that is not there", [](Tables& t) { t.exchanges[kSum].reads[0].micro_batch = 2; },
       "exchanges 'y' of micro-batch 2, which the model does not have"},
  });
}

// What several exchanges may do at the same time, and a rank that has nobody to exchange gradients with.
TEST(Verifier, RefusesNothingThatHolds) {
  Tables two_readers = tables_of(tied_model(), 2);
  for (const int e : {kNorm, kSum}) {
    two_readers.exchanges[static_cast<std::size_t>(e)].reads = {parameter("norm")};
    two_readers.exchanges[static_cast<std::size_t>(e)].writes.clear();
  }
  EXPECT_THAT(breaches_of(two_readers, 2), IsEmpty());
  Tables alone = tables_of(tied_model(), 2);
  alone.exchanges[kTable].writes.clear();
  alone.groups[1] = {0};
  EXPECT_THAT(breaches_of(alone, 2), IsEmpty());
  Tables of_the_last = tables_of(tied_model(), 2);
  of_the_last.exchanges[kVerdict].reads = {gradient("norm")};
  EXPECT_THAT(breaches_of(of_the_last, 2), IsEmpty());
  // One that is only started ahead is not there in the first step.
  Tables ahead = tables_of(tied_model(), 2);
  ahead.exchanges.push_back({.name = "ahead", .group = 1, .slot = 9});
  for (Table* table : {&ahead.first, &ahead.steady}) table->moves.push_back(start_of(6, -1));
  ahead.steady.moves.insert(ahead.steady.moves.begin(), wait_of(6, 0));
  ahead.settle.moves.push_back(wait_of(6, -1));
  EXPECT_THAT(breaches_of(ahead, 2), IsEmpty());
  erase(ahead.steady, start_of(6, -1));
  EXPECT_THAT(breaches_of(ahead, 2), Contains(HasSubstr("waits for ever for 'ahead'")));
}

enum PairNumber : int { kForth, kGradients, kBack };  // exchanges

// Two ranks, stages of a pipeline: rank 0 gives x, which rank 1 takes; the gradient of x comes back. So that
// they have a collective, too, they sum the gradients of their weights.
struct Pair {
  std::vector<ModelShape> shapes{2};
  std::vector<Tables> tables{2};

  Pair() {
    for (int r = 0; r < 2; ++r) {
      ModelShape& shape = shapes[static_cast<std::size_t>(r)];
      shape = chain_shape("pair", {{"stage", {{"weight", {4}}}}});
      if (r == 0) shape.blocks[0].parts[0].gives = {"x"};
      if (r == 1) shape.blocks[0].parts[0].takes = {"x"};
      Tables& t = tables[static_cast<std::size_t>(r)];
      const auto transfer = [&](bool sends, std::uint32_t slot) {
        return Exchange{.name = sends ? "send" : "receive",
                        .kind = sends ? Exchange::Kind::send : Exchange::Kind::receive,
                        .traffic = TrafficClass::blocking,
                        .group = 7,
                        .slot = slot,
                        .peer = 1 - r,
                        .codec = "low-rank"};
      };
      t.groups = {{1, {0, 1}}, {7, {0, 1}}};
      t.exchanges = {transfer(r == 0, 4), {.name = "gradients", .group = 1, .slot = 1}, transfer(r == 1, 5)};
      t.exchanges[kGradients].reads = t.exchanges[kGradients].writes = {gradient("weight")};
      (r == 0 ? t.exchanges[kForth].reads : t.exchanges[kForth].writes).push_back(activation("x"));
      (r == 1 ? t.exchanges[kBack].reads : t.exchanges[kBack].writes).push_back(gradient("x"));
      for (Table* table : {&t.first, &t.steady, &t.settle}) weave(*table, shape, r);
    }
  }
  static constexpr Piece kForward{Work::forward, 0, 0, 0}, kBackward{Work::backward, 0, 0, 0};
  static void weave(Table& table, const ModelShape& shape, int rank) {
    std::vector<Piece> order;
    if (table.phase != Phase::first) order.push_back({Work::update, 0, 0, 0});
    if (table.phase != Phase::settle) order.insert(order.end(), {kForward, kBackward});
    Weaver weaver(table.phase, shape, 1, order);
    if (rank == 0) {
      weaver.after(kForward, start_of(kForth));
      weaver.before(kBackward, start_of(kBack));
      weaver.before(kBackward, wait_of(kBack, 0));
      weaver.after(kBackward, wait_of(kForth, 0));
    } else {
      weaver.before(kForward, start_of(kForth));
      weaver.before(kForward, wait_of(kForth, 0));
      weaver.after(kBackward, start_of(kBack));
      weaver.after(kBackward, wait_of(kBack, 0));
    }
    weaver.after(kBackward, start_inside(kGradients));
    weaver.before({Work::update, 0, 0, 0}, wait_of(kGradients, weaver.last()));
    table = weaver.take();
  }
  Verification verified() const {
    std::vector<VerifiedRank> ranks;
    for (std::size_t r = 0; r < 2; ++r) ranks.push_back({.tables = &tables[r], .shape = &shapes[r]});
    return verify(ranks);
  }
  std::vector<std::string> breaches() const { return verified().breaches; }
  // In both tables of a step, of one rank.
  void change(int rank, const std::function<void(Table&)>& how) {
    how(tables[static_cast<std::size_t>(rank)].first);
    how(tables[static_cast<std::size_t>(rank)].steady);
  }
};

TEST(Verifier, LetsASoundPipelinePass) {
  EXPECT_THAT(Pair().breaches(), IsEmpty());
  EXPECT_EQ(Pair().verified().distinct, 2);
  Pair late;  // awaited when it was needed
  late.change(1, [](Table& t) { swap_moves(t, wait_of(kForth, 0), compute_of(Pair::kForward)); });
  EXPECT_THAT(late.breaches(), Contains(HasSubstr("takes 'x', which nobody has given yet")));
  Pair no_gradient;
  no_gradient.change(0, [](Table& t) { swap_moves(t, wait_of(kBack, 0), compute_of(Pair::kBackward)); });
  EXPECT_THAT(no_gradient.breaches(), Contains(HasSubstr("backward stage comes before 'receive' has ended")));
  Pair early;
  early.change(1, [](Table& t) { swap_moves(t, start_of(kBack), compute_of(Pair::kBackward)); });
  EXPECT_THAT(early.breaches(), Contains(HasSubstr("'send' starts before the gradient of 'x' was computed")));
  Pair too_early;
  too_early.change(0, [](Table& t) { swap_moves(t, start_of(kForth), compute_of(Pair::kForward)); });
  EXPECT_THAT(too_early.breaches(), Contains(HasSubstr("'send' starts before 'x' was computed")));
}

TEST(Verifier, EverySendHasItsReceiveWithTheSameCodec) {
  Pair other_codec;
  other_codec.tables[1].exchanges[kForth].codec = "bf16";
  EXPECT_THAT(other_codec.breaches(),
              Contains(HasSubstr("'send' has the codec 'low-rank', and 'bf16' on rank 1")));
  Pair other_slot;
  other_slot.tables[1].exchanges[kForth].slot = 6;
  EXPECT_THAT(other_slot.breaches(), Contains(HasSubstr("'send' has no receive on rank 1")));
  Pair two_sends;
  two_sends.tables[1].exchanges[kForth].kind = Exchange::Kind::send;
  EXPECT_THAT(two_sends.breaches(), Contains(HasSubstr("has no receive")));
  Pair to_itself;
  to_itself.tables[0].exchanges[kForth].peer = 0;
  EXPECT_THAT(to_itself.breaches(), Contains(HasSubstr("'send' has no receive on rank 0")));
  Pair outside;
  outside.tables[0].exchanges[kForth].peer = 2;
  EXPECT_THAT(outside.breaches(), Contains(HasSubstr("has a peer, 2, that is not in its group")));
}

TEST(Verifier, EveryMemberHasTheCollective) {
  Pair lacking;
  erase_all(lacking.tables[1], kGradients);
  lacking.tables[1].exchanges[kGradients] = {.name = "local", .group = 9, .slot = 1, .at_installation = true};
  lacking.tables[1].groups[9] = {1};
  lacking.tables[1].first.moves.push_back(wait_of(kGradients, 0));
  EXPECT_THAT(lacking.breaches(), Contains(HasSubstr("'gradients' is no collective of rank 1")));
  Pair other_class;
  other_class.tables[1].exchanges[kGradients].traffic = TrafficClass::delayed;
  EXPECT_THAT(other_class.breaches(), Contains(HasSubstr("'gradients' is of another class on rank 1")));
  Pair other_members;
  other_members.tables[1].groups[1] = {1};
  EXPECT_THAT(other_members.breaches(), Contains(HasSubstr("'gradients' has other members on rank 1")));
  Pair stranger;
  for (Tables& t : stranger.tables) t.groups[1] = {1};
  EXPECT_THAT(stranger.breaches(), Contains(HasSubstr("'gradients' is of a group without rank 0")));
  Pair nobody;
  for (Tables& t : nobody.tables) t.groups[1] = {0, 1, 2};
  EXPECT_THAT(nobody.breaches(),
              Contains(HasSubstr("'gradients' is of a group with rank 2, which does not exist")));
  Pair one_slot;
  for (Tables& t : one_slot.tables) t.exchanges.push_back({.name = "other", .group = 1, .slot = 1});
  for (int r = 0; r < 2; ++r) {
    one_slot.change(r, [](Table& t) {
      t.moves.push_back(start_of(3));
      t.moves.push_back(wait_of(3, 0));
    });
  }
  EXPECT_THAT(one_slot.breaches(),
              Contains(HasSubstr("rank 1, table 'first': 'gradients' and 'other' have the same slot")));
  for (Tables& t : one_slot.tables) t.exchanges.back().slot = 2;
  EXPECT_THAT(one_slot.breaches(), IsEmpty());
}

// A job of many equal ranks is one walk; one that differs is found among them.
TEST(Verifier, EqualRanksAreWalkedOnce) {
  const ModelShape shape = tied_model();
  Tables all = tables_of(shape, 1);
  all.groups[1].clear();
  for (int r = 0; r < 1000; ++r) all.groups[1].push_back(r);
  const Tables equal = all;
  std::vector<VerifiedRank> ranks(1000, {.tables = &all, .shape = &shape, .verdict = kVerdict});
  ranks[500].tables = &equal;
  EXPECT_THAT(verify(ranks).breaches, IsEmpty());
  EXPECT_EQ(verify(ranks).distinct, 1);
  Tables other = all;
  erase(other.steady, start_inside(kRest));
  insert_before(other.steady, wait_of(kRest, 1), start_inside(kRest));
  ranks[700].tables = &other;
  EXPECT_EQ(verify(ranks).distinct, 2);
  EXPECT_THAT(verify(ranks).breaches,
              Contains(HasSubstr("rank 700, table 'steady': 'the rest' starts before")));
}

TEST(Verifier, FindsRanksThatWaitForEachOther) {
  // Both wait for the other's part of the collective before they start their own.
  Pair circle;
  for (int r = 0; r < 2; ++r) {
    circle.tables[static_cast<std::size_t>(r)].exchanges.push_back({.name = "second", .group = 1, .slot = 9});
    circle.change(r, [r](Table& table) {
      table.moves.insert(table.moves.begin(), r == 0 ? wait_of(kGradients, 0) : start_of(3));
      table.moves.push_back(r == 0 ? start_of(3) : wait_of(3, 0));
    });
  }
  EXPECT_THAT(circle.breaches(), Contains(HasSubstr("waits for ever")));
}

// A send may end only when its receive is posted: nobody awaits one before.
TEST(Verifier, FindsSendsThatWaitForEachOther) {
  const auto swaps = [](const std::vector<Move>& moves) {
    Pair pair;
    for (int r = 0; r < 2; ++r) {
      for (const bool sends : {true, false}) {
        pair.tables[static_cast<std::size_t>(r)].exchanges.push_back(
            {.name = sends ? "mine" : "theirs",
             .kind = sends ? Exchange::Kind::send : Exchange::Kind::receive,
             .traffic = TrafficClass::blocking,
             .group = 7,
             .slot = sends == (r == 0) ? 8U : 9U,
             .peer = 1 - r});
      }
      pair.change(r, [&](Table& t) { t.moves.insert(t.moves.end(), moves.begin(), moves.end()); });
    }
    return pair.breaches();
  };
  EXPECT_THAT(swaps({start_of(3), start_of(4), wait_of(3, 0), wait_of(4, 0)}), IsEmpty());
  EXPECT_THAT(swaps({start_of(3), wait_of(3, 0), start_of(4), wait_of(4, 0)}),
              Contains(HasSubstr("waits for ever for 'mine' of offset 0")));
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
                 const std::function<void(Piece, double)>& inside = {}, bool between_parts = false) {
  const auto now = [&at] { return from_seconds(at); };
  clock.begin(table);
  for (const Move& move : table.moves) {
    if (move.kind == Move::Kind::compute) {
      clock.computing(now());
      if (inside) inside(move.piece, at);
      at += takes(move.piece);
      clock.computed(move.piece, now());
    } else if (move.kind == Move::Kind::wait) {
      clock.waited(between_parts, now(), from_seconds(at + 10));
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

// What is waited for between parts is told apart by where it happens; what is waited for else is not.
TEST(StepTimes, WaitsBetweenPartsAreForwardOrBackward) {
  const ModelShape shape = tied_model();
  StepClock clock(shape);
  double at = 0;
  Table table{.phase = Phase::first, .moves = {}};
  for (const Work work : {Work::forward, Work::backward}) {
    table.moves.push_back(compute_of({work, 0, 0, 0}));
    table.moves.push_back(wait_of(0, 0));
  }
  table.moves.push_back(wait_of(0, 0));
  const auto takes = [](Piece) { return 1.0; };
  const StepTimes times = walked(clock, table, at, takes, {}, true);
  EXPECT_DOUBLE_EQ(times.waited_forward, 10);
  EXPECT_DOUBLE_EQ(times.waited_backward, 20);
  EXPECT_DOUBLE_EQ(times.waited, 30);
  const StepTimes others = walked(clock, table, at, takes);
  EXPECT_DOUBLE_EQ(others.waited_forward + others.waited_backward, 0);
  EXPECT_DOUBLE_EQ(others.waited, 30);
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
