// Stages of a pipeline in training steps of an outline, in virtual time: what is idle, what is sent, and which
// messages are compressed.
#include "patterns/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/statistics.h"
#include "planner/messages.h"
#include "reference/kept_messages.h"
#include "step/stage.h"
#include "weft/error.h"
#include "workload/emulate.h"
#include "workload/job_steps.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

constexpr double kForward = 1.2e-3;  // of a micro-batch and stage; each half of the backward takes as long
constexpr std::int64_t kTokens = 64, kWidth = 16;

struct Job {
  std::string schedule = "1f1b";
  int stages = 2;
  int micro_batches = 4;
  int dp = 1;
  int chunks = 1;
  bool doubled = false;
  int columns = 0;
  std::string messages = "epilogue";
  double rate = 0;  // bytes a second; 0: sending is free
  std::string scheme = "dense";
  int layers = 0;  // 0: one for each chunk
  bool bf16 = false, bf16_sums = false;
  std::string wire = "auto";  // of powersgd
  bool by_ring = false;       // all sums, and by the scheme, however short they are
};

// A gpt whose layers take as long as one another; what stands around them takes no time.
Outline outline_of_job(const Job& job) {
  ModelOptions o = model_options("gpt", "tiny");
  o.width = kWidth;
  o.heads = 2;
  o.vocabulary = 64;
  o.layers = job.layers > 0 ? job.layers : job.stages * job.chunks;
  Outline out = outline_of(model_shape("gpt", o), kTokens * job.micro_batches);
  for (OutlineBlock& block : out.blocks) {
    if (!block.name.starts_with("layer.")) continue;
    block.forward_seconds = kForward * job.micro_batches / job.chunks;
    block.backward_seconds = 2 * block.forward_seconds;
  }
  return out;
}

EmulationOptions options_of(const Job& job) {
  EmulationOptions out;
  out.parallel.scheme.name = job.scheme;
  out.mesh = {.dp = job.dp, .pp = job.stages};
  out.stage.schedule = job.schedule;
  out.stage.chunks = job.chunks;
  out.stage.double_warmup = job.doubled;
  out.backward.columns = job.columns;
  out.backward.messages = job.messages;
  out.stage.bf16 = job.bf16;
  out.stage.bf16_sums = job.bf16_sums;
  out.parallel.scheme.wire = job.wire;
  if (job.by_ring) {
    out.parallel.scheme.all_reduce = "ring";
    out.parallel.scheme.buckets.dense_below = 0;
  }
  out.micro_batches = job.micro_batches;
  out.steps = 3;
  out.warmup = 2;
  return out;
}

std::vector<EmulatedSteps> simulated(const Job& job) {
  SimulationOptions simulation;
  simulation.ranks = job.dp * job.stages;
  simulation.link.bytes_per_second = job.rate;
  return simulate_ranks(outline_of_job(job), options_of(job), simulation);
}

// One that is not settled behind.
double step_of(const std::vector<EmulatedSteps>& ranks) {
  double longest = 0;
  for (const EmulatedSteps& rank : ranks) longest = std::max(longest, rank.step_seconds[1]);
  return longest;
}

double idle_seconds(const Job& job) { return step_of(simulated(job)) - 3 * kForward * job.micro_batches; }

constexpr double kExact = 1e-7;  // every piece is rounded to a nanosecond

// (P-1)(f+b+w), of interleaved 1/v of it, of zb-h1 (P-1)(f+b-w): f, b and w are equal here.
TEST(Pipeline, IsIdleAsLongAsTheFormulasSay) {
  for (const int stages : {2, 3, 4}) {
    for (const int micro_batches : {stages, stages + 1, 2 * stages, 3 * stages}) {
      const double whole = 3 * kForward * (stages - 1);
      Job job{.schedule = "gpipe", .stages = stages, .micro_batches = micro_batches};
      const std::string title = std::to_string(stages) + " stages, " + std::to_string(micro_batches);
      EXPECT_NEAR(idle_seconds(job), whole, kExact) << title << " gpipe";
      job.schedule = "1f1b";
      EXPECT_NEAR(idle_seconds(job), whole, kExact) << title << " 1f1b";
      job.schedule = "zb-h1";
      EXPECT_NEAR(idle_seconds(job), kForward * (stages - 1), kExact) << title << " zb-h1";
      if (micro_batches % stages != 0) continue;
      for (const int chunks : {2, 3}) {
        job.schedule = "interleaved";
        job.chunks = chunks;
        EXPECT_NEAR(idle_seconds(job), whole / chunks, kExact) << title << " interleaved " << chunks;
      }
    }
  }
}

