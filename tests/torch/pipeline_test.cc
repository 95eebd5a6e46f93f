// Training with stages against one process with torch alone: every mesh and schedule, in float64; what is tied
// between stages; compressed gradients between them; evaluation; state that moves to other meshes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>

#include "reference/kept_messages.h"
#include "torch/mesh_toy.h"
#include "weft/error.h"

namespace weft {
namespace {

using namespace mesh_test;

TEST(Stages, EveryMeshEqualsOneProcess) {
  Grid grid;
  for (int stages = 1; stages <= 8; ++stages) {
    for (int dp = 1; dp * stages <= 8; ++dp) {
      for (const std::string schedule : {"gpipe", "1f1b", "interleaved", "zb-h1"}) {
        for (const int micro_batches : {1, 2, 3, 4, 5, 8, 16}) {
          const bool interleaved = schedule == "interleaved";
          if (interleaved && micro_batches % stages != 0) continue;
          grid.add(schedule + std::to_string(stages),
                   with({.stage = {.stages = stages,
                                   .schedule = schedule,
                                   .chunks = interleaved && stages > 1 ? 2 : 1,
                                   .double_warmup = micro_batches == 5 && schedule == "1f1b"},
                         .dp = dp,
                         .micro_batches = micro_batches,
                         .layers = interleaved ? std::max(9, 2 * stages) : 9,
                         .steps = 3}));
        }
      }
    }
  }
  for (const Staged& t : grid.taken(25))
    EXPECT_LT(distance(together(t), alone(t)), kSame) << title(t) << ", seed " << Grid::seed();
}

TEST(Stages, WhatCouldBeWrongIsSeen) {
  const Staged t = with({.dp = 2});
  const Result right = together(t);
  EXPECT_LT(distance(right, alone(t)), kSame);
  EXPECT_GT(distance(right, alone(t, Wrong::loss_of_each)), 1e-6);
  EXPECT_GT(distance(right, alone(t, Wrong::twice_tied)),
            1e-6);  // a tied gradient divided by both stages' ranks
}

TEST(Stages, ClippingLookaheadAndOtherModels) {
  Staged t = with({.dp = 2, .clip_norm = 0.05});
  EXPECT_LT(distance(together(t), alone(t)), kSame) << "clipping";
  t.clip_norm = 0;
  t.lookahead = false;
  EXPECT_LT(distance(together(t), alone(t)), kSame) << "without lookahead";
  Staged bert = with({.model = "bert", .stage = {.stages = 3}, .dp = 2});
  EXPECT_LT(distance(together(bert), alone(bert)), kSame) << "bert";
  Staged given = with({.stage = {.stages = 3, .layers = {1, 2, 1}}});
  EXPECT_LT(distance(together(given), alone(given)), kSame) << "layers by hand";
  for (const char* optimizer : {"sgd", "adamw", "adagrad"}) {
    Staged other = with({.optimizer = default_options(optimizer)});
    EXPECT_LT(distance(together(other), alone(other)), kSame) << optimizer;
  }
}

// What is not trained stays what it was, whole or in halves, a weight alone or with its bias.
TEST(Stages, FrozenParametersAreLeftAlone) {
  for (const int stages : {1, 2}) {
    for (const char* schedule : {"1f1b", "zb-h1"}) {
      for (const char* frozen : {".mlp.up.weight", ".mlp.up", ".attention.projection.bias"}) {
        Staged t = with({.stage = {.stages = stages, .schedule = schedule}, .dp = 2, .steps = 2});
        const Result trained = alone(t);
        t.frozen = frozen;
        const Result expected = alone(t);
        EXPECT_LT(distance(together(t), expected), kSame) << title(t) << ", frozen: " << frozen;
        EXPECT_GT(distance(trained, expected), 1e-6) << "control: it is trained otherwise, " << frozen;
      }
    }
  }
}

// Computed again, from what was kept: the same bits, with dropout on, whole and in halves.
TEST(Stages, RecomputationChangesNoBit) {
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    Staged t = with({.stage = {.stages = 2, .schedule = schedule}, .dp = 2, .type = torch::kFloat32});
    const Result kept = together(t);
    t.recompute = true;
    const Result again = together(t);
    EXPECT_EQ(again.losses, kept.losses);
    for (const auto& [name, value] : kept.parameters)
      EXPECT_TRUE(torch::equal(again.parameters.at(name), value)) << schedule << " " << name;
  }
}

// What arrived is let go by model and strategy where the table says: the most that is kept is the table's, however many
// micro-batches there are, and behind a step nothing is left.
TEST(Stages, KeepMessagesAsLongAsTheyAreRead) {
  constexpr std::int64_t kMessage = kLength * 12 * 4;  // of one sequence
  struct Case {
    StageOptions stage;
    bool grows = false;
    bool recompute = false;
  };
  for (const Case& c :
       {Case{{.stages = 4, .schedule = "gpipe"}, true}, Case{{.stages = 4}}, Case{{.stages = 4}, false, true},
        Case{{.stages = 4, .double_warmup = true}}, Case{{.stages = 4, .schedule = "zb-h1"}},
        Case{{.stages = 4, .schedule = "interleaved", .chunks = 2}}}) {
    std::vector<std::vector<std::int64_t>> kept;  // of every number of micro-batches, of each stage
    for (const int micro_batches : {16, 32}) {
      const Staged t = with({.stage = c.stage,
                             .micro_batches = micro_batches,
                             .layers = 9,
                             .sequences = micro_batches,
                             .type = torch::kFloat32,
                             .recompute = c.recompute});
      std::vector<std::int64_t>& mine = kept.emplace_back(4);
      run_ranks(4, [&](World& world) {
        at::set_num_threads(1);
        const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
        Replica replica(world.engine(), world.comm(), *model, options_of(t));
        walk(t, replica, 0, 0, 2);
        const MessageMemory& memory = replica.job().pipeline()->kept();
        mine[static_cast<std::size_t>(world.rank())] = static_cast<std::int64_t>(memory.peak_bytes());
        const PipelineShape shape = pipeline_shape(t.stage, micro_batches);
        EXPECT_EQ(memory.peak_bytes(), reference::most_kept(shape, world.rank()) * kMessage) << title(t);
        EXPECT_EQ(memory.live_bytes(), 0) << title(t);
        EXPECT_EQ(replica.job().pipeline()->on_the_way().live_bytes(), 0) << title(t);
      });
    }
    EXPECT_EQ(kept[1][3] - kept[0][3], c.grows ? 16 * kMessage : 0) << c.stage.schedule;
  }
}

// Factors of all columns are the gradient: what is left behind is rounding. Fewer are not, and what they leave
// behind is not lost.
TEST(Stages, GradientsTravelAsFactors) {
  Staged t = with({.stage = {.stages = 3}, .dp = 2, .micro_batches = 5, .steps = 6, .type = torch::kFloat32});
  const Result exact = together(t);
  Staged narrow = t;
  narrow.backward = {.columns = 1};
  Staged forgets = narrow;
  forgets.backward.lazy_error = false;
  Staged all = narrow;
  all.backward.messages = "all";
  const Result some = together(narrow);
  EXPECT_GT(distance(some, exact), 1e-4);
  EXPECT_LT(std::abs(some.losses.back() - exact.losses.back()), 0.02 * exact.losses.back());
  EXPECT_GT(distance(together(all), some), 1e-4);
  EXPECT_GT(distance(together(forgets), some), 1e-5);
  // The same again has the same bits.
  const Result again = together(narrow);
  for (const auto& [name, value] : some.parameters)
    EXPECT_TRUE(torch::equal(again.parameters.at(name), value)) << name;
  Staged wide = t;
  wide.type = torch::kFloat64;
  wide.backward.columns = 2;
  EXPECT_THROW(together(wide), UsageError);
}

// Eight bits are nearer to what they stand for than four, and those nearer than none; on tensor-parallel ranks all have the
// same (together() compares them). Where a token's values are no longer than their scale, they travel as they are.
TEST(Stages, GradientsTravelAsWholeNumbers) {
  for (const int tp : {1, 2}) {
    Staged t = with({.stage = {.stages = 3},
                     .dp = 2 / tp,
                     .micro_batches = 5,
                     .steps = 6,
                     .type = torch::kFloat32,
                     .tp = tp});
    const Result exact = together(t);
    t.backward = {.bits = 8, .messages = "all"};
    const double eight = distance(together(t), exact);
    t.backward.bits = 4;
    const Result some = together(t);
    EXPECT_GT(eight, 1e-6);
    EXPECT_GT(distance(some, exact), 2 * eight);
    EXPECT_LT(std::abs(some.losses.back() - exact.losses.back()), 0.01 * exact.losses.back());
    const Result again = together(t);
    for (const auto& [name, value] : some.parameters)
      EXPECT_TRUE(torch::equal(again.parameters.at(name), value)) << name;
    t.backward.lazy_error = false;
    EXPECT_GT(distance(together(t), some), 1e-6);
  }
}

// What passes between stages as bfloat16: near what it is in float32, with factors and without, and the same bits on
// tensor-parallel ranks (together() compares what several have).
TEST(Stages, TrainAsWellInBfloat16) {
  Staged t = with({.stage = {.stages = 3}, .dp = 2, .micro_batches = 5, .steps = 6, .type = torch::kFloat32});
  for (const int columns : {0, 1}) {
    t.backward.columns = columns;
    for (const int tp : {1, 2}) {
      t.tp = tp;
      t.dp = 2 / tp;
      t.stage.bf16 = false;
      const Result exact = together(t);
      t.stage.bf16 = true;
      const Result rounded = together(t);
      const double apart = distance(rounded, exact);
      EXPECT_GT(apart, 1e-6) << title(t);
      EXPECT_LT(apart, 0.1) << title(t);
      EXPECT_LT(std::abs(rounded.losses.back() - exact.losses.back()), 0.01 * exact.losses.back())
          << title(t);
    }
  }
  // A run that goes on has the bits of one that did not stop.
  t.backward = {.columns = 2};
  const Named straight = together(t).parameters;
  Saved saved;
  train_and_save(t, 3, saved);
  const Named resumed = load_and_train(t, saved, 3, t.steps);
  for (const auto& [name, value] : straight) EXPECT_TRUE(torch::equal(resumed.at(name), value)) << name;
  Staged wide = with({});
  wide.stage.bf16 = true;
  try {
    together(wide);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "pipeline: what is rounded to bfloat16 between stages is float32, not float64");
  }
}

