// Both ends of every message between stages go by the same: factors, or the gradient as it is. Each end works it out
// on its own rank, from its own chunks; what is here matched with each other is matched as messages find their receives.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "pipeline/message_set.h"
#include "pipeline/pipeline.h"
#include "step/stage.h"
#include "weft/error.h"
#include "weft/random.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

constexpr int kMostStages = 8, kMostMicroBatches = 32, kMostChunks = 4;
// Messages of a step, over the whole grid: of the five without chunks (P - 1) M, 28 times 528; of the others (P v - 1) M
// where P divides M.
constexpr int kMessages = 5 * 28 * 528 + 2884 + 6694 + 14314;

struct Case {
  const char* schedule;
  int chunks = 1;
  bool doubled = false;

  bool takes(int stages, int micro_batches) const {
    return schedule != std::string("interleaved") || micro_batches % stages == 0;
  }
  PipelineShape shape(int stages, int micro_batches) const {
    return {pipeline_schedule_of(schedule), stages, chunks, micro_batches, doubled};
  }
};
constexpr Case kCases[] = {{"gpipe"},          {"1f1b"},           {"1f1b", 1, true},  {"zb-h1"},
                           {"zb-h1", 1, true}, {"interleaved", 1}, {"interleaved", 2}, {"interleaved", 4}};

// A gpt with a layer for each chunk, as each stage has it.
std::vector<ModelShape> shapes_of(int stages, const Case& c) {
  ModelOptions sizes = model_options("gpt", "tiny");
  sizes.layers = stages * c.chunks;
  const ModelShape whole = model_shape("gpt", sizes);
  std::vector<ModelShape> out;
  for (int stage = 0; stage < stages; ++stage)
    out.push_back(
        stage_shape(whole, {.stages = stages, .stage = stage, .schedule = c.schedule, .chunks = c.chunks}));
  return out;
}

// What goes back: of a chunk of the model, from an exchange of one rank's list to one of another's.
struct Message {
  int chunk = 0;
  int sender = 0, sent = -1;
  int receiver = 0, received = -1;
};

// The ranks of a pipeline.
class Stages {
 public:
  Stages(SimRanks& ranks, const std::vector<ModelShape>& shapes, const Case& c, const std::string& messages) {
    for (int r = 0; r < ranks.size(); ++r) {
      PipelineOptions options;
      options.stage = {.stages = ranks.size(),
                       .stage = r,
                       .schedule = c.schedule,
                       .chunks = c.chunks,
                       .double_warmup = c.doubled};
      options.backward = {.columns = 1, .messages = messages};
      registries_.push_back(std::make_unique<StateRegistry>());
      pipelines_.push_back(std::make_unique<Pipeline>(ranks.engine(r), ranks.engine(r).world(),
                                                      shapes[static_cast<std::size_t>(r)], options,
                                                      *registries_.back()));
    }
    find_messages();
  }
  const Pipeline& operator[](int rank) const { return *pipelines_[static_cast<std::size_t>(rank)]; }
  const std::vector<Message>& messages() const { return messages_; }
  bool sends_factors(const Message& m, int micro_batch, int micro_batches) const {
    return (*this)[m.sender].is_coded(m.sent, micro_batch, micro_batches);
  }
  bool expects_factors(const Message& m, int micro_batch, int micro_batches) const {
    return (*this)[m.receiver].is_coded(m.received, micro_batch, micro_batches);
  }