// A trainer deals whole sequences: of two, eight micro-batches are two, and six that are empty; of six, four are two and two
// of one. Control: cut token by token, the more micro-batches the shorter is the step.
TEST(Pipeline, MicroBatchesAreWholeSequences) {
  const auto step_of = [](std::int64_t sequences, int micro_batches) {
    Outline outline = outline_of_job({.stages = 4, .micro_batches = 1, .rate = 1e9});
    outline.tokens_per_rank = 6 * kTokens;
    EmulationOptions options = options_of({.stages = 4, .micro_batches = micro_batches, .rate = 1e9});
    options.sequences = sequences;
    SimulationOptions simulation;
    simulation.ranks = 4;
    simulation.link.bytes_per_second = 1e9;
    const std::vector<EmulatedSteps> ranks = simulate_ranks(outline, options, simulation);
    return std::pair(median(job_steps(seconds_of(ranks))), ranks[1].payload_bytes.back());
  };
  const auto [two, bytes] = step_of(2, 2);
  const auto [eight, same_bytes] = step_of(2, 8);
  EXPECT_NEAR(eight, two, 1e-4 * two);  // (gradients go out behind the last one, which is empty)
  EXPECT_EQ(same_bytes, bytes);
  EXPECT_LT(step_of(0, 8).first, 0.8 * two);  // control
  EXPECT_NEAR(step_of(6, 3).first, step_of(0, 3).first, 1e-9);
  EXPECT_GT(step_of(6, 4).first, 1.05 * step_of(0, 4).first);
}

TEST(Pipeline, TakesFewerMicroBatchesThanStages) {
  for (const char* schedule : {"gpipe", "1f1b"}) {
    for (const int micro_batches : {1, 2, 3})
      EXPECT_NEAR(idle_seconds({.schedule = schedule, .stages = 4, .micro_batches = micro_batches}),
                  9 * kForward, kExact)
          << schedule << " " << micro_batches;
  }
  EXPECT_GT(idle_seconds({.schedule = "zb-h1", .stages = 4, .micro_batches = 2}), 0);
  EXPECT_THROW(simulated({.schedule = "interleaved", .stages = 2, .micro_batches = 3, .chunks = 2}),
               UsageError);
}

// Bytes of a rank and step, as integers: forward M n m, back (M - q) n m + q (n + m) r, and what data parallelism
// and the tied table add (data_parallel/formula.h).
TEST(Pipeline, SendsWhatTheFormulasSay) {
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "interleaved"}) {
    for (const int dp : {1, 2}) {
      for (const int columns : {0, 3}) {
        for (const char* messages : {"epilogue", "all"}) {
          const bool chunked = schedule == std::string("interleaved");
          const Job job{.schedule = schedule,
                        .stages = 4,
                        .micro_batches = 8,
                        .dp = dp,
                        .chunks = chunked ? 2 : 1,
                        .columns = columns,
                        .messages = messages,
                        .rate = 1e8};
          const std::vector<EmulatedSteps> ranks = simulated(job);
          for (std::size_t r = 0; r < ranks.size(); ++r) {
            EXPECT_EQ(ranks[r].payload_bytes.back(), static_cast<double>(ranks[r].formula_bytes))
                << schedule << ", dp " << dp << ", columns " << columns << ", rank " << r;
          }
          if (dp > 1) continue;
          // Between the ends of the pipeline there is no tied table: what is sent crosses stages.
          const PipelineShape shape = pipeline_shape(
              [&] {
                StageOptions o = options_of(job).stage;
                o.stages = 4;
                return o;
              }(),
              8);
          for (int stage = 1; stage < 3; ++stage) {
            std::int64_t values = 0;
            for (int k = 0; k < job.chunks; ++k) {
              values += 8 * kTokens * kWidth;  // forward
              for (int m = 0; m < 8; ++m) {
                const bool factors =
                    columns > 0 && (messages == std::string("all") || in_epilogue(shape, k * 4 + stage, m));
                values += factors ? columns * (kTokens + kWidth) : kTokens * kWidth;
              }
            }
            EXPECT_EQ(ranks[static_cast<std::size_t>(stage)].payload_bytes.back(),
                      static_cast<double>(4 * values))
                << schedule << ", stage " << stage;
          }
        }
      }
    }
  }
}