// Sums of gradients in bfloat16, of all parameters: those of one stage, the tied table, what tensor-parallel ranks have
// copies of. Or, beside a scheme that compresses, of what stays dense.
TEST(Stages, SumsCanBeRounded) {
  for (const int tp : {1, 2}) {
    Staged t = with({.stage = {.stages = 2}, .dp = 2, .type = torch::kFloat32, .tp = tp});
    const Result exact = together(t);
    t.scheme = "dense-bf16";
    t.stage.bf16 = true;
    const Result rounded = together(t);
    EXPECT_GT(distance(rounded, exact), 1e-6);
    EXPECT_LT(distance(rounded, exact), 0.1);
    t.scheme = "powersgd";
    t.stage.bf16 = false;
    const Result factors = together(t);
    t.stage.bf16_sums = true;
    EXPECT_GT(distance(together(t), factors), 1e-6);
    EXPECT_LT(std::abs(together(t).losses.back() - factors.losses.back()), 0.02 * factors.losses.back());
  }
}

// A codec whose factors would be no shorter is one that is off, to the bit.
TEST(Stages, ACodecThatCompressesNothingIsNone) {
  Staged t = with({.stage = {.stages = 3}, .dp = 2, .type = torch::kFloat32});
  const Result off = together(t);
  t.backward = {.columns = 12, .messages = "all"};  // as many as the model is wide
  const Result identity = together(t);
  EXPECT_EQ(identity.losses, off.losses);
  for (const auto& [name, value] : off.parameters)
    EXPECT_TRUE(torch::equal(identity.parameters.at(name), value)) << name;
}

