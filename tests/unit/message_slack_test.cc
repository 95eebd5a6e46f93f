// Slack of what goes back between stages, against a plain simulation in which each message is made longer, one by one.
#include "pipeline/message_slack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

namespace weft {
namespace {

// One forward takes 1, a backward 2, a message `message`; as factors `coded`.
PipelineTimes times_of(const PipelineShape& shape, double message, double coded) {
  PipelineTimes out;
  const auto chunks = static_cast<std::size_t>(shape.all_chunks());
  const double share = 1.0 / shape.chunks;
  const bool halves = shape.schedule == PipelineSchedule::zb_h1;
  out.forward.assign(chunks, share);
  out.backward.assign(chunks, (halves ? 1 : 2) * share);
  out.weights.assign(chunks, halves ? share : 0);
  out.ahead.assign(chunks, {message, 0});
  out.back.assign(chunks, {message, 0});
  out.coded.assign(chunks, {coded, 0});
  out.tail.assign(static_cast<std::size_t>(shape.stages), 0);
  return out;
}

// Which message is made longer: 1 back, 0 forward.
using Message = std::tuple<int, int, int>;

// The end of a step, by going round the stages again and again. One port a stage.
double plain_end(const PipelineShape& shape, const PipelineTimes& t,
                 const std::map<Message, double>& longer) {
  std::vector<std::size_t> next(static_cast<std::size_t>(shape.stages), 0);
  std::vector<double> clock(next.size(), 0), port(next.size(), 0);
  std::map<Message, double> arrived;
  for (bool moved = true; moved;) {
    moved = false;
    for (int s = 0; s < shape.stages; ++s) {
      const auto at = static_cast<std::size_t>(s);
      const std::vector<StageItem> order = pipeline_order(shape, s);
      if (next[at] == order.size()) continue;
      const StageItem item = order[next[at]];
      const auto c = static_cast<std::size_t>(item.chunk);
      const int back = item.work == Work::forward ? 0 : 1, step = back == 1 ? -1 : 1;
      const bool weights = item.work == Work::weight_gradient;
      const auto there = [&](int chunk) { return chunk >= 0 && chunk < shape.all_chunks(); };
      if (!weights && there(item.chunk - step)) {
        const auto message = arrived.find({back, item.chunk - step, item.micro_batch});
        if (message == arrived.end()) continue;
        clock[at] = std::max(clock[at], message->second);
      }
      clock[at] += weights ? t.weights[c] : back == 1 ? t.backward[c] : t.forward[c];
      ++next[at];
      moved = true;
      if (weights || !there(item.chunk + step)) continue;
      const Message message{back, item.chunk, item.micro_batch};
      const MessageSeconds& seconds = back == 1 ? t.back[c] : t.ahead[c];
      const auto more = longer.find(message);
      port[at] = std::max(port[at], clock[at]) + seconds.port + (more == longer.end() ? 0 : more->second);
      arrived[message] = port[at] + seconds.more;
    }
  }
  double end = 0;
  for (std::size_t s = 0; s < clock.size(); ++s) end = std::max(end, clock[s] + t.tail[s]);
  return end;
}

// Slack is how much longer a message may take: made longer by D, the step is by D less its slack.
void expect_slack(const PipelineShape& shape, const PipelineTimes& times) {
  const double end = plain_end(shape, times, {});
  EXPECT_NEAR(step_seconds(shape, times, MessageSet(shape.micro_batches)), end, 1e-9);
  const std::vector<BackMessage> all = message_slack(shape, times, MessageSet(shape.micro_batches));
  EXPECT_EQ(all.size(), static_cast<std::size_t>((shape.all_chunks() - 1) * shape.micro_batches));
  const double much = 10 * end;
  for (const BackMessage& message : all) {
    const double longer = plain_end(shape, times, {{{1, message.chunk, message.micro_batch}, much}});
    EXPECT_NEAR(message.slack, much - (longer - end), 1e-7)
        << name_of(shape.schedule) << ", chunk " << message.chunk << ", micro-batch " << message.micro_batch;
  }
}

TEST(MessageSlack, IsWhatAMessageMayTakeLonger) {
  for (const PipelineShape& shape : {PipelineShape{PipelineSchedule::one_f_one_b, 4, 1, 16},
                                     PipelineShape{PipelineSchedule::one_f_one_b, 4, 1, 9, true},
                                     PipelineShape{PipelineSchedule::one_f_one_b, 5, 1, 2},
                                     PipelineShape{PipelineSchedule::gpipe, 3, 1, 6},
                                     PipelineShape{PipelineSchedule::interleaved, 4, 2, 8},
                                     PipelineShape{PipelineSchedule::zb_h1, 4, 1, 8}}) {
    for (const double message : {0.0, 0.5, 3.7}) {
      PipelineTimes times = times_of(shape, message, message / 4);
      expect_slack(shape, times);
      // Stages that differ, latency, and sums behind the last piece.
      for (std::size_t c = 0; c < times.forward.size(); ++c) {
        times.forward[c] += 0.13 * static_cast<double>(c % 3);
        times.backward[c] += 0.29 * static_cast<double>((c + 1) % 2);
        times.back[c].more = 0.21;
      }
      for (std::size_t s = 0; s < times.tail.size(); ++s) times.tail[s] = 1.7 * static_cast<double>(s % 2);
      expect_slack(shape, times);
    }
  }
}

// The figures of the paper's notes: a step of 71 forwards, 23 of 48 messages critical, and of the 6 of the epilogue not
// all of them.
TEST(MessageSlack, CriticalMessagesAreNotTheEpilogue) {
  const PipelineShape shape{PipelineSchedule::one_f_one_b, 4, 1, 16};
  const PipelineTimes times = times_of(shape, 0.5, 0.5 - 1e-6);
  EXPECT_NEAR(step_seconds(shape, times, MessageSet(16)), 71, 1e-9);
  const MessageSet critical = critical_messages(shape, times);
  EXPECT_EQ(critical.count(), 23);
  int epilogue = 0, both = 0;
  const double end = plain_end(shape, times, {});
  for (int chunk = 1; chunk < 4; ++chunk) {
    for (int m = 0; m < 16; ++m) {
      const bool moves = plain_end(shape, times, {{{1, chunk, m}, 1e-3}}) > end + 1e-4;
      EXPECT_EQ(critical.has(chunk, m), moves) << chunk << ", " << m;
      epilogue += in_epilogue(shape, chunk, m) ? 1 : 0;
      both += in_epilogue(shape, chunk, m) && critical.has(chunk, m) ? 1 : 0;
    }
  }
  EXPECT_EQ(epilogue, 6);
  EXPECT_LT(both, 6);
}

// A larger saving takes messages along that have some slack, and the step ends no later than with the epilogue alone.
TEST(MessageSlack, CompressesWhatIsWorthIt) {
  const PipelineShape shape{PipelineSchedule::one_f_one_b, 4, 1, 16};
  int before = 0;
  for (const double coded : {0.499, 0.4, 0.2, 0.05}) {
    const PipelineTimes times = times_of(shape, 0.5, coded);
    const MessageSet chosen = critical_messages(shape, times);
    EXPECT_GE(chosen.count(), before);
    before = chosen.count();
    MessageSet epilogue(16), all(16);
    for (int chunk = 1; chunk < 4; ++chunk) {
      for (int m = 0; m < 16; ++m) {
        all.add(chunk, m);
        if (in_epilogue(shape, chunk, m)) epilogue.add(chunk, m);
      }
    }
    EXPECT_LT(step_seconds(shape, times, chosen), step_seconds(shape, times, epilogue));
    EXPECT_NEAR(step_seconds(shape, times, chosen), step_seconds(shape, times, all), 1e-9) << coded;
  }
  // What saves nothing is not compressed; nor is what hides.
  EXPECT_EQ(critical_messages(shape, times_of(shape, 0.5, 0.6)).count(), 0);
  const PipelineShape gpipe{PipelineSchedule::gpipe, 4, 1, 16};
  PipelineTimes hidden = times_of(gpipe, 0.5, 0.1);
  EXPECT_GT(critical_messages(gpipe, hidden).count(), 0);
  // The last stage's own sum is all that is waited for, and nothing goes back to that stage.
  hidden.tail[3] = 1000;
  EXPECT_EQ(critical_messages(gpipe, hidden).count(), 0);
}

// Of all sets of messages, by hand: none makes the step shorter, and none of those inside of it makes it as short.
TEST(MessageSlack, NoneOfTheCriticalCanBeMissed) {
  int needless = 0;
  for (const PipelineShape& shape : {PipelineShape{PipelineSchedule::one_f_one_b, 3, 1, 5},
                                     PipelineShape{PipelineSchedule::one_f_one_b, 3, 1, 5, true},
                                     PipelineShape{PipelineSchedule::one_f_one_b, 4, 1, 3},
                                     PipelineShape{PipelineSchedule::gpipe, 3, 1, 4},
                                     PipelineShape{PipelineSchedule::interleaved, 2, 2, 4},
                                     PipelineShape{PipelineSchedule::zb_h1, 3, 1, 5}}) {
    for (const double message : {0.3, 0.5, 1.7}) {
      for (const double share : {0.9, 0.5, 0.1}) {
        PipelineTimes times = times_of(shape, message, share * message);
        times.tail[0] = 0.4;
        const MessageSet critical = critical_messages(shape, times);
        const int count = (shape.all_chunks() - 1) * shape.micro_batches;
        std::vector<double> ends;  // by the set: message i is bit i
        for (std::uint32_t set = 0; set < 1U << count; ++set) {
          std::map<Message, double> shorter;
          for (int i = 0; i < count; ++i) {
            if ((set >> i & 1U) != 0)
              shorter[{1, 1 + i / shape.micro_batches, i % shape.micro_batches}] = (share - 1) * message;
          }
          ends.push_back(plain_end(shape, times, shorter));
        }
        std::uint32_t mine = 0;
        for (const auto& [chunk, m] : critical.messages())
          mine |= 1U << ((chunk - 1) * shape.micro_batches + m);
        EXPECT_NEAR(ends[mine], ends.back(), 1e-9) << name_of(shape.schedule) << " " << message;
        for (std::uint32_t inside = mine; inside != 0;) {
          inside = (inside - 1) & mine;
          EXPECT_GT(ends[inside], ends[mine] + 1e-9) << name_of(shape.schedule) << " " << message;
        }
        // A control: with one message more the step is as short, and this test would say so.
        for (int i = 0; i < count; ++i)
          needless += (mine >> i & 1U) == 0 && ends[mine | 1U << i] > ends.back() - 1e-9 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(needless, 0);
  // Of 42 that one look after another finds.
  const PipelineShape shape{PipelineSchedule::one_f_one_b, 4, 1, 16};
  EXPECT_EQ(critical_messages(shape, times_of(shape, 0.5, 0.4)).count(), 24);
}

TEST(MessageSet, IsItsText) {
  for (const char* text : {"16", "16/1:0-3.7/2:5", "4/1:0-3/2:0-3/3:0-3", "1/7:0"}) {
    const std::optional<MessageSet> set = MessageSet::parse(text);
    ASSERT_TRUE(set) << text;
    EXPECT_EQ(set->text(), text);
  }
  const MessageSet set = *MessageSet::parse("16/1:0-3.7/2:5");
  EXPECT_EQ(set.count(), 6);
  EXPECT_TRUE(set.has(1, 3) && set.has(1, 7) && set.has(2, 5));
  EXPECT_FALSE(set.has(1, 4) || set.has(2, 7) || set.has(3, 5));
  for (const char* text : {"", "all", "critical", "0", "-1", "16/", "16/1", "16/1:", "16/1:16", "16/1:3-2",
                           "16/1:1,2", "16/1:0-3.", "16 /1:0", "99999999999"})
    EXPECT_FALSE(MessageSet::parse(text)) << text;
  std::string many = "1048576";  // short, and millions of messages
  for (int chunk = 1; chunk <= 8; ++chunk) many += "/" + std::to_string(chunk) + ":0-1048575";
  EXPECT_FALSE(MessageSet::parse(many));
}

}  // namespace
}  // namespace weft