// What passes between stages has half the bytes, to the byte, as factors and as it is; and so has everything under a
// scheme that rounds.
TEST(Pipeline, Bfloat16HalvesTheBytes) {
  for (const char* schedule : {"1f1b", "interleaved"}) {
    for (const int columns : {0, 3}) {
      Job job{.schedule = schedule,
              .stages = 4,
              .micro_batches = 8,
              .chunks = schedule == std::string("interleaved") ? 2 : 1,
              .columns = columns,
              .rate = 1e8};
      const std::vector<EmulatedSteps> whole = simulated(job);
      job.bf16 = true;
      const std::vector<EmulatedSteps> half = simulated(job);
      for (std::size_t r = 0; r < half.size(); ++r)
        EXPECT_EQ(half[r].payload_bytes.back(), static_cast<double>(half[r].formula_bytes)) << r;
      for (const std::size_t stage : {1, 2})  // the others sum the tied table, too
        EXPECT_EQ(2 * half[stage].formula_bytes, whole[stage].formula_bytes) << schedule << columns;
      EXPECT_GT(2 * half[0].formula_bytes, whole[0].formula_bytes);
      EXPECT_LT(step_of(half), step_of(whole));
      job.scheme = "dense-bf16";
      job.dp = 2;
      job.by_ring = true;
      const std::vector<EmulatedSteps> rounded = simulated(job);
      job.scheme = "dense";
      job.bf16 = false;
      const std::vector<EmulatedSteps> exact = simulated(job);
      for (std::size_t r = 0; r < rounded.size(); ++r) {
        EXPECT_EQ(rounded[r].payload_bytes.back(), static_cast<double>(rounded[r].formula_bytes)) << r;
        EXPECT_EQ(2 * rounded[r].formula_bytes, exact[r].formula_bytes) << r;
      }
    }
  }
}

// Beside a scheme that compresses what stays dense can be rounded: of the tied table half the bytes. So are factors,
// where nothing else was said of them; then of all that a rank sends there are half the bytes.
TEST(Pipeline, SumsCanBeRounded) {
  Job job{.stages = 3, .micro_batches = 4, .dp = 2, .scheme = "powersgd", .by_ring = true};
  const std::vector<EmulatedSteps> exact = simulated(job);
  job.bf16_sums = true;
  job.bf16 = true;
  const std::vector<EmulatedSteps> half = simulated(job);
  for (std::size_t r = 0; r < half.size(); ++r) {
    EXPECT_EQ(half[r].payload_bytes.back(), static_cast<double>(half[r].formula_bytes)) << r;
    EXPECT_EQ(2 * half[r].formula_bytes, exact[r].formula_bytes) << r;
  }
  job.bf16 = false;
  job.wire = "float32";
  const std::vector<EmulatedSteps> rounded = simulated(job);
  // 2 (n - 1) / n of [64, 16] values of 4 bytes among 4 ranks that have a copy.
  const std::int64_t table = 2 * 3 * 64 * kWidth * 4 / 4;
  for (std::size_t r = 0; r < rounded.size(); ++r) {
    EXPECT_EQ(rounded[r].payload_bytes.back(), static_cast<double>(rounded[r].formula_bytes)) << r;
    const bool has_copy = r < 2 || r >= 4;
    EXPECT_EQ(exact[r].formula_bytes - rounded[r].formula_bytes, has_copy ? table / 2 : 0) << r;
  }
}

// Messages that are named one by one are those: of the epilogue's, the same bytes and the same time.
TEST(Pipeline, MessagesCanBeNamed) {
  const Job epilogue{.stages = 4, .micro_batches = 8, .columns = 2, .rate = 4e6};
  Job named = epilogue;
  named.messages = "8/1:5-7/2:6-7/3:7";
  const std::vector<EmulatedSteps> expected = simulated(epilogue), got = simulated(named);
  for (std::size_t r = 0; r < got.size(); ++r) {
    EXPECT_EQ(got[r].payload_bytes, expected[r].payload_bytes);
    EXPECT_EQ(got[r].step_seconds, expected[r].step_seconds);
    EXPECT_EQ(got[r].payload_bytes.back(), static_cast<double>(got[r].formula_bytes));
  }
  named.messages = "8/1:5-7/2:6-7/3:6";
  EXPECT_NE(simulated(named)[3].step_seconds, expected[3].step_seconds);
}