 private:
  void find_messages() {
    std::vector<std::vector<Exchange>> lists;
    for (const auto& pipeline : pipelines_) lists.push_back(pipeline->exchanges());
    const int size = static_cast<int>(lists.size());
    for (int r = 0; r < size; ++r) {
      const std::vector<Exchange>& mine = lists[static_cast<std::size_t>(r)];
      for (std::size_t e = 0; e < mine.size(); ++e) {
        if (mine[e].kind != Exchange::Kind::send || mine[e].reads[0].of != TensorName::Of::gradient) continue;
        const std::vector<Exchange>& theirs = lists[static_cast<std::size_t>(mine[e].peer)];
        const auto meets = [&](const Exchange& x) {
          return x.kind == Exchange::Kind::receive && x.peer == r && x.slot == mine[e].slot;
        };
        ASSERT_EQ(std::ranges::count_if(theirs, meets), 1);
        const auto met = std::ranges::find_if(theirs, meets);
        EXPECT_EQ(met->writes, mine[e].reads);
        const auto& chunks = (*this)[r].chunks();
        messages_.push_back(
            {.chunk = std::ranges::find(chunks, mine[e].reads[0].name, &ChunkShape::arrives)->number,
             .sender = r,
             .sent = static_cast<int>(e),
             .receiver = mine[e].peer,
             .received = static_cast<int>(met - theirs.begin())});
      }
    }
  }

  std::vector<std::unique_ptr<StateRegistry>> registries_;
  std::vector<std::unique_ptr<Pipeline>> pipelines_;
  std::vector<Message> messages_;
};

// By hand. A stage's backwards are numbered: micro-batches of one chunk, as many as there are stages, then of the chunk
// in front of it; where it has one chunk, micro-batches. It has as many forwards ahead of them as its warm-up.
int warm_up(const PipelineShape& s, int stage) {
  const int all = s.micro_batches * s.chunks, behind = s.stages - 1 - stage;
  if (s.schedule == PipelineSchedule::gpipe) return all;
  if (s.schedule == PipelineSchedule::interleaved)
    return std::min(all, 2 * behind + (s.chunks - 1) * s.stages);
  return std::min(all, s.doubled ? 2 * behind : behind);
}
int number_of(const PipelineShape& s, int chunk, int micro_batch) {
  if (s.schedule != PipelineSchedule::interleaved) return micro_batch;
  const int own = s.chunks - 1 - chunk / s.stages;  // the last of the stage's chunks goes back first
  return (micro_batch / s.stages * s.chunks + own) * s.stages + micro_batch % s.stages;
}
// No forward follows the last of those in turns with forwards, and none those behind it.
bool is_epilogue(const PipelineShape& s, int chunk, int micro_batch) {
  const int stage = chunk % s.stages;
  return number_of(s, chunk, micro_batch) >= s.micro_batches * s.chunks - warm_up(s, stage) - 1;
}

// For every number of stages, and of micro-batches that the schedule takes.
void for_each_shape(const Case& c, const std::function<void(SimRanks& ranks, int stages)>& begin,
                    const std::function<void(const PipelineShape& shape)>& each) {
  for (int stages = 2; stages <= kMostStages; ++stages) {
    SimRanksOptions options;
    options.sim.link.ranks = stages;
    SimRanks ranks(options);
    begin(ranks, stages);
    for (int micro_batches = 1; micro_batches <= kMostMicroBatches; ++micro_batches) {
      if (c.takes(stages, micro_batches)) each(c.shape(stages, micro_batches));
    }
  }
}

std::string title(const Case& c, const PipelineShape& s) {
  return std::string(c.schedule) + (c.doubled ? " doubled" : "") + ", " + std::to_string(s.stages) +
         " stages of " + std::to_string(s.chunks) + ", " + std::to_string(s.micro_batches) + " micro-batches";
}

