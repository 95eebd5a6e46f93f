// Selection with error feedback against the pass over memory that it contains: estimate_thresholds +
// accumulate + cut of all blocks, beside staged = gradient + residual over the same three arrays. One thread,
// k = 1 %, 25 M elements unless WEFT_BENCH_LENGTH says otherwise. The two are interleaved; `ratio` is the
// ratio of their medians. Below them the codecs: milliseconds to encode and to decode the entries of one
// selection, and their bytes as a share of coo's.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/fold.h"
#include "kernels/select.h"
#include "wire/codec.h"
#include "workload/distributions.h"

namespace weft {
namespace {

std::int64_t length() {
  const char* told = std::getenv("WEFT_BENCH_LENGTH");
  return told != nullptr ? std::atoll(told) : 25'000'000;
}

template <class F>
double seconds(F f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

// The vectors of the distribution that is measured now; one at a time is in memory.
struct Data {
  std::vector<float> gradient, residual, staged;
  explicit Data(Distribution distribution) {
    const auto n = static_cast<std::size_t>(length());
    for (std::vector<float>* vector : {&gradient, &residual, &staged}) vector->resize(n);
    draw({.distribution = distribution, .seed = 1}, gradient);
    draw({.distribution = distribution, .seed = 2}, residual);
  }
  StagedStep step() { return {gradient, residual, staged}; }
};

struct Selection {
  Deal deal;
  std::vector<std::int64_t> quotas;
  Candidates candidates;
  std::vector<Entries> out;

  explicit Selection(int blocks)
      : deal(Deal::Kind::dealt, blocks, length()), out(static_cast<std::size_t>(blocks)) {
    for (int b = 0; b < blocks; ++b) quotas.push_back(deal.quota(b, length() / 100));
  }
};

void select_beside_a_pass(benchmark::State& state, Distribution distribution, int blocks) {
  Data data(distribution);
  Selection selection(blocks);
  std::vector<double> passes, estimates, accumulations, cuts, all;
  const auto one_round = [&] {
    const StagedStep step = data.step();
    passes.push_back(seconds([&] {
      fold_two(Dense(step.staged), std::as_bytes(step.gradient), std::as_bytes(step.residual),
               Reduction::sum);
    }));
    estimates.push_back(
        seconds([&] { estimate_thresholds(step, selection.deal, selection.quotas, selection.candidates); }));
    accumulations.push_back(seconds([&] { accumulate(step, selection.deal, selection.candidates); }));
    cuts.push_back(seconds([&] {
      for (int b = 0; b < blocks; ++b) {
        const auto i = static_cast<std::size_t>(b);
        cut(step.staged, selection.deal, b, selection.quotas[i], selection.candidates, selection.out[i]);
      }
    }));
    all.push_back(estimates.back() + accumulations.back() + cuts.back());
  };
  one_round();  // warms up
  for (std::vector<double>* times : {&passes, &estimates, &accumulations, &cuts, &all}) times->clear();
  for (auto _ : state) {
    one_round();
    state.SetIterationTime(all.back());
  }
  std::size_t candidates = 0;
  for (const BlockCandidates& block : selection.candidates.blocks) candidates += block.count;
  state.counters["pass_ms"] = 1e3 * median(passes);
  state.counters["estimate_ms"] = 1e3 * median(estimates);
  state.counters["accumulate_ms"] = 1e3 * median(accumulations);
  state.counters["cut_ms"] = 1e3 * median(cuts);
  state.counters["candidates_of_k"] = static_cast<double>(candidates) / static_cast<double>(length() / 100);
  state.counters["ratio"] = median(all) / median(passes);
}

void code_a_selection(benchmark::State& state, wire::SparseCodec codec, int blocks) {
  Data data(Distribution::gaussian);
  Selection selection(blocks);
  select_topk(data.step(), selection.deal, selection.quotas, selection.candidates, selection.out);
  std::vector<double> encodes, decodes;
  std::vector<std::byte> bytes;
  std::size_t entries = 0;
  Entries out;
  for (auto _ : state) {
    bytes.clear();
    entries = 0;
    encodes.push_back(seconds([&] {
      for (int b = 0; b < blocks; ++b) {
        const Entries& block = selection.out[static_cast<std::size_t>(b)];
        entries += block.size();
        wire::encode(codec, block, selection.deal.count(b), false, bytes);
      }
    }));
    decodes.push_back(seconds([&] {
      std::span<const std::byte> rest(bytes);
      for (int b = 0; b < blocks; ++b) {
        const wire::ExpectedBlock expected{.length = selection.deal.count(b),
                                           .max_count = selection.deal.count(b)};
        rest = rest.subspan(wire::decode(codec, rest, expected, out).bytes);
      }
    }));
    state.SetIterationTime(encodes.back() + decodes.back());
  }
  state.counters["encode_ms"] = 1e3 * median(encodes);
  state.counters["decode_ms"] = 1e3 * median(decodes);
  state.counters["bytes_per_entry"] = static_cast<double>(bytes.size()) / static_cast<double>(entries);
  state.counters["of_coo"] =
      static_cast<double>(bytes.size()) / static_cast<double>(8 * entries + 4 * selection.out.size());
}

void register_all() {
  for (const Distribution distribution : kDistributions) {
    for (const int blocks : {1, 4, 8}) {
      const std::string name = "select/" + std::string(name_of(distribution)) + "/" + std::to_string(blocks);
      benchmark::RegisterBenchmark(name.c_str(), select_beside_a_pass, distribution, blocks)
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond)
          ->Iterations(11);
    }
  }
  for (const wire::SparseCodec codec :
       {wire::SparseCodec::coo, wire::SparseCodec::packed, wire::SparseCodec::packed_bf16}) {
    const std::string name = "codec/" + std::string(name_of(codec));
    benchmark::RegisterBenchmark(name.c_str(), code_a_selection, codec, 8)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(11);
  }
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  weft::register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