MessagesChoice chosen_for(const Job& job, const Outline& outline) {
  EmulationOptions options = options_of(job);
  SimulationOptions simulation;
  simulation.ranks = job.dp * job.stages;
  if (job.rate > 0) options.planned_link = LinkCost{.hop_seconds = 1e-9, .seconds_per_byte = 1 / job.rate};
  return choose_messages(outline, options, simulation);
}

// 4 stages, 16 micro-batches, messages of half a forward (the paper's notes): the timed table ends where a walk of the
// real one does, fewer messages than all make the step as short, and those of the epilogue alone do not.
TEST(Pipeline, CriticalMessagesAreEnough) {
  const double half_a_forward = 4.0 * kTokens * kWidth / (0.5 * kForward);
  Job job{.stages = 4, .micro_batches = 16, .columns = 2, .rate = half_a_forward};
  const MessagesChoice choice = chosen_for(job, outline_of_job(job));
  EXPECT_EQ(choice.all, 48);
  EXPECT_EQ(choice.epilogue, 6);
  EXPECT_GE(choice.chosen, 23);
  EXPECT_LT(choice.chosen, 48);
  EXPECT_NEAR(choice.none_seconds, 71 * kForward, 0.02 * kForward);
  EXPECT_NEAR(choice.step_seconds, choice.all_seconds, 1e-9);
  EXPECT_LT(choice.step_seconds, choice.epilogue_seconds);
  const auto walked = [&](const std::string& messages, int columns) {
    Job with = job;
    with.messages = messages;
    with.columns = columns;
    return step_of(simulated(with));
  };
  const double critical = walked(choice.messages, 2);
  EXPECT_NEAR(walked("all", 0), choice.none_seconds, 0.03 * choice.none_seconds);
  EXPECT_NEAR(critical, choice.step_seconds, 0.03 * choice.step_seconds);
  EXPECT_NEAR(critical, walked("all", 2), 0.005 * critical);
  EXPECT_LT(critical, 0.99 * walked("epilogue", 2));
  // Where messages take next to nothing none is worth it.
  job.rate = 1e12;
  job.columns = 7;
  EXPECT_LT(chosen_for(job, outline_of_job(job)).none_seconds, 57.1 * kForward);
}

// Which are compressed: the last P - p messages of stage p, j >= M - P + p, and as many as that gives over all.
TEST(Pipeline, EpilogueIsThePapers) {
  for (int stages = 1; stages <= 8; ++stages) {
    for (int micro_batches = 1; micro_batches <= 32; ++micro_batches) {
      const PipelineShape shape{.stages = stages, .micro_batches = micro_batches};
      int all = 0, expected = 0;
      for (int p = 1; p < stages; ++p) {
        expected += std::min(micro_batches, stages - p);
        for (int j = 0; j < micro_batches; ++j) {
          EXPECT_EQ(in_epilogue(shape, p, j), j >= micro_batches - stages + p);
          all += in_epilogue(shape, p, j) ? 1 : 0;
        }
      }
      EXPECT_EQ(all, expected);
    }
  }
}

TEST(Pipeline, HoldsAsManyMicroBatchesAsThePaperSays) {
  for (int stages = 1; stages <= 8; ++stages) {
    for (int p = 0; p < stages; ++p) {
      const PipelineShape shape{.stages = stages, .micro_batches = 16};
      EXPECT_EQ(most_held(shape, p), stages - p);
      PipelineShape doubled = shape;
      doubled.doubled = true;
      EXPECT_EQ(most_held(doubled, p), std::min(16, 2 * (stages - 1 - p) + 1));
    }
  }
}