using CodecStates = std::map<int, StageCodec::State>;
CodecStates states_of(Replica& replica) {
  CodecStates out;
  Pipeline& pipeline = *replica.job().pipeline();
  for (const ChunkShape& chunk : pipeline.chunks()) {
    if (const StageCodec* const codec = pipeline.codec(chunk.number)) out[chunk.number] = codec->state();
  }
  return out;
}

TEST(Stages, AnEvaluationLeavesErrorsAlone) {
  Staged t = with({.stage = {.stages = 3}, .dp = 1, .type = torch::kFloat32});
  t.backward = {.columns = 1, .messages = "all"};
  run_ranks(t.ranks(), [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({});
    const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
    Replica replica(world.engine(), world.comm(), *model, options_of(t));
    walk(t, replica, 0, 0, 2);
    const CodecStates before = states_of(replica);
    const Batch batch = batch_of(t, 99);
    replica.evaluate({&batch, 1});
    const CodecStates behind = states_of(replica);
    ASSERT_EQ(before.size(), world.rank() == 0 ? 0U : 1U);
    for (const auto& [chunk, state] : before) {
      EXPECT_FALSE(state.error.empty());
      EXPECT_EQ(behind.at(chunk).error, state.error);
      EXPECT_EQ(behind.at(chunk).factor, state.factor);
      EXPECT_EQ(behind.at(chunk).messages, state.messages);
      const StageCodec::State& working = replica.job().pipeline()->codec(chunk)->working();
      EXPECT_TRUE(working.error == state.error && working.factor == state.factor &&
                  working.messages == state.messages);
    }
  });
}

