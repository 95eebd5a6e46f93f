#include "measure/bench/sparse_vector.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <string>

#include "base/identity.h"
#include "weft/collective.h"
#include "weft/random.h"

namespace weft {

namespace {

constexpr std::uint32_t kShift = 0x7368'6674u;  // "shft"

std::unique_ptr<DataParallel> layer_of(const SparseBench& bench, const SparseCase& c, Engine& engine) {
  if (bench.buckets == 0) return nullptr;
  DataParallelOptions options;
  options.scheme = bench.scheme;
  options.scheme.name = c.row->name;
  options.scheme.density = static_cast<double>(c.k) / static_cast<double>(c.length);
  options.scheme.buckets = {.bucket_bytes = sizeof(float), .dense_below = 0};  // one for each parameter
  options.first_slot = c.slot + 1;
  std::vector<ParameterInfo> parameters;
  parameters.reserve(static_cast<std::size_t>(bench.buckets));
  for (int b = 0; b < bench.buckets; ++b) {
    parameters.push_back({std::to_string(b), block_of(c.length, bench.buckets, b).count, b});
  }
  return std::make_unique<DataParallel>(engine, engine.world(), std::move(parameters), options);
}

// REQUIRES: the tickets stay where they are.
Task<void> await_all(std::span<const Ticket> tickets) {
  std::exception_ptr first;
  for (const Ticket& ticket : tickets) {
    try {
      co_await ticket;
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace

Task<void> together(Comm comm, Engine& engine, std::size_t count,
                    std::function<Task<void>(Comm, std::size_t)> make) {
  if (count == 1) {
    co_await make(comm, 0);
    co_return;
  }
  std::vector<Ticket> tickets;
  tickets.reserve(count);
  const SubmitOptions options{.name = "part", .timeout = 600s};
  for (std::size_t i = 0; i < count; ++i) {
    tickets.push_back(engine.submit(engine.world(), options, [&make, i](Comm c) { return make(c, i); }));
  }
  co_await await_all(tickets);
}

SparseVector::SparseVector(const SparseBench& bench, const SparseCase& c, Engine& engine)
    : bench_(bench),
      engine_(engine),
      case_(c),
      call_(sparse_call(find_scheme(c.row->name), bench.scheme, c.k)),
      gradient_(static_cast<std::size_t>(c.length)),
      buckets_(layer_of(bench, c, engine)),
      state_(buckets_ ? 0 : c.length) {}

void SparseVector::draw(int rank, std::uint32_t step) {
  Draw what{
      .distribution = bench_.distribution, .seed = 1, .rank = static_cast<std::uint32_t>(rank), .step = step};
  if (!bench_.shifted) return weft::draw(what, gradient_);
  if (drawn_.empty()) {
    what.step = 0;
    drawn_.resize(gradient_.size());
    weft::draw(what, drawn_);
  }
  Random random(what.seed, kShift, what.rank, step);
  const auto by = static_cast<std::ptrdiff_t>(random.below(static_cast<std::uint32_t>(drawn_.size())));
  std::rotate_copy(drawn_.begin(), drawn_.begin() + by, drawn_.end(), gradient_.begin());
}

void SparseVector::lay_out(std::uint32_t step) {
  parts_.clear();
  if (!buckets_) {
    parts_.push_back({0, case_.length, &state_, &result_, call_, case_.slot, step});
    return;
  }
  std::int64_t first = 0;
  for (int b = 0; b < buckets_->plan().num_buckets(); ++b) {
    const std::int64_t length = buckets_->plan().bucket(b).count;
    parts_.push_back({first, length, &buckets_->state().bucket(b), &buckets_->result(b), buckets_->call(b),
                      case_.slot + 2 + static_cast<std::uint32_t>(b), buckets_->operation_step()});
    first += length;
  }
}

Task<void> SparseVector::run(Comm comm, std::uint32_t step) {
  if (!buckets_) {
    co_await sparse_all_reduce(comm, gradient_, state_, result_, call_);
  } else {
    // Backward comes to the last parameters first.
    auto rest = std::span<const float>(gradient_);
    for (int p = buckets_->plan().num_parameters(); p-- > 0;) {
      const auto count = static_cast<std::size_t>(buckets_->plan().parameter(p).count);
      buckets_->gradient_ready(p, rest.last(count));
      rest = rest.first(rest.size() - count);
    }
    buckets_->step_end();
    co_await await_all(buckets_->tickets());
  }
  lay_out(step);
}

bool SparseVector::finish() {
  if (buckets_) return buckets_->finish().committed;
  if (result_.finite())
    state_.commit();
  else
    state_.roll_back();
  return result_.finite();
}

Task<void> SparseVector::record(Comm comm, std::vector<MessageLog>& logs) {
  logs.resize(parts_.size());
  recorded_.resize(parts_.size());
  std::vector<MessageLog>* const into = &logs;
  const std::function<Task<void>(Comm, std::size_t)> make = [this, into](Comm outer, std::size_t i) {
    return (*into)[i].record(outer, [this, i](Comm inner) {
      const Part& part = parts_[i];
      const auto gradient = std::span<const float>(gradient_).subspan(static_cast<std::size_t>(part.first),
                                                                      static_cast<std::size_t>(part.length));
      return sparse_all_reduce(inner, gradient, *part.state, recorded_[i], part.call);
    });
  };
  co_await together(comm, engine_, parts_.size(), make);
  for (const Part& part : parts_) part.state->roll_back();
}

std::vector<float> SparseVector::residual() const {
  std::vector<float> out;
  const auto append = [&out](std::span<const float> residual, std::int64_t length) {
    const std::size_t end = out.size() + static_cast<std::size_t>(length);
    out.insert(out.end(), residual.begin(), residual.end());
    out.resize(end);  // an empty residual is zeros
  };
  if (!buckets_) append(state_.residual(), case_.length);
  for (int p = 0; buckets_ && p < buckets_->plan().num_parameters(); ++p) {
    append(buckets_->state().residual(p), buckets_->plan().parameter(p).count);
  }
  return out;
}

std::vector<float> SparseVector::put_in() const {
  std::vector<float> sum = residual();
  std::transform(gradient_.begin(), gradient_.end(), sum.begin(), sum.begin(), std::plus<>());
  return sum;
}

void SparseVector::for_each(const std::function<void(std::int64_t index, float value)>& f) const {
  bool spoiled = spoiled_;
  for (const Part& part : parts_) {
    part.result->for_each([&](std::int64_t index, float value) {
      f(part.first + index, spoiled ? value + 1 : value);
      spoiled = false;
    });
  }
}

bool SparseVector::finite() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.result->finite(); });
}

std::int64_t SparseVector::num_entries() const {
  std::int64_t sum = 0;
  for (const Part& part : parts_) sum += part.result->num_entries();
  return sum;
}

double SparseVector::hash() const {
  std::uint64_t hash = 0;
  for_each([&hash](std::int64_t index, float value) {
    hash += mix(static_cast<std::uint64_t>(index) << 32 ^ std::bit_cast<std::uint32_t>(value));
  });
  return static_cast<double>(hash >> 12);
}

}  // namespace weft
