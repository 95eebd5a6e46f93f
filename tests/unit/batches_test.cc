// Which rank trains on what, and random numbers that a model draws without torch.
#include "data/batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "data/permutation.h"
#include "data/prefetch.h"
#include "data/zipf.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft_torch/models/dropout_mask.h"
#include "weft_torch/models/weights.h"

namespace weft {
namespace {

// Token i is i: what was read shows where it stood.
class Numbers final : public DataSource {
 public:
  explicit Numbers(std::int64_t tokens) : tokens_(tokens) {}
  std::int64_t vocabulary() const override { return tokens_; }
  std::int64_t tokens() const override { return tokens_; }
  void read(std::int64_t first, std::span<std::int64_t> out) const override {
    if (first < 0 || first + static_cast<std::int64_t>(out.size()) > tokens_) throw UsageError("outside");
    std::iota(out.begin(), out.end(), first);
  }
  std::string description() const override { return "numbers"; }

 private:
  std::int64_t tokens_;
};

Batches batches(BatchKind kind, std::int64_t tokens, BatchOptions options) {
  options.kind = kind;
  options.seed = 9;
  return Batches(std::make_shared<Numbers>(tokens), options);
}

Batches batches(std::int64_t tokens, std::int64_t sequences, int rank, int size, bool shuffle = true) {
  return Batches(
      std::make_shared<Numbers>(tokens),
      {.sequences = sequences, .length = 3, .seed = 9, .shuffle = shuffle, .rank = rank, .size = size});
}

TEST(Permutation, VisitsEveryPlaceOnce) {
  for (const std::int64_t n : {1, 2, 3, 4, 5, 16, 17, 1000, 4097}) {
    std::vector<int> seen(static_cast<std::size_t>(n));
    const Permutation order(n, 3, 1);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = order(i);
      ASSERT_TRUE(at >= 0 && at < n);
      ++seen[static_cast<std::size_t>(at)];
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), n);
  }
}

TEST(Permutation, MixesAndDependsOnItsKey) {
  constexpr std::int64_t n = 1000;
  const Permutation a(n, 3, 1), again(n, 3, 1), epoch(n, 3, 2), seed(n, 4, 1);
  int stays = 0, neighbours = 0, same_epoch = 0, same_seed = 0;
  for (std::int64_t i = 0; i + 1 < n; ++i) {
    EXPECT_EQ(a(i), again(i));
    stays += a(i) == i;
    neighbours += std::abs(a(i) - a(i + 1)) == 1;
    same_epoch += a(i) == epoch(i);
    same_seed += a(i) == seed(i);
  }
  // Expected 1, 2, 1 and 1: Poisson, more than 12 has a chance below 1e-6.
  EXPECT_LE(std::max({stays, neighbours, same_epoch, same_seed}), 12);
}

TEST(Batches, CoverEachSequenceOncePerEpochForAnyNumberOfRanks) {
  for (int size = 1; size <= 4; ++size) {
    for (const std::int64_t tokens : {4, 31, 61, 100}) {
      for (const std::int64_t sequences : {1, 3, 4, 7}) {
        const Batches one = batches(tokens, sequences, 0, 1);
        std::map<std::int64_t, int> seen;
        for (std::int64_t step = one.steps_per_epoch(); step < 2 * one.steps_per_epoch(); ++step) {
          std::vector<std::int64_t> together;
          for (int rank = 0; rank < size; ++rank) {
            const Batches share = batches(tokens, sequences, rank, size);
            const TokenBatch batch = share.at(step);
            EXPECT_EQ(batch.epoch, 1);
            EXPECT_EQ(batch.first_sequence, static_cast<std::int64_t>(together.size()));
            for (const std::int64_t s : share.sequences_of(step)) together.push_back(s);
            EXPECT_EQ(static_cast<std::int64_t>(batch.tokens.size()), batch.sequences * 3);
          }
          EXPECT_EQ(together, one.sequences_of(step));  // the global batch does not depend on the ranks
          for (const std::int64_t s : together) ++seen[s];
        }
        EXPECT_EQ(static_cast<std::int64_t>(seen.size()), one.sequences_per_epoch());
        for (const auto& [sequence, times] : seen) EXPECT_EQ(times, 1) << sequence;
      }
    }
  }
}