TEST(StageEnds, AgreeAboutEveryMessageOfTheEpilogueAndOfAll) {
  int shifted = 0, compared = 0;
  for (const Case& c : kCases) {
    std::unique_ptr<Stages> epilogue, all;
    const auto begin = [&](SimRanks& ranks, int stages) {
      const std::vector<ModelShape> shapes = shapes_of(stages, c);
      epilogue = std::make_unique<Stages>(ranks, shapes, c, "epilogue");
      all = std::make_unique<Stages>(ranks, shapes, c, "all");
    };
    const auto each = [&](const PipelineShape& s) {
      const int m_all = s.micro_batches;
      ASSERT_EQ(epilogue->messages().size(), static_cast<std::size_t>(s.all_chunks() - 1));
      for (const Message& message : epilogue->messages()) {
        for (int m = 0; m < m_all; ++m) {
          const bool expected = is_epilogue(s, message.chunk, m);
          ASSERT_EQ(epilogue->sends_factors(message, m, m_all), expected) << title(c, s) << message.chunk;
          ASSERT_EQ(epilogue->expects_factors(message, m, m_all), expected) << title(c, s) << message.chunk;
          ASSERT_TRUE(all->sends_factors(message, m, m_all) && all->expects_factors(message, m, m_all));
          // A control: a receiver that goes by its own chunk in place of the one behind it.
          shifted += (*epilogue)[message.receiver].is_compressed(message.chunk - 1, m, m_all) != expected;
          ++compared;
        }
      }
    };
    for_each_shape(c, begin, each);
    epilogue.reset();
    all.reset();
  }
  EXPECT_GT(shifted, 0);
  EXPECT_LT(shifted, compared);
  EXPECT_EQ(compared, kMessages);
}

// Messages that were chosen one by one, whatever they are; of a step of another number of micro-batches, none.
TEST(StageEnds, AgreeAboutEveryMessageThatWasChosen) {
  int chosen = 0, compared = 0;
  for (const Case& c : kCases) {
    std::vector<ModelShape> shapes;
    SimRanks* on = nullptr;
    const auto begin = [&](SimRanks& ranks, int stages) {
      shapes = shapes_of(stages, c);
      on = &ranks;
    };
    const auto each = [&](const PipelineShape& s) {
      const int m_all = s.micro_batches;
      Random random(3, static_cast<std::uint32_t>(s.stages), static_cast<std::uint32_t>(m_all));
      MessageSet critical(m_all);
      for (int chunk = 1; chunk < s.all_chunks(); ++chunk) {
        for (int m = 0; m < m_all; ++m) {
          if (random.below(3) == 0) critical.add(chunk, m);
        }
      }
      const Stages stages(*on, shapes, c, critical.text());
      for (const Message& message : stages.messages()) {
        for (int m = 0; m < m_all; ++m) {
          const bool expected = critical.has(message.chunk, m);
          ASSERT_EQ(stages.sends_factors(message, m, m_all), expected) << title(c, s) << message.chunk;
          ASSERT_EQ(stages.expects_factors(message, m, m_all), expected) << title(c, s) << message.chunk;
          ASSERT_FALSE(stages.sends_factors(message, m, m_all + 1) ||
                       stages.expects_factors(message, m, m_all + 1));
          chosen += expected;
          ++compared;
        }
      }
    };
    for_each_shape(c, begin, each);
  }
  EXPECT_EQ(compared, kMessages);
  EXPECT_NEAR(chosen, compared / 3.0, 0.05 * compared);
}

// A control: the rule of the released code, by which each end goes by the phase that it is in itself. Stages of one
// chunk send factors from the last backward that is in turns with forwards, and expect them from the one behind it. With
// several, they send them from the one behind it, and expect them from the one behind that, whose gradient is received
// with the one before it.
bool phase_sends(const PipelineShape& s, int stage, int number) {
  const int cool_down = s.micro_batches * s.chunks - warm_up_of(s, stage);
  return number >= cool_down - (s.schedule == PipelineSchedule::interleaved ? 0 : 1);
}
bool phase_expects(const PipelineShape& s, int stage, int number) {
  const int cool_down = s.micro_batches * s.chunks - warm_up_of(s, stage);
  return number >= cool_down + (s.schedule == PipelineSchedule::interleaved ? 1 : 0);
}

// Where a chunk and micro-batch come among a stage's own backwards.
int place_of(const std::vector<StageItem>& order, int chunk, int micro_batch) {
  int place = 0;
  for (const StageItem& item : order) {
    if (!goes_back(item.work)) continue;
    if (item.chunk == chunk && item.micro_batch == micro_batch) return place;
    ++place;
  }
  return -1;
}