// What arrived is let go behind the last piece that reads it: a stage keeps as much as its table says, and 1f1b, however
// many micro-batches there are, what is under way on it.
TEST(Pipeline, KeepsTheMessagesThatAreUnderWay) {
  struct Case {
    const char* schedule;
    int chunks = 1;
    bool doubled = false;
    bool grows = false;
  };
  for (const Case& c :
       {Case{"gpipe", 1, false, true}, Case{"1f1b"}, Case{"1f1b", 1, true}, Case{"interleaved", 2},
        Case{"interleaved", 3}, Case{"zb-h1"}, Case{"zb-h1", 1, true}}) {
    std::vector<std::vector<std::size_t>> kept,
        on_the_way;  // of every number of micro-batches, of each stage
    for (const int micro_batches : {8, 16, 32}) {
      const Job job{.schedule = c.schedule,
                    .stages = 4,
                    .micro_batches = micro_batches,
                    .chunks = c.chunks,
                    .doubled = c.doubled,
                    .rate = 4e6};
      const std::vector<EmulatedSteps> ranks = simulated(job);
      const PipelineShape shape{pipeline_schedule_of(c.schedule), 4, c.chunks, micro_batches, c.doubled};
      const std::string title = std::string(c.schedule) + ", " + std::to_string(micro_batches) + ", stage ";
      kept.emplace_back();
      on_the_way.emplace_back();
      for (int stage = 0; stage < 4; ++stage) {
        const EmulatedSteps& rank = ranks[static_cast<std::size_t>(stage)];
        const auto message = static_cast<std::size_t>(4 * kTokens * kWidth);
        EXPECT_EQ(rank.kept_bytes, static_cast<std::size_t>(reference::most_kept(shape, stage)) * message)
            << title << stage;
        // (The last stage of gpipe takes activations alone, and needs all of them.)
        const bool needs_all = c.grows && stage == 3;
        EXPECT_EQ(
            rank.kept_bytes < static_cast<std::size_t>(reference::most_kept(shape, stage, true)) * message,
            !needs_all)
            << title << stage;
        kept.back().push_back(rank.kept_bytes);
        on_the_way.back().push_back(rank.on_the_way_bytes);
      }
    }
    if (c.grows) {  // by the activations of every micro-batch more; to the first stage none comes
      for (std::size_t stage = 1; stage < 4; ++stage)
        EXPECT_EQ(kept[2][stage] - kept[0][stage], 24 * 4 * kTokens * kWidth) << stage;
      continue;
    }
    EXPECT_EQ(kept[2], kept[1]) << c.schedule;
    EXPECT_EQ(on_the_way[2], on_the_way[1]) << c.schedule;
    const bool is_plain = c.schedule == std::string("1f1b") && !c.doubled;
    EXPECT_TRUE(!is_plain || kept[2] == kept[0]) << c.schedule;
  }
}

// Steps behind the first ones take no memory for messages from the system, whatever these travel as.
TEST(Pipeline, WarmStepsTakeNoMemoryForMessages) {
  for (const bool bf16 : {false, true}) {
    for (const int columns : {0, 2}) {
      Job job{.stages = 4, .micro_batches = 16, .columns = columns, .messages = "all", .rate = 4e6};
      job.bf16 = bf16;
      EmulationOptions options = options_of(job);
      SimulationOptions simulation;
      simulation.ranks = job.stages;
      simulation.link.bytes_per_second = job.rate;
      const auto fresh_of = [&](std::int64_t steps) {
        options.steps = steps;
        std::uint64_t sum = 0;
        for (const EmulatedSteps& rank : simulate_ranks(outline_of_job(job), options, simulation))
          sum += rank.fresh_pieces;
        return sum;
      };
      const std::uint64_t few = fresh_of(2);
      EXPECT_GT(few, 0);
      EXPECT_EQ(fresh_of(12), few) << columns << (bf16 ? " bf16" : "");
      // A control: fewer pieces than the messages of one step.
      EXPECT_LT(few, 2U * 3U * 16U) << columns;
    }
  }
}

// Where links are slow, fewer bytes on the way back make a step shorter, and a doubled warm-up hides what travels
// in the steady part.
TEST(Pipeline, CompressionAndWarmUpPayOnSlowLinks) {
  const Job dense{.stages = 4, .micro_batches = 8, .rate = 4e6};
  const double plain = step_of(simulated(dense));
  Job job = dense;
  job.columns = 2;
  const double epilogue = step_of(simulated(job));
  job.messages = "all";
  const double all = step_of(simulated(job));
  EXPECT_LT(epilogue, plain * 0.99);
  EXPECT_LT(all, epilogue);
  job = dense;
  job.doubled = true;
  EXPECT_LT(step_of(simulated(job)), plain * 0.97);
}

