#include "measure/summary.h"

#include <algorithm>
#include <numeric>

#include "base/statistics.h"
#include "workload/job_steps.h"

namespace weft {

namespace {

double sum(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

double at(const std::vector<double>& values, std::size_t i) { return values.empty() ? 0 : values[i]; }

}  // namespace

void add(RankSteps& steps, const StepRecord& record) {
  steps.seconds.push_back(record.seconds);
  steps.waited_seconds.push_back(record.waited_seconds);
  steps.settle_seconds.push_back(record.settle_seconds);
  steps.settle_waited_seconds.push_back(record.settle_waited_seconds);
  steps.exchange_seconds.push_back(record.exchange_seconds);
  steps.settle_exchange_seconds.push_back(record.settle_exchange_seconds);
  steps.payload_bytes.push_back(static_cast<double>(record.payload_bytes));
  steps.table_formula_bytes.push_back(static_cast<double>(record.table_formula_bytes));
}

JobSteps job_of(std::span<const RankSteps> ranks, std::span<const std::int64_t> pauses) {
  JobSteps out;
  const auto size = static_cast<double>(ranks.size());
  std::vector<std::vector<double>> seconds, settled;
  for (const RankSteps& rank : ranks) {
    settled.push_back(rank.seconds);
    seconds.push_back(rank.seconds);
    for (std::size_t i = 0; i < rank.seconds.size(); ++i) seconds.back()[i] -= at(rank.settle_seconds, i);
  }
  out.seconds = job_steps(seconds, pauses);
  out.settled_seconds = job_steps(settled, pauses);
  for (std::size_t i = 0; i < ranks.front().seconds.size(); ++i) {
    double waited = 0, exchanged = 0, bytes = 0, formula = 0;
    double rank_seconds = 0, rank_waited = 0, rank_exchanged = 0;
    for (const RankSteps& rank : ranks) {
      waited += (rank.waited_seconds[i] - at(rank.settle_waited_seconds, i)) / size;
      rank_seconds += rank.seconds[i] / size;
      rank_waited += rank.waited_seconds[i] / size;
      exchanged += (rank.exchange_seconds[i] - at(rank.settle_exchange_seconds, i)) / size;
      rank_exchanged += rank.exchange_seconds[i] / size;
      bytes = std::max(bytes, rank.payload_bytes[i]);
      formula = std::max(formula, rank.table_formula_bytes[i]);
    }
    out.waited_seconds.push_back(waited);
    out.exchange_seconds.push_back(exchanged);
    out.rank_exchange_seconds.push_back(rank_exchanged);
    out.table_formula_bytes.push_back(formula);
    out.rank_seconds.push_back(rank_seconds);
    out.rank_waited_seconds.push_back(rank_waited);
    out.payload_bytes.push_back(bytes);
  }
  return out;
}

std::optional<double> hidden_share(std::span<const double> waited_seconds,
                                   std::span<const double> exchange_seconds) {
  const double exchanged = sum(exchange_seconds);
  if (!(exchanged > 0)) return std::nullopt;
  // Clocks of two threads may differ by the time of a wake-up.
  return std::clamp(1 - sum(waited_seconds) / exchanged, 0.0, 1.0);
}

void summarize(const JobSteps& job, double tokens, TrainSummary& summary) {
  summary.seconds = sum(job.rank_seconds);
  summary.tokens_per_second = summary.seconds > 0 ? tokens / summary.seconds : 0;
  summary.waiting_share = summary.seconds > 0 ? sum(job.rank_waited_seconds) / summary.seconds : 0;
  summary.step_seconds = job.settled_seconds;
  summary.step_seconds_median = median(job.settled_seconds);
  summary.payload_bytes_per_step = median(job.payload_bytes);
  summary.hidden_share = hidden_share(job.rank_waited_seconds, job.rank_exchange_seconds);
}

}  // namespace weft
