// Config, units, placement, random numbers, pool.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <set>
#include <string>

#include "base/log.h"
#include "base/units.h"
#include "base/worker_pool.h"
#include "message_of.h"
#include "weft/config.h"
#include "weft/error.h"
#include "weft/random.h"

namespace weft {
namespace {

using testing::message_of;

TEST(Units, Sizes) {
  EXPECT_EQ(parse_bytes("8192"), 8192u);
  EXPECT_EQ(parse_bytes("64KiB"), 65536u);
  EXPECT_EQ(parse_bytes("1.5 MiB"), 1572864u);
  EXPECT_EQ(parse_bytes("10MB"), 10'000'000u);
  for (const char* bad : {"", "x", "-1", "1.5", "nan", "inf", "5 apples", "1e300GiB", "KiB", "64kib"}) {
    EXPECT_THROW(parse_bytes(bad), UsageError) << bad;
  }
  EXPECT_EQ(bytes_text(65536), "64 KiB");
}

TEST(Units, Durations) {
  EXPECT_EQ(parse_duration("50ms"), 50ms);
  EXPECT_EQ(parse_duration("1.5s"), 1500ms);
  EXPECT_EQ(parse_duration("2min"), 120s);
  EXPECT_EQ(parse_duration("never"), kNever);
  for (const char* bad : {"", "50", "nan s", "-1s", "1h", "ms"})
    EXPECT_THROW(parse_duration(bad), UsageError) << bad;
  EXPECT_EQ(duration_text(50ms), "50 ms");
}

TEST(Clock, NeverIsNotPassed) {
  static_assert(later(5s, 3s) == 8s);
  static_assert(later(5s, kNever) == kNever && later(kNever, 5s) == kNever &&
                later(Time{0}, kNever) == kNever);
  static_assert(later(kNever - 1s, 2s) == kNever);
}

Config from(std::map<std::string, std::string> environment) {
  std::vector<std::string> names;
  for (const auto& [name, value] : environment) names.push_back(name);
  return Config::from_environment(
      [&](const char* name) -> const char* {
        const auto it = environment.find(name);
        return it == environment.end() ? nullptr : it->second.c_str();
      },
      names);
}

TEST(Config, ReadsVariablesAndNamesTheBadOne) {
  const Config c = from({{"WEFT_EAGER_LIMIT", "0"}, {"WEFT_TIMEOUT", "3s"}, {"WEFT_TRANSPORT", "tcp"}});
  EXPECT_EQ(c.eager_limit, 0u);
  EXPECT_EQ(c.operation_timeout, 3s);
  EXPECT_EQ(c.transport, "tcp");
  EXPECT_EQ(message_of([] { from({{"WEFT_TIMEOUT", "3"}}); }),
            "WEFT_TIMEOUT: '3' is not a duration (write for example 200us, 50ms, 1.5s, 2min or never)");
  EXPECT_EQ(message_of([] { from({{"WEFT_TRANSPORT", "pigeon"}}); }),
            "WEFT_TRANSPORT: 'pigeon' is none of: auto, threads, tcp, mpi");
  EXPECT_EQ(message_of([] { from({{"WEFT_TIMEOUTS", "3s"}}); }),
            "WEFT_TIMEOUTS is no variable of weft; `weft info` lists them");
  EXPECT_THROW(from({{"WEFT_HEARTBEAT", "0s"}}), UsageError);
}

TEST(Config, EveryKnobIsDescribedAndTheTokenIsNot) {
  const Config c = from({{"WEFT_TOKEN", "very-secret-value"}});
  std::set<std::string> variables;
  for (const KnobRow& row : describe(c)) {
    EXPECT_TRUE(variables.insert(row.variable).second) << row.variable;
    EXPECT_FALSE(row.meaning.empty() || row.unit.empty() || row.fallback.empty()) << row.variable;
    EXPECT_EQ(row.value.find("secret"), std::string::npos) << row.variable;
    if (row.variable == "WEFT_TOKEN") {
      EXPECT_EQ(row.value, "set");
      EXPECT_EQ(row.fallback, "not set");
    }
  }
  EXPECT_EQ(variables.count("WEFT_TOKEN"), 1u);
}

TEST(Philox, KnownAnswers) {
  // From the test vectors that the authors of the generator published (Random123, kat_vectors, philox4x32
  // 10).
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, {0xffffffffu, 0xffffffffu}),
            (PhiloxCounter{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
            (PhiloxCounter{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Random, DependsOnWhatIsDrawnOnly) {
  Random a(7, 1, 2, 3);
  Random b(7, 1, 2, 3);
  Random other(7, 1, 2, 4);
  int equal = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::uint32_t x = a();
    EXPECT_EQ(x, b());
    equal += x == other() ? 1 : 0;
  }
  EXPECT_LT(equal, 3);
  double sum = 0;
  for (int i = 0; i < 10000; ++i) sum += a.uniform();
  EXPECT_NEAR(sum / 10000, 0.5, 5 * 0.2887 / 100);  // five standard errors of the mean
}

TEST(WorkerPool, RunsEverythingBeforeItEnds) {
  std::atomic<int> ran{0};
  auto work = [&] { ran.fetch_add(1); };
  {
    WorkerPool pool(2);
    for (int i = 0; i < 1000; ++i) pool.submit(work);
  }
  EXPECT_EQ(ran.load(), 1000);
}

TEST(Log, LevelsAreNamed) {
  EXPECT_THROW(Log("loud", 0), UsageError);
  const Log log("warning", 0);
  EXPECT_TRUE(log.enabled(LogLevel::error));
  EXPECT_FALSE(log.enabled(LogLevel::info));
}

TEST(Log, ALineHasLevelAndRank) {
  Log log("info", 3);
  ::testing::internal::CaptureStderr();
  log.info("a line");
  log.debug("another");  // control: below the level
  const std::string said = ::testing::internal::GetCapturedStderr();
  for (const char* part : {"info", "rank 3", "a line"})
    EXPECT_NE(said.find(part), std::string::npos) << part << " in: " << said;
  EXPECT_EQ(said.find("another"), std::string::npos) << said;
}

}  // namespace
}  // namespace weft