// What messages left behind: where the loss counts otherwise it is rescaled; where stages, tensor-parallel ranks or
// tokens are others it is dropped, and one line says so.
TEST(Stages, StateOfAnotherLayoutIsDroppedInOneLine) {
  Staged t =
      with({.stage = {.stages = 3}, .dp = 2, .micro_batches = 4, .sequences = 16, .type = torch::kFloat32});
  t.backward = {.columns = 1, .messages = "all"};
  Saved saved;
  train_and_save(t, 2, saved);
  struct Case {
    Staged to;
    std::string dropped;  // behind what all lines have; "": kept
    bool said_later = false;
  };
  const auto changed = [&](auto change) {
    Staged out = t;
    change(out);
    return out;
  };
  const std::vector<Case> cases{
      {t, ""},
      {changed([](Staged& o) { o.micro_batches = 8, o.sequences = 32; }),
       ""},                                                          // half the weight, as many tokens
      {changed([](Staged& o) { o.stage.layers = {2, 1, 1}; }), ""},  // which is where they are anyway
      {changed([](Staged& o) { o.stage.layers = {1, 2, 1}; }),
       "it is of stages pp=3,tp=1 over 2 ranks each, here pp=3,tp=1,layers=1.2.1 over 2 ranks"},
      {changed([](Staged& o) { o.micro_batches = 2; }), "its messages had another number of tokens", true},
      {changed([](Staged& o) { o.micro_batches = 8, o.tokens = kLength; }),
       "its messages had another number of tokens", true},
      {changed([](Staged& o) { o.stage.stages = 2; }),
       "it is of stages pp=3,tp=1 over 2 ranks each, here pp=2,tp=1 over 2 ranks"},
      {changed([](Staged& o) { o.dp = 1, o.tp = 2; }),
       "it is of stages pp=3,tp=1 over 2 ranks each, here pp=3,tp=2 over 2 ranks"},
      {changed([](Staged& o) { o.dp = 1; }),
       "it is of stages pp=3,tp=1 over 2 ranks each, here pp=3,tp=1 over 1 rank"},
      {changed([](Staged& o) { o.backward.columns = 0; }), "no gradient between stages is compressed here"}};
  for (const Case& c : cases) {
    const std::string begins = "what compressed gradients between stages had left behind is dropped: ";
    ::testing::internal::CaptureStderr();
    run_ranks(c.to.ranks(), [&](World& world) {
      at::set_num_threads(1);
      world.plan_by({});
      const std::unique_ptr<Model> model = model_of(c.to, world.rank(), world.size());
      Replica replica(world.engine(), world.comm(), *model, options_of(c.to));
      const bool same = c.to.ranks() == t.ranks();
      LoadOptions load{.owners = {"pipeline"}, .elsewhere = [](const StateKey&) { return true; }};
      if (c.to.backward.compresses())
        replica.registry().load(saved.snapshots, world.rank(), world.size(), load);
      const SnapshotSource source(saved.snapshots, 0, t.ranks());
      EXPECT_EQ(replica.job().left_out(source), c.said_later || c.dropped.empty() ? "" : begins + c.dropped);
      for (const auto& [chunk, state] : states_of(replica))
        EXPECT_EQ(state.error.empty(), !c.dropped.empty() && !c.said_later) << chunk << same;
      const CodecStates loaded = states_of(replica);
      replica.step(share_of(c.to, 2, replica.job().mesh().coordinates(world.rank()).dp),
                   {.seed = kSeed, .step = 2}, nullptr);
      replica.settle();
      for (const auto& [chunk, state] : states_of(replica)) {
        const std::int64_t tokens = c.to.sequences * kLength / c.to.dp / c.to.micro_batches / c.to.tp;
        EXPECT_EQ(static_cast<std::int64_t>(state.error.size()), tokens * 12) << c.dropped;
        const double twice = loaded.at(chunk).scale / state.scale;
        if (c.to.sequences == 2 * t.sequences) {
          EXPECT_NEAR(twice, 2, 0.2);
        }
      }
    });
    const std::string said = ::testing::internal::GetCapturedStderr();
    const std::size_t first = said.find(begins + c.dropped);
    EXPECT_EQ(first != std::string::npos, c.said_later) << said;
    if (c.said_later) {
      EXPECT_EQ(said.find(begins, first + 1), std::string::npos) << said;
    }
  }
}

