// What a step of data parallel brought: results of parameters, who is to blame where there are none.
#include <algorithm>
#include <cmath>

#include "data_parallel/data_parallel.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("data parallel: " + what); }

template <class T>
void copy_unless_there(std::span<const T> from, std::span<T> to) {
  if (from.data() != to.data()) std::ranges::copy(from, to.begin());
}

}  // namespace

const BucketRun& DataParallel::finished_run(int parameter, std::size_t count) const {
  if (parameter < 0 || parameter >= plan_.num_parameters())
    refuse("there is no parameter " + std::to_string(parameter));
  if (static_cast<std::int64_t>(count) != plan_.parameter(parameter).count) {
    refuse("room for " + std::to_string(count) + " elements of '" + plan_.parameter(parameter).name + "'");
  }
  const BucketRun& run = *runs_[static_cast<std::size_t>(plan_.bucket_of(parameter))];
  if (at_ == At::ended) {
    const Ticket& ticket = tickets_[run.ticket];
    if (!ticket.done()) refuse("the result of '" + plan_.parameter(parameter).name + "' is not here yet");
    if (ticket.error()) std::rethrow_exception(ticket.error());
  } else if (!has_result_) {
    refuse("there is no result of '" + plan_.parameter(parameter).name + "'");
  }
  if (!run.finite()) throw UsageError(verdicts().text);
  return run;
}

void DataParallel::result_of(int parameter, std::span<float> out) const {
  const BucketRun& run = finished_run(parameter, out.size());
  if (run.wide) refuse("the results are float64");
  const auto divisor = static_cast<float>(options_.divisor);
  const auto first = static_cast<std::size_t>(plan_.first_of(parameter));
  if (run.in_place) return copy_unless_there(run.buffer.all().subspan(first, out.size()), out);
  const SparseResult::Contents& contents = run.result.contents();
  if (contents.is_dense) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = contents.dense[first + i] / divisor;
    return;
  }
  std::ranges::fill(out, 0.0F);
  run.visit([&](const BucketPiece& piece, std::int64_t index, float value) {
    if (piece.parameter == parameter) out[static_cast<std::size_t>(index)] = value / divisor;
  });
}

void DataParallel::result_of(int parameter, std::span<double> out) const {
  const BucketRun& run = finished_run(parameter, out.size());
  if (!run.wide) refuse("the results are float32");
  const auto first = static_cast<std::size_t>(plan_.first_of(parameter));
  copy_unless_there(run.values.all().subspan(first, out.size()), out);
}

double DataParallel::squares() const {
  if (options_.copies.place > 0) return 0;
  double sum = 0;
  for (const std::unique_ptr<BucketRun>& run : runs_) {
    if (run->in_place) {
      for (const double value : run->values.all()) sum += value * value;
      for (const double value : run->buffer.all()) sum += value * value;
      continue;
    }
    const auto divisor = static_cast<float>(options_.divisor);
    const auto add = [&sum, divisor](float value) {
      const double averaged = value / divisor;
      sum += averaged * averaged;
    };
    const SparseResult::Contents& contents = run->result.contents();
    if (contents.is_dense) {
      std::ranges::for_each(contents.dense, add);
    } else {
      for (const Entries& block : contents.blocks) std::ranges::for_each(block.values, add);
    }
  }
  return sum;
}

bool DataParallel::used(int parameter) const {
  if (!options_.find_unused) return true;
  if (used_[static_cast<std::size_t>(parameter)] != 0) return true;
  if (options_.unused_stay_out) return false;
  const BucketRun& run = *runs_[static_cast<std::size_t>(plan_.bucket_of(parameter))];
  const auto first = plan_.first_of(parameter);
  const auto count = plan_.parameter(parameter).count;
  const auto brought = [&](const auto& values) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
    return std::any_of(begin, begin + static_cast<std::ptrdiff_t>(count), [](auto v) { return v != 0; });
  };
  if (run.wide) return brought(run.values.all());
  if (run.in_place) return brought(run.buffer.all());
  if (run.result.contents().is_dense) return brought(run.result.contents().dense);
  bool some = false;
  run.visit([&](const BucketPiece& piece, std::int64_t, float) { some |= piece.parameter == parameter; });
  return some;
}