TEST(Batches, EpochsDifferAndSharesAreUneven) {
  const Batches one = batches(100, 7, 0, 1);  // 33 sequences: 7 7 7 7 5
  EXPECT_EQ(one.sequences_per_epoch(), 33);
  EXPECT_EQ(one.steps_per_epoch(), 5);
  EXPECT_EQ(one.at(4).global_sequences, 5);
  EXPECT_EQ(one.at(5).epoch, 1);
  EXPECT_NE(one.sequences_of(0), one.sequences_of(5));
  EXPECT_EQ(batches(100, 7, 0, 1, false).sequences_of(5), (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(batches(100, 7, 0, 3).at(0).sequences, 3);
  EXPECT_EQ(batches(100, 7, 2, 3).at(0).sequences, 2);
  const TokenBatch none = batches(100, 2, 3, 4).at(0);
  EXPECT_EQ(none.sequences, 0);
  EXPECT_TRUE(none.tokens.empty());
}

TEST(Batches, TargetsAreTheSuccessors) {
  const TokenBatch batch = batches(61, 4, 1, 2).at(2);
  const std::vector<std::int64_t> expected = batches(61, 4, 1, 2).sequences_of(2);
  for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
    EXPECT_EQ(batch.tokens[i], expected[i / 3] * 3 + static_cast<std::int64_t>(i % 3));
    EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
  }
}

TEST(Pairs, AreAWindowAndItsSuccessor) {
  const Batches pairs = batches(BatchKind::pairs, 61, {.sequences = 4, .length = 3, .rank = 1, .size = 2});
  EXPECT_EQ(pairs.sequences_per_epoch(), 19);  // of 20 windows
  for (std::int64_t step = 0; step < pairs.steps_per_epoch(); ++step) {
    const TokenBatch batch = pairs.at(step);
    const std::vector<std::int64_t> sequences = pairs.sequences_of(step);
    ASSERT_EQ(batch.source.size(), static_cast<std::size_t>(3 * batch.sequences));
    ASSERT_EQ(batch.targets.size(), batch.tokens.size());
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
      EXPECT_EQ(batch.source[i], sequences[i / 3] * 3 + static_cast<std::int64_t>(i % 3));
      EXPECT_EQ(batch.tokens[i], batch.source[i] + 3);
      EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
    }
  }
  EXPECT_EQ(batches(BatchKind::pairs, 7, {.sequences = 1, .length = 3}).at(0).source,
            (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_THROW(batches(BatchKind::pairs, 6, {.sequences = 1, .length = 3}), UsageError);  // no last target
  EXPECT_TRUE(batches(61, 4, 1, 2).at(2).source.empty());
}

// What a batch of spans says, checked against the text it was made of. The text's token i is i, so a token
// shows where it stood; only the mask stands twice.
struct Question {
  int shown = 0, masked_inside = 0;
  bool ok = true;
};
Question question_of(const TokenBatch& batch, std::int64_t row, std::int64_t sequence) {
  const std::int64_t length = batch.length, asked = question_length(length);
  const auto token = [&](std::int64_t i) { return batch.tokens[static_cast<std::size_t>(row * length + i)]; };
  const std::int64_t first = batch.targets[static_cast<std::size_t>(2 * row)];
  const std::int64_t last = batch.targets[static_cast<std::size_t>(2 * row + 1)];
  Question out;
  out.ok = first >= asked && last > first && last < length && last - first < asked;
  for (std::int64_t i = asked; i < length; ++i) out.ok = out.ok && token(i) == sequence * length + i;
  for (std::int64_t i = 0; i < asked; ++i) {
    const bool inside = first + i <= last;
    out.masked_inside += inside && token(i) == kMask ? 1 : 0;
    out.shown += token(i) != kMask ? 1 : 0;
    out.ok = out.ok && (token(i) == kMask || (inside && token(i) == sequence * length + first + i));
  }
  return out;
}

TEST(Spans, AskForThePlacesOfASpan) {
  for (const std::int64_t length : {4, 5, 12, 100}) {
    const Batches spans = batches(BatchKind::spans, 40 * length + 1, {.sequences = 8, .length = length});
    EXPECT_EQ(spans.sequences_per_epoch(), 40);
    std::set<std::pair<std::int64_t, std::int64_t>> places;
    for (std::int64_t step = 0; step < 10; ++step) {
      TokenBatch batch = spans.at(step);
      const std::vector<std::int64_t> sequences = spans.sequences_of(step);
      ASSERT_EQ(batch.targets.size(), 2 * sequences.size());
      for (std::size_t row = 0; row < sequences.size(); ++row) {
        const auto r = static_cast<std::int64_t>(row);
        const Question question = question_of(batch, r, sequences[row]);
        EXPECT_TRUE(question.ok) << length << ": sequence " << sequences[row];
        EXPECT_EQ(question.masked_inside, 1);
        EXPECT_GE(question.shown, 1);
        places.insert({batch.targets[2 * row], batch.targets[2 * row + 1]});
      }
      batch.targets[1] += 1;  // control: another place is not where the question stood
      const Question wrong = question_of(batch, 0, sequences[0]);
      EXPECT_TRUE(!wrong.ok || wrong.masked_inside != 1) << length;
    }
    EXPECT_GE(places.size(), length == 4 ? 1u : length == 5 ? 2u : 10u);
  }
  EXPECT_THROW(batches(BatchKind::spans, 1000, {.length = 3}), UsageError);
}

TEST(Spans, AreAFunctionOfSeedEpochAndSequence) {
  const auto of = [](std::uint64_t seed, int rank, int size, std::int64_t step) {
    BatchOptions options{.kind = BatchKind::spans, .sequences = 7, .length = 20, .seed = seed};
    options.rank = rank;
    options.size = size;
    options.shuffle = false;
    return Batches(std::make_shared<Numbers>(401), options).at(step);  // 20 sequences: 7 7 6
  };
  const TokenBatch whole = of(9, 0, 1, 1);
  std::vector<std::int64_t> tokens, targets;
  for (int rank = 0; rank < 3; ++rank) {
    const TokenBatch share = of(9, rank, 3, 1);
    tokens.insert(tokens.end(), share.tokens.begin(), share.tokens.end());
    targets.insert(targets.end(), share.targets.begin(), share.targets.end());
  }
  EXPECT_EQ(tokens, whole.tokens);
  EXPECT_EQ(targets, whole.targets);
  EXPECT_NE(of(9, 0, 1, 4).targets, whole.targets);   // the next epoch, the same sequences
  EXPECT_NE(of(10, 0, 1, 1).targets, whole.targets);  // another seed
}

TEST(Batches, RefuseWhatMakesNoBatch) {
  EXPECT_THROW(batches(3, 1, 0, 1), UsageError);  // a sequence of 3 has no last target
  EXPECT_THROW(batches(0, 1, 0, 1), UsageError);
  EXPECT_THROW(batches(100, 0, 0, 1), UsageError);
  EXPECT_THROW(batches(100, 1, 2, 2), UsageError);
  EXPECT_THROW(batches(100, 1, -1, 2), UsageError);
}

TEST(Prefetch, GivesWhatAtGivesFromAnyStep) {
  for (const std::int64_t first : {0, 3, 11}) {
    const Batches plain = batches(100, 7, 1, 2);
    Prefetch ahead(plain, first);
    for (std::int64_t step = first; step < first + 12; ++step, ahead.advance()) {
      EXPECT_EQ(ahead.step(), step);
      if (step % 3 == 0) continue;  // a batch that nobody asks for
      EXPECT_EQ(ahead.next().tokens, plain.at(step + 1).tokens);
      EXPECT_EQ(ahead.current().tokens, plain.at(step).tokens);
      EXPECT_EQ(ahead.current().step, step);
    }
  }
}

TEST(Prefetch, RethrowsWhatReadingThrew) {
  class Broken final : public DataSource {
   public:
    std::int64_t vocabulary() const override { return 1; }
    std::int64_t tokens() const override { return 100; }
    void read(std::int64_t, std::span<std::int64_t>) const override { throw UsageError("unreadable"); }
    std::string description() const override { return "broken"; }
  };
  Prefetch ahead(Batches(std::make_shared<Broken>(), {.sequences = 1, .length = 3}), 0);
  EXPECT_THROW(ahead.current(), UsageError);
  EXPECT_THROW(ahead.next(), UsageError);
}

TEST(Zipf, HasItsDistributionAndReadsAnywhere) {
  constexpr std::int64_t kTokens = 200'000, kWords = 50;
  const ZipfSource source(kWords, kTokens, 5);
  std::vector<std::int64_t> all(kTokens), part(10);
  source.read(0, all);
  source.read(1234, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + 1234));
  std::vector<double> counts(kWords);
  for (const std::int64_t id : all) ++counts.at(static_cast<std::size_t>(id));
  double sum = 0;
  for (int w = 1; w <= kWords; ++w) sum += 1.0 / w;
  for (int w = 0; w < kWords; ++w) {
    const double expected = kTokens / sum / (w + 1);  // binomial: 5 standard deviations
    EXPECT_NEAR(counts[static_cast<std::size_t>(w)], expected, 5 * std::sqrt(expected)) << w;
  }
  EXPECT_THROW(ZipfSource(0, 1, 1), UsageError);
}

// The lanes against weft/random.h, one element at a time.
TEST(DropoutMask, EqualsPhiloxAndDoesNotDependOnTheCut) {
  const DropoutKey key{.seed = 0x1234'5678'9abcu, .step = 77, .site = 3};
  for (const std::int64_t features : {1, 8, 32, 128, 384, 200}) {
    std::vector<float> mask(static_cast<std::size_t>(6 * features));
    write_dropout_mask(key, 0.25, {.first_token = 1000, .features = features}, mask);
    const PhiloxCounter mixed = philox({0x6472'6f70u, 3, 0, 0}, {0x5678'9abcu, 0x1234u});
    for (std::int64_t t = 0; t < 6; ++t) {
      for (std::int64_t f = 0; f < features; ++f) {
        const auto lane = static_cast<std::uint32_t>(f / 128 * 16 + f % 16);
        const auto half = static_cast<std::uint32_t>(f % 128 / 16);
        const PhiloxCounter word =
            philox({lane, static_cast<std::uint32_t>(1000 + t), 77, 0}, {mixed[0], mixed[1]});
        const bool kept = (word[half / 2] >> 16 * (half % 2) & 0xffffu) >= 16384;
        ASSERT_EQ(mask[static_cast<std::size_t>(t * features + f)], kept ? 4.0f / 3.0f : 0.0f)
            << t << " " << f;
      }
    }
    std::vector<float> later(static_cast<std::size_t>(2 * features));
    write_dropout_mask(key, 0.25, {.first_token = 1004, .features = features}, later);
    EXPECT_TRUE(std::equal(later.begin(), later.end(), mask.begin() + 4 * features));
  }
}

TEST(DropoutMask, DropsAsManyAsAskedAndDiffersBySite) {
  std::vector<float> mask(384 * 500), other(mask.size());
  for (const double p : {0.0, 0.1, 0.5, 0.9}) {
    write_dropout_mask({.seed = 1, .site = 0}, p, {.features = 384}, mask);
    const auto n = static_cast<double>(mask.size());
    const auto dropped = static_cast<double>(std::count(mask.begin(), mask.end(), 0.0f));
    EXPECT_NEAR(dropped / n, p, 5 * std::sqrt(p * (1 - p) / n) + 1e-5);
    EXPECT_NEAR(*std::max_element(mask.begin(), mask.end()), 1 / (1 - p), 1e-3);
  }
  write_dropout_mask({.seed = 1, .site = 0}, 0.5, {.features = 384}, mask);
  write_dropout_mask({.seed = 1, .site = 1}, 0.5, {.features = 384}, other);
  double same = 0;
  for (std::size_t i = 0; i < mask.size(); ++i) same += mask[i] == other[i] ? 1 : 0;
  EXPECT_NEAR(same / static_cast<double>(mask.size()), 0.5, 0.01);
}

TEST(Weights, AreFunctionsOfSeedAndName) {
  std::vector<float> a(1000), b(1000), part(10);
  fill_normal(1, "layer.0.weight", 0.5f, 0, a);
  fill_normal(1, "layer.0.weight", 0.5f, 0, b);
  fill_normal(1, "layer.0.weight", 0.5f, 0, part);
  EXPECT_EQ(a, b);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), a.begin()));
  fill_normal(1, "layer.0.weight", 0.5f, 333, part);  // from any element on
  EXPECT_TRUE(std::equal(part.begin(), part.end(), a.begin() + 333));
  fill_normal(1, "layer.1.weight", 0.5f, 0, b);
  EXPECT_NE(a, b);
  fill_normal(2, "layer.0.weight", 0.5f, 0, b);
  EXPECT_NE(a, b);
  fill_uniform(1, "x", 0.25f, 0, a);
  fill_uniform(1, "x", 0.25f, 777, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), a.begin() + 777));
  EXPECT_LT(*std::max_element(a.begin(), a.end()), 0.25f);
  EXPECT_GT(*std::min_element(a.begin(), a.end()), -0.25f);
  EXPECT_NEAR(std::accumulate(a.begin(), a.end(), 0.0) / 1000, 0, 5 * 0.25 / std::sqrt(3.0 * 1000));
}

TEST(Words, AreLogUniform) {
  constexpr int kVocabulary = 20, kDraws = 100'000;
  std::vector<std::int64_t> words(kDraws);
  draw_words(3, 1, kVocabulary, words);
  std::vector<double> counts(kVocabulary);
  for (const std::int64_t w : words) ++counts.at(static_cast<std::size_t>(w));
  for (int w = 0; w < kVocabulary; ++w) {
    const double expected = kDraws * std::log((w + 2.0) / (w + 1.0)) / std::log(kVocabulary + 1.0);
    EXPECT_NEAR(counts[static_cast<std::size_t>(w)], expected, 5 * std::sqrt(expected)) << w;
  }
}

}  // namespace
}  // namespace weft