// Of what a stage's neighbour sends it: (stage, place among its backwards) where the ends differ, and which of them
// expects factors.
using Apart = std::set<std::tuple<int, int, bool>>;
Apart apart_by_phase(const PipelineShape& s) {
  Apart out;
  for (int stage = 0; stage + 1 < s.stages; ++stage) {
    const std::vector<StageItem> order = pipeline_order(s, stage), behind = pipeline_order(s, stage + 1);
    for (int chunk = stage; chunk < s.all_chunks(); chunk += s.stages) {
      for (int m = 0; m < s.micro_batches; ++m) {
        const int here = place_of(order, chunk, m);
        const bool sends = phase_sends(s, stage + 1, place_of(behind, chunk + 1, m));
        const bool expects = phase_expects(s, stage, here);
        if (sends != expects) out.insert({stage, here, expects});
      }
    }
  }
  return out;
}

TEST(StageEnds, OfTheReleasedRuleDoNotAgree) {
  // The paper's notes: of 4 stages, 16 micro-batches and 2 chunks.
  const PipelineShape notes{PipelineSchedule::interleaved, 4, 2, 16};
  EXPECT_EQ(apart_by_phase(notes), (Apart{{0, 23, true}, {1, 25, true}, {2, 27, true}}));
  for (int stages = 2; stages <= kMostStages; ++stages) {
    for (int micro_batches = 1; micro_batches <= kMostMicroBatches; ++micro_batches) {
      const PipelineShape plain{.stages = stages, .micro_batches = micro_batches};
      EXPECT_EQ(apart_by_phase(plain), Apart{}) << stages << " " << micro_batches;
      if (micro_batches % stages != 0 || micro_batches <= stages) continue;
      for (int chunks = 2; chunks <= kMostChunks; chunks += 2) {
        const PipelineShape s{PipelineSchedule::interleaved, stages, chunks, micro_batches};
        Apart expected;  // one message a link
        for (int stage = 0; stage + 1 < stages; ++stage)
          expected.insert({stage, micro_batches * chunks - warm_up(s, stage) + 1, true});
        EXPECT_EQ(apart_by_phase(s), expected) << stages << " " << micro_batches << " " << chunks;
      }
    }
  }
}

constexpr std::int64_t kTokens = 8, kWidth = 8;

ModelOptions small_gpt() {
  ModelOptions out = model_options("gpt", "tiny");
  out.width = kWidth;
  out.heads = 1;
  out.vocabulary = 16;
  out.untied = true;  // so that nothing but messages travels
  return out;
}

EmulationOptions staged(const Case& c, int stages, int micro_batches, const BackwardOptions& backward) {
  EmulationOptions out;
  out.parallel.scheme.name = "dense";
  out.mesh = {.dp = 1, .pp = stages};
  out.stage.schedule = c.schedule;
  out.stage.chunks = c.chunks;
  out.stage.double_warmup = c.doubled;
  out.backward = backward;
  out.micro_batches = micro_batches;
  out.warmup = 1;
  out.steps = 2;
  return out;
}