StepResult DataParallel::verdicts() const {
  StepResult out{.committed = false, .step = state_->step(), .bad = {}, .text = {}};
  std::string overflowed;
  for (const std::unique_ptr<BucketRun>& run : runs_) {
    const bool known = at_ != At::ended || tickets_[run->ticket].done();
    if (!known || run->finite()) continue;
    const std::size_t pieces = run->bucket->pieces.size();
    const std::size_t before = out.bad.size();
    for (std::size_t i = 0; i < run->blamed.size(); ++i) {
      if (run->blamed[i] == std::byte{0}) continue;
      out.bad.push_back({.parameter = run->bucket->pieces[i % pieces].parameter,
                         .rank = comm_.world_rank(static_cast<int>(i / pieces)),
                         .kind = static_cast<StepResult::Kind>(run->blamed[i])});
    }
    if (out.bad.size() == before) {
      overflowed += "; the sum of finite gradients overflows in the bucket from '" +
                    plan_.parameter(run->bucket->pieces.front().parameter).name + "'";
    }
  }
  out.text = "step " + std::to_string(out.step) + " was not committed";
  constexpr std::size_t kNamed = 8;
  for (std::size_t i = 0; i < std::min(out.bad.size(), kNamed); ++i) {
    const StepResult::Bad& bad = out.bad[i];
    out.text += "; the gradient of '" + plan_.parameter(bad.parameter).name + "' on rank " +
                std::to_string(bad.rank) +
                (bad.kind == StepResult::Kind::nan ? " holds NaN" : " holds infinity");
  }
  if (out.bad.size() > kNamed) out.text += "; and " + std::to_string(out.bad.size() - kNamed) + " more";
  out.text += overflowed;
  return out;
}

void DataParallel::copy_to(std::span<const std::span<float>> outputs) const {
  if (!has_result_) refuse("there is no committed result to copy");
  if (options_.dtype != DType::float32) refuse("copy_to: the results are float64");
  if (static_cast<int>(outputs.size()) != plan_.num_parameters())
    refuse("copy_to: one span for each parameter");
  for (int p = 0; p < plan_.num_parameters(); ++p) {
    const std::span<float> out = outputs[static_cast<std::size_t>(p)];
    if (!out.empty() && static_cast<std::int64_t>(out.size()) != plan_.parameter(p).count) {
      refuse("copy_to: a span of " + std::to_string(out.size()) + " elements for '" +
             plan_.parameter(p).name + "'");
    }
  }
  const auto divisor = static_cast<float>(options_.divisor);
  for (const std::unique_ptr<BucketRun>& run : runs_) {
    if (run->in_place) {
      for (const BucketPiece& piece : run->bucket->pieces) {
        const std::span<float> out = outputs[static_cast<std::size_t>(piece.parameter)];
        copy_unless_there(run->buffer.all().subspan(static_cast<std::size_t>(piece.first), out.size()), out);
      }
      continue;
    }
    const SparseResult::Contents& contents = run->result.contents();
    if (!contents.is_dense) {
      for (const BucketPiece& piece : run->bucket->pieces)
        std::ranges::fill(outputs[static_cast<std::size_t>(piece.parameter)], 0.0F);
      run->visit([&](const BucketPiece& piece, std::int64_t index, float value) {
        const std::span<float> out = outputs[static_cast<std::size_t>(piece.parameter)];
        if (!out.empty()) out[static_cast<std::size_t>(index)] = value / divisor;
      });
      continue;
    }
    for (const BucketPiece& piece : run->bucket->pieces) {
      const std::span<float> out = outputs[static_cast<std::size_t>(piece.parameter)];
      const auto first = contents.dense.begin() + static_cast<std::ptrdiff_t>(piece.first);
      std::transform(first, first + static_cast<std::ptrdiff_t>(out.size()), out.begin(),
                     [divisor](float value) { return value / divisor; });
    }
  }
}

void DataParallel::fill_memory() {
  if (!has_result_) refuse("there is no committed result to give");
  const auto divisor = static_cast<float>(options_.divisor);
  for (const std::unique_ptr<BucketRun>& run : runs_) {
    if (run->in_place || !run->buffer.is_given()) continue;
    const std::span<float> out = run->buffer.all(run->bucket->count);
    const SparseResult::Contents& contents = run->result.contents();
    if (contents.is_dense) {
      std::ranges::transform(contents.dense, out.begin(), [divisor](float value) { return value / divisor; });
      continue;
    }
    std::ranges::fill(out, 0.0F);
    run->result.for_each(
        [&](std::int64_t index, float value) { out[static_cast<std::size_t>(index)] = value / divisor; });
  }
}

void DataParallel::for_each(
    const std::function<void(int parameter, std::int64_t index, float value)>& f) const {
  if (!has_result_) refuse("there is no committed result to visit");
  const auto divisor = static_cast<float>(options_.divisor);
  for (const std::unique_ptr<BucketRun>& run : runs_) {
    if (run->in_place) refuse("for_each: the averages are where the gradients were");
    run->visit([&](const BucketPiece& piece, std::int64_t index, float value) {
      f(piece.parameter, index, value / divisor);
    });
  }
}

}  // namespace weft