// Of a link whose messages leave nothing behind any more nothing is kept that a later run would send.
TEST(Stages, WhatIsForgottenIsNotSaved) {
  Staged t = with({.stage = {.stages = 2}, .type = torch::kFloat32});
  t.backward = {.columns = 1, .messages = "all"};
  Saved saved;
  train_and_save(t, 2, saved);
  for (const bool lazy : {true, false}) {
    t.backward.lazy_error = lazy;
    run_ranks(2, [&](World& world) {
      at::set_num_threads(1);
      world.plan_by({});
      const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
      Replica replica(world.engine(), world.comm(), *model, options_of(t));
      replica.registry().load(saved.snapshots, world.rank(), world.size(),
                              {.owners = {"pipeline"}, .elsewhere = {}});
      walk(t, replica, 0, 2, 3);
      for (const auto& [chunk, state] : states_of(replica)) EXPECT_EQ(state.error.empty(), !lazy);
    });
  }
}

// What a file says of a link is looked at before anything takes it.
TEST(Stages, StateThatCannotBeIsRefused) {
  Staged t = with({.stage = {.stages = 2}, .type = torch::kFloat32});
  t.backward = {.columns = 1, .messages = "all"};
  Saved saved;
  train_and_save(t, 2, saved);
  const auto load = [&](const std::vector<StateSnapshot>& snapshots) {
    std::string said;
    run_ranks(2, [&](World& world) {
      at::set_num_threads(1);
      world.plan_by({});
      const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
      Replica replica(world.engine(), world.comm(), *model, options_of(t));
      try {
        replica.registry().load(snapshots, world.rank(), world.size(),
                                {.owners = {"pipeline"}, .elsewhere = {}});
      } catch (const UsageError& error) {
        if (world.rank() == 1) said = error.what();
      }
    });
    return said;
  };
  EXPECT_EQ(load(saved.snapshots), "") << "control";
  const auto with_values = [&](std::string_view kind, std::vector<std::byte> bytes, std::int64_t count) {
    std::vector<StateSnapshot> out = saved.snapshots;
    int changed = 0;
    for (StateSnapshot& of_rank : out) {
      for (auto& row : of_rank.rows) {
        if (row.row.key.owner != "pipeline" || row.row.key.kind != kind) continue;
        row.row.shard = Shard::whole({count});
        row.bytes = bytes;
        ++changed;
      }
    }
    EXPECT_EQ(changed, 1);
    return out;
  };
  const auto bytes_of = [](auto... values) {
    const std::array all{values...};
    const auto bytes = std::as_bytes(std::span(all));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  const char* const says = "that no link of this width leaves behind";
  EXPECT_NE(load(with_values("scale", bytes_of(1.0, -1.0), 2)).find(says), std::string::npos);
  EXPECT_NE(load(with_values("scale", bytes_of(1.0, 1e300), 2)).find(says), std::string::npos);
  EXPECT_NE(load(with_values("scale", bytes_of(1.0), 1)).find(says), std::string::npos);
  EXPECT_NE(load(with_values("error", bytes_of(1.0F, 2.0F, 3.0F), 3)).find(says), std::string::npos);
  EXPECT_NE(load(with_values("factor", bytes_of(1.0F, 2.0F), 2)).find(says), std::string::npos);
}

TEST(Stages, BesideASparseSchemeAndLowRank) {
  for (const char* scheme : {"spardl", "powersgd"}) {
    const Staged t = with({.stage = {.stages = 2}, .dp = 2, .scheme = scheme, .type = torch::kFloat32});
    const Result run = together(t);
    EXPECT_LT(run.losses.back(), run.losses.front() + 0.5);
    EXPECT_GT(distance(run, together(with({.stage = {.stages = 2}, .dp = 2, .type = torch::kFloat32}))),
              1e-5);
  }
}

// Experts that ranks of a stage share, and a table that those of the first one have cut: as without stages, which
// other tests hold to one process.
TEST(Stages, WithExpertsAndTables) {
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1"}) {
    Staged piped = with({.model = "gpt-moe",
                         .stage = {.stages = 2, .schedule = schedule},
                         .dp = 2,
                         .ep = 2,
                         .tables = "embrace"});
    piped.micro_batches = 2;
    Staged flat = piped;
    flat.stage = {.stages = 1};
    EXPECT_LT(distance(together(piped), together(flat)), kSame) << schedule;
  }
  // All of it at once, with what loses something: it trains.
  Staged all = with({.model = "gpt-moe",
                     .stage = {.stages = 2},
                     .dp = 2,
                     .steps = 8,
                     .scheme = "spardl",
                     .type = torch::kFloat32});
  all.ep = 2;
  all.tables = "embrace";
  all.backward = {.columns = 2};
  const Result run = together(all);
  EXPECT_LT(run.losses.back(), run.losses.front() + 0.3);
}