// The tables of all ranks hold together: at most as many distinct ones as ranks, and layers that stages have more
// of, where they cannot be dealt evenly.
TEST(Pipeline, StagesHaveTheirLayers) {
  for (const Job& job :
       {Job{.stages = 3, .micro_batches = 3, .dp = 2, .layers = 7},
        Job{.schedule = "interleaved", .stages = 2, .micro_batches = 4, .dp = 3, .chunks = 2, .layers = 5},
        Job{.schedule = "zb-h1", .stages = 4, .micro_batches = 5, .scheme = "spardl", .layers = 9}}) {
    EXPECT_GT(step_of(simulated(job)), 0);
  }
  ModelOptions o = model_options("gpt", "tiny");
  o.layers = 7;
  const ModelShape whole = model_shape("gpt", o);
  std::vector<std::string> names;
  for (int stage = 0; stage < 3; ++stage) {
    const ModelShape mine = stage_shape(whole, {.stages = 3, .stage = stage});
    for (const BlockShape& block : mine.blocks) names.push_back(block.name);
    EXPECT_EQ(mine.num_blocks(), stage == 0 ? 4 : stage == 1 ? 2 : 3);  // with embedding and head
    EXPECT_EQ(mine.has_loss(), stage == 2);
    const bool has_copy = std::ranges::any_of(mine.parameters, [](const ParameterShape& p) {
      return p.stages == std::vector<int>{0, 2} && p.name == "embedding.token.weight";
    });
    EXPECT_EQ(has_copy, stage != 1);
  }
  std::vector<std::string> expected;
  for (const BlockShape& block : whole.blocks) expected.push_back(block.name);
  EXPECT_EQ(names, expected);
  const ModelShape given = stage_shape(whole, {.stages = 3, .stage = 1, .layers = {1, 5, 1}});
  EXPECT_EQ(given.num_blocks(), 5);
  EXPECT_EQ(given.origin_of(0), 2);
}

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "(no UsageError)";
}

TEST(Pipeline, BadInputIsNamed) {
  const ModelShape whole = model_shape("gpt", model_options("gpt", "tiny"));  // 2 layers
  EXPECT_EQ(refusal([&] { stage_shape(whole, {.stages = 3}); }),
            "pipeline: model 'gpt' has 2 layers, too few for 3 stages: every one has at least one");
  EXPECT_EQ(refusal([&] { stage_shape(whole, {.stages = 2, .layers = {1, 2}}); }),
            "pipeline: layers of stages are so many for each of 2, together the model's 2");
  EXPECT_EQ(refusal([&] { stage_shape(whole, {.stages = 2, .layers = {2, 0}}); }),
            "pipeline: a stage has at least one layer, not 0");
  EXPECT_EQ(refusal([&] { stage_shape(whole, {.stages = 2, .schedule = "1f2b"}); }),
            "unknown schedule '1f2b': did you mean '1f1b'? There are gpipe, 1f1b, interleaved, zb-h1");
  EXPECT_EQ(refusal([&] { check_stage({.stages = 2, .chunks = 2}); }),
            "pipeline: chunks are of the schedule interleaved, not of 1f1b");
  EXPECT_EQ(refusal([&] { check_stage({.stages = 4, .schedule = "interleaved", .chunks = 2}, 6); }),
            "pipeline: interleaved takes a multiple of its 4 stages as micro-batches, not 6");
  EXPECT_EQ(refusal([&] { check_stage({.stages = 4, .schedule = "gpipe", .double_warmup = true}); }),
            "pipeline: a doubled warm-up is of the schedules 1f1b and zb-h1, not of gpipe");
  EXPECT_EQ(refusal([&] { stage_shape(model_shape("gnmt", model_options("gnmt", "tiny")), {.stages = 2}); }),
            "pipeline: model 'gnmt' is no row of layers that could be cut");
  EXPECT_EQ(refusal([&] { simulated({.stages = 2, .micro_batches = 2, .columns = 2, .messages = "some"}); }),
            "unknown choice of messages between stages 'some'. There are epilogue, all, critical");
  const Job critical{.stages = 2, .micro_batches = 2, .columns = 2, .messages = "critical", .rate = 1e6};
  EXPECT_EQ(refusal([&] { simulated(critical); }),
            "pipeline: critical messages are chosen before a run, by a plan: what they are called then is a "
            "list of "
            "them");
  Job other = critical;
  other.rate = 0;
  EXPECT_EQ(refusal([&] { chosen_for(other, outline_of_job(other)); }),
            "backward-messages critical: nobody has said what a message between stages takes (--plan-link)");
  other = critical;
  other.columns = 0;
  EXPECT_EQ(refusal([&] { chosen_for(other, outline_of_job(other)); }),
            "backward-messages critical: nothing goes back as factors or whole numbers (--backward-rank, "
            "--backward-bits)");
  Outline idle = outline_of_job(critical);
  for (OutlineBlock& block : idle.blocks) block.forward_seconds = block.backward_seconds = 0;
  EXPECT_EQ(refusal([&] { chosen_for(critical, idle); }),
            "backward-messages critical: the outline of gpt has no seconds by which a step could be timed");
}

}  // namespace
}  // namespace weft
