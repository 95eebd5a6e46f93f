// On which thread lists of entries are coded and decoded: never the communication thread, which others wait
// for. The linker sends every call of the codec through this file (tests/CMakeLists.txt).
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/worker_pool.h"
#include "collectives/sparse_allreduce/call.h"
#include "engine/communication_thread.h"
#include "transports/threads.h"
#include "weft/engine.h"
#include "weft/random.h"
#include "weft/sparse.h"
#include "wire/codec.h"

namespace weft {
namespace {

thread_local bool communicates = false;  // set by what runs on a communication thread
struct Calls {
  std::atomic<int> here{0};  // on a communication thread
  std::atomic<int> elsewhere{0};
  void count() { ++(communicates ? here : elsewhere); }
};
Calls encodings, decodings;

}  // namespace

namespace wire {
// Names as the linker knows them.
#define WEFT_ENCODE "_ZN4weft4wire6encodeENS0_11SparseCodecENS_11EntriesViewElbRSt6vectorISt4byteSaIS4_EE"
#define WEFT_DECODE                                                                                      \
  "_ZN4weft4wire6decodeENS0_11SparseCodecESt4spanIKSt4byteLm18446744073709551615EERKNS0_13ExpectedBlock" \
  "ERNS_7EntriesE"
void real_encode(SparseCodec codec, EntriesView entries, std::int64_t length, bool non_finite,
                 std::vector<std::byte>& into) __asm__("__real_" WEFT_ENCODE);
void counted_encode(SparseCodec codec, EntriesView entries, std::int64_t length, bool non_finite,
                    std::vector<std::byte>& into) __asm__("__wrap_" WEFT_ENCODE);
void counted_encode(SparseCodec codec, EntriesView entries, std::int64_t length, bool non_finite,
                    std::vector<std::byte>& into) {
  encodings.count();
  real_encode(codec, entries, length, non_finite, into);
}
Decoded real_decode(SparseCodec codec, std::span<const std::byte> bytes, const ExpectedBlock& expected,
                    Entries& out) __asm__("__real_" WEFT_DECODE);
Decoded counted_decode(SparseCodec codec, std::span<const std::byte> bytes, const ExpectedBlock& expected,
                       Entries& out) __asm__("__wrap_" WEFT_DECODE);
Decoded counted_decode(SparseCodec codec, std::span<const std::byte> bytes, const ExpectedBlock& expected,
                       Entries& out) {
  decodings.count();
  return real_decode(codec, bytes, expected, out);
}
}  // namespace wire

namespace {

constexpr int kRanks = 4;
constexpr std::int64_t kLength = 400'000;
constexpr std::int64_t kEntries = 40'000;  // of which a list takes more than 200 us

// One operation on all ranks.
void run(const SparseOptions& options, WorkerPool* pool) {
  for (Calls* calls : {&encodings, &decodings}) {
    calls->here = 0;
    calls->elsewhere = 0;
  }
  ThreadsWorld world(ThreadsOptions{.ranks = kRanks, .eager_limit = 8192, .tamper = {}});
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < kRanks; ++r)
    engines.push_back(std::make_unique<Engine>(world.transport(r), EngineOptions{}, pool));
  std::vector<std::unique_ptr<CommunicationThread>> threads;
  for (auto& engine : engines) threads.push_back(std::make_unique<CommunicationThread>(*engine));
  std::vector<std::vector<float>> gradients;
  std::vector<SparseState> states;
  std::vector<SparseResult> results(kRanks);
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    Random random(3, 8, r, 0);
    gradients.emplace_back(static_cast<std::size_t>(kLength));
    for (float& g : gradients.back()) g = static_cast<float>(random.uniform()) - 0.5F;
    states.emplace_back(kLength);
  }
  std::vector<Ticket> tickets;
  for (std::size_t r = 0; r < kRanks; ++r) {
    tickets.push_back(engines[r]->submit(engines[r]->world(), {}, [&, r](Comm comm) {
      communicates = true;
      return sparse_all_reduce(comm, gradients[r], states[r], results[r], options);
    }));
  }
  for (const Ticket& ticket : tickets) ticket.wait();
}

struct Case {
  std::string_view algorithm;
  int teams;
  std::string_view gather;
};

TEST(CodingThreads, LongListsAreTheWorkersBusiness) {
  std::vector<Case> cases = {{"spardl", 2, "r-sag"}, {"spardl", 2, "b-sag"}, {"spardl", 4, "b-sag"}};
  for (const SparseAlgorithm& row : sparse_algorithms()) {
    if (row.selects) cases.push_back({row.name, 1, "auto"});
  }
  WorkerPool pool(2);
  for (const Case& c : cases) {
    SparseOptions options;
    options.algorithm = c.algorithm;
    options.k = kEntries;
    options.teams = c.teams;
    options.gather = c.gather;
    const std::string name =
        std::string(c.algorithm) + " " + std::to_string(c.teams) + " " + std::string(c.gather);
    run(options, &pool);
    EXPECT_EQ(encodings.here, 0) << name;
    EXPECT_EQ(decodings.here, 0) << name;
    const int encoded = encodings.elsewhere;
    const int decoded = decodings.elsewhere;
    EXPECT_GE(encoded, kRanks - 1) << name << ": the codec was not seen";
    EXPECT_GE(decoded, kRanks - 1) << name << ": the codec was not seen";
    // Control: where there is no pool all of it is done on communication threads, and is seen there.
    run(options, nullptr);
    EXPECT_EQ(encodings.here, encoded) << name;
    EXPECT_EQ(decodings.here, decoded) << name;
    EXPECT_EQ(encodings.elsewhere + decodings.elsewhere, 0) << name;
  }
}

}  // namespace
}  // namespace weft