// On a transport that refuses a message of another length than its receive has room for: the steps end, and every rank has
// sent what it has to by hand.
TEST(StageEnds, OfEveryMessageHaveRoomForIt) {
  constexpr int kColumns = 2;
  ModelOptions sizes = small_gpt();
  int runs = 0;
  for (const Case& c : kCases) {
    for (const int stages : {2, 3, 5}) {
      for (const int micro_batches : {1, stages - 1, stages, 3 * stages}) {
        if (!c.takes(stages, micro_batches) || ++runs % 3 != 0) continue;
        sizes.layers = stages * c.chunks;
        const EmulationOptions options = staged(c, stages, micro_batches, {.columns = kColumns});
        SimulationOptions simulation;
        simulation.ranks = stages;
        simulation.link.bytes_per_second = 1e8;
        const std::vector<EmulatedSteps> ranks = simulate_ranks(
            outline_from_flops(model_shape("gpt", sizes), kTokens * micro_batches, 1e9), options, simulation);
        const PipelineShape s = c.shape(stages, micro_batches);
        for (int stage = 0; stage < stages; ++stage) {
          std::int64_t values = 0;
          for (int chunk = stage; chunk < s.all_chunks(); chunk += stages) {
            if (chunk + 1 < s.all_chunks()) values += micro_batches * kTokens * kWidth;
            for (int m = 0; chunk > 0 && m < micro_batches; ++m)
              values += is_epilogue(s, chunk, m) ? kColumns * (kTokens + kWidth) : kTokens * kWidth;
          }
          EXPECT_EQ(ranks[static_cast<std::size_t>(stage)].payload_bytes.back(), 4.0 * values)
              << title(c, s) << ", stage " << stage;
        }
      }
    }
  }
  EXPECT_GT(runs, 40);
}

// Every send waits for its receive: stages never wait for each other in a ring, and send what they send where nobody has
// to be there. With disorder, too: pieces and messages that are late by chance.
TEST(StageEnds, NeedNoBuffersBetweenThem) {
  ModelOptions sizes = small_gpt();
  int runs = 0, longer = 0;
  for (const Case& c : kCases) {
    for (const int stages : {2, 4}) {
      for (const int micro_batches : {1, stages - 1, stages, 3 * stages}) {
        if (!c.takes(stages, micro_batches)) continue;
        sizes.layers = stages * c.chunks;
        const Outline outline = outline_from_flops(model_shape("gpt", sizes), kTokens * micro_batches, 1e9);
        EmulationOptions options = staged(c, stages, micro_batches,
                                          {.columns = 1, .messages = ++runs % 2 == 0 ? "all" : "epilogue"});
        options.windows = windows_of(outline, options);
        SimulationOptions simulation;
        simulation.ranks = stages;
        simulation.link.bytes_per_second = 1e7;
        const auto run = [&](std::size_t eager_limit, double jitter) {
          simulation.eager_limit = eager_limit;
          simulation.jitter_seconds = jitter;
          return simulate_ranks(outline, options, simulation);
        };
        const std::vector<EmulatedSteps> buffered = run(std::numeric_limits<std::size_t>::max(), 0);
        for (const double jitter : {0.0, 1e-3}) {
          const std::vector<EmulatedSteps> met = run(0, jitter);
          ASSERT_EQ(met.size(), buffered.size());
          for (std::size_t r = 0; r < met.size(); ++r) {
            EXPECT_EQ(met[r].payload_bytes, buffered[r].payload_bytes)
                << title(c, c.shape(stages, micro_batches));
            longer += jitter == 0 && met[r].step_seconds != buffered[r].step_seconds;
          }
        }
      }
    }
  }
  EXPECT_GT(runs, 40);
  EXPECT_GT(longer, 0) << "control: to wait for a receive takes time";
}

// Control: where a rank awaits its send before its neighbour's receive is posted, buffers are needed, and that is seen.
TEST(StageEnds, ARingOfSendsIsSeenToWaitForItself) {
  const auto ring = [](Comm comm, int) -> Task<void> {
    std::vector<float> mine(100), theirs(100);
    Transfer sent = comm.send(comm.after(1), 0, Dense(std::span(mine)));
    co_await sent;
    Transfer received = comm.recv(comm.before(1), 0, Dense(std::span(theirs)));
    co_await received;
  };
  for (const std::size_t eager_limit : {std::numeric_limits<std::size_t>::max(), std::size_t{0}}) {
    SimRanksOptions options;
    options.sim.link.ranks = 4;
    options.sim.eager_limit = eager_limit;
    SimRanks ranks(options);
    if (eager_limit > 0)
      EXPECT_NO_THROW(ranks.run({.name = "ring"}, ring));
    else
      EXPECT_THROW(ranks.run({.name = "ring"}, ring), TransportError);
  }
}

}  // namespace
}  // namespace weft