// Saved on any mesh, loaded on any other: the same after one step more.
TEST(Stages, StateMovesToOtherMeshes) {
  const std::vector<Staged> meshes{
      with({.stage = {.stages = 1}, .dp = 2}), with({.stage = {.stages = 2}, .dp = 2}),
      with({.stage = {.stages = 4}, .dp = 1}),
      with({.stage = {.stages = 2, .schedule = "interleaved", .chunks = 2}, .dp = 1})};
  const Result expected = alone([&] {
    Staged t = meshes.front();
    t.steps = 3;
    return t;
  }());
  for (const Staged& from : meshes) {
    Saved saved;
    train_and_save(from, 2, saved);
    for (const Staged& to : meshes)
      EXPECT_LT(distance(load_and_train(to, saved, 2, 3), expected.parameters), kSame)
          << title(from) << " to " << title(to);
  }
}

// What messages left behind is saved: a run that goes on has the bits of one that did not stop. Control: one that
// forgets it has not.
TEST(Stages, ResumeWithCompressionHasTheSameBits) {
  Staged t = with({.stage = {.stages = 3}, .dp = 2, .micro_batches = 4, .steps = 5, .type = torch::kFloat32});
  for (const BackwardOptions& backward : {BackwardOptions{.columns = 2}, BackwardOptions{.bits = 4}}) {
    t.backward = backward;
    const Named straight = together(t).parameters;
    Saved saved;
    train_and_save(t, 3, saved);
    const Named resumed = load_and_train(t, saved, 3, 5);
    for (const auto& [name, value] : straight) EXPECT_TRUE(torch::equal(resumed.at(name), value)) << name;
    for (StateSnapshot& snapshot : saved.snapshots)
      std::erase_if(snapshot.rows, [](const auto& row) { return row.row.key.owner == "pipeline"; });
    EXPECT_GT(distance(load_and_train(t, saved, 3, 5), straight), 0);
  }
}

TEST(Stages, BadInputIsNamed) {
  const auto refusal = [](const Staged& t) -> std::string {
    try {
      together(t);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "(no UsageError)";
  };
  EXPECT_NE(refusal(with({.stage = {.stages = 3}, .layers = 2}))
                .find("layers must be at least 1 for each of 3 stages"),
            std::string::npos);
  EXPECT_NE(refusal(with({.model = "lm"})).find("stages are of gpt, gpt-moe and bert"), std::string::npos);
  EXPECT_NE(
      refusal(with({.stage = {.stages = 2, .schedule = "interleaved", .chunks = 2}, .micro_batches = 3}))
          .find("interleaved takes a multiple of its 2 stages as micro-batches, not 3"),
      std::string::npos);
}

}  // namespace
}  // namespace weft
