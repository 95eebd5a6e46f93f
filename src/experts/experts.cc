#include "experts/experts.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "collectives/registry.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("experts: " + what); }

constexpr std::array<const char*, kRowExchanges> kTitles{"dispatch", "combine", "gradients of combine",
                                                         "gradients of dispatch"};
// From those who have the tokens to those who have the experts.
bool goes_out(RowExchange kind) { return kind == RowExchange::dispatch || kind == RowExchange::combine_back; }

constexpr std::size_t kWhole = std::size_t{1} << 40;  // longer than any message

bool goes_back(RowExchange kind) {
  return kind == RowExchange::combine_back || kind == RowExchange::dispatch_back;
}

std::size_t index(RowExchange kind) { return static_cast<std::size_t>(kind); }

std::int64_t sum(std::span<const std::int64_t> values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

}  // namespace

Experts::Experts(Engine& engine, const Comm& group, std::vector<ExpertShape> layers, ExpertsOptions options)
    : engine_(engine),
      comm_(group),
      layers_(std::move(layers)),
      options_(std::move(options)),
      walked_(options_.first_step),
      link_(group.cost()) {
  check(options_.route);
  if (options_.route.experts % comm_.size() != 0)
    refuse(std::to_string(options_.route.experts) + " of them cannot be dealt to " +
           std::to_string(comm_.size()) + " ranks, as many to each");
  if (options_.dtype != DType::float32 && options_.dtype != DType::float64)
    refuse("rows are float32 or float64, not " + std::string(name_of(options_.dtype)));
  for (const ExpertShape& layer : layers_) {
    if (layer.slices != options_.route.slices)
      refuse("layer '" + layer.name + "' has parts for " + std::to_string(layer.slices) +
             " slices, not for " + std::to_string(options_.route.slices));
  }
  if (alone()) return;  // nobody's expert is elsewhere
  kinds_.push_back({});
  for (int l = 0; l < num_layers(); ++l) {
    kinds_.push_back({.of = Kind::Of::counts, .layer = l});
    for (int kind = 0; kind < kRowExchanges; ++kind) {
      for (int s = 0; s < options_.route.slices; ++s)
        kinds_.push_back({Kind::Of::rows, l, static_cast<RowExchange>(kind), s});
    }
  }
  // With a capacity nobody tells how many rows there are.
  if (capped()) std::erase_if(kinds_, [](const Kind& kind) { return kind.of == Kind::Of::counts; });
  held_.resize(kinds_.size());
}

std::uint32_t Experts::num_slots() const { return static_cast<std::uint32_t>(kinds_.size()); }

int Experts::place_of_counts(int layer) const {
  const auto found = std::ranges::find_if(
      kinds_, [&](const Kind& k) { return k.of == Kind::Of::counts && k.layer == layer; });
  return static_cast<int>(found - kinds_.begin());
}

int Experts::place_of(int layer, RowExchange kind, int slice) const {
  const auto found = std::ranges::find_if(kinds_, [&](const Kind& k) {
    return k.of == Kind::Of::rows && k.layer == layer && k.rows == kind && k.slice == slice;
  });
  return static_cast<int>(found - kinds_.begin());
}

// What travels, by the name that the model has for it.
TensorName Experts::tensor_of(const Kind& kind) const {
  const ExpertShape& layer = this->layer(kind.layer);
  const bool back = goes_back(kind.rows);
  const bool dispatched = kind.rows == RowExchange::dispatch || kind.rows == RowExchange::dispatch_back;
  return {back ? TensorName::Of::gradient : TensorName::Of::activation,
          dispatched ? layer.dispatch(kind.slice) : layer.combine(kind.slice)};
}

std::vector<Exchange> Experts::exchanges() const {
  std::vector<Exchange> out;
  for (std::size_t e = 0; e < kinds_.size(); ++e) {
    const Kind& kind = kinds_[e];
    Exchange exchange{.traffic = TrafficClass::blocking,
                      .group = comm_.group_id(),
                      .slot = options_.first_slot + static_cast<std::uint32_t>(e),
                      .each_micro_batch = true};
    if (kind.of == Kind::Of::tokens) {
      exchange.name = "tokens of each rank";
    } else if (kind.of == Kind::Of::counts) {
      exchange.name = "rows for each expert of " + layer(kind.layer).name;
      exchange.reads = {{TensorName::Of::other, layer(kind.layer).name + ".counts"}};  // copies, at its start
    } else {
      exchange.name = std::string(kTitles[index(kind.rows)]) + " " + layer(kind.layer).name + ", slice " +
                      std::to_string(kind.slice);
      exchange.reads = {tensor_of(kind)};
      if (kind.rows == RowExchange::dispatch)
        exchange.reads.push_back({TensorName::Of::activation, layer(kind.layer).counts(kind.slice)});
      exchange.writes = exchange.reads;
    }
    out.push_back(std::move(exchange));
  }
  return out;
}

std::vector<PlanRow> Experts::rows() const {
  std::vector<PlanRow> out;
  const RouteOptions& route = options_.route;
  for (const ExpertShape& layer : layers_) {
    std::string why = std::to_string(route.experts) + " experts, " + std::to_string(local_experts()) +
                      " on this rank, " + std::to_string(route.choices) + " for each token; ";
    why +=
        alone() ? "none of them is elsewhere" : "rows travel in " + std::to_string(route.slices) + " slices";
    if (!options_.packing.empty()) why += ", " + options_.packing;
    if (options_.whole) why += ", whole messages";
    if (capped())
      why += ", capacity factor " + std::to_string(route.capacity_factor);
    else
      why += ", none is dropped";
    out.push_back({.tensor = layer.name,
                   .count = layer.width,
                   .strategy = std::string(name()),
                   .group = comm_.group_id(),
                   .ranks = comm_.size(),
                   .scheme = alone() ? "local" : "all-to-all",
                   .codec = {},
                   .traffic = TrafficClass::blocking,
                   .slot = options_.first_slot,
                   .why = std::move(why)});
  }
  return out;
}

void Experts::weave(Weaver& weaver) const {
  if (alone() || weaver.phase() == Phase::settle) return;
  const int slices = options_.route.slices;
  for (int m = 0; m < weaver.micro_batches(); ++m) {
    weaver.at_begin(start_of(0, 0, m));
    for (int l = 0; l < num_layers(); ++l) {
      const ExpertShape& at = layer(l);
      const auto forward = [&](int part) { return Piece{Work::forward, at.block, part, m}; };
      const auto backward = [&](int part) { return weaver.going_back(at.block, part, m); };
      const auto place = [&](RowExchange kind, int s) { return place_of(l, kind, s); };
      if (options_.holds) {
        weaver.before(forward(at.gate), announce_of(place(RowExchange::dispatch, 0), m));
        weaver.before(backward(at.merge()), announce_of(place(RowExchange::combine_back, slices - 1), m));
        if (options_.defers)
          weaver.before(backward(at.merge()), announce_of(place(RowExchange::dispatch_back, 0), m));
      }
      if (!capped()) {
        weaver.after(forward(at.gate), start_of(place_of_counts(l), 0, m));
        weaver.before(forward(at.first_slice), wait_of(place_of_counts(l), 0, m));
      }
      if (l == 0) weaver.before(forward(at.first_slice), wait_of(0, 0, m));
      for (int s = 0; s < slices; ++s) {
        weaver.after(forward(at.gate), start_of(place(RowExchange::dispatch, s), 0, m));
        weaver.before(forward(at.first_slice + s), wait_of(place(RowExchange::dispatch, s), 0, m));
        weaver.after(forward(at.first_slice + s), start_of(place(RowExchange::combine, s), 0, m));
        weaver.before(forward(at.merge()), wait_of(place(RowExchange::combine, s), 0, m));
      }
      for (int s = slices - 1; s >= 0; --s) {
        weaver.after(backward(at.merge()), start_of(place(RowExchange::combine_back, s), 0, m));
        weaver.before(backward(at.first_slice + s), wait_of(place(RowExchange::combine_back, s), 0, m));
        weaver.after(backward(at.first_slice + s), start_of(place(RowExchange::dispatch_back, s), 0, m));
        weaver.before(backward(at.gate), wait_of(place(RowExchange::dispatch_back, s), 0, m));
      }
    }
  }
}

void Experts::set_tokens(std::span<const std::int64_t> of_micro_batch) {
  if (alone()) return;
  if (std::ranges::any_of(work(), [](const Ticket& t) { return t.valid() && !t.done(); }))
    refuse("a step begins while rows of the last one are on their way");
  sent_bytes_ = 0;
  row_bytes_ = peak_row_bytes_ = 0;
  walked_ += static_cast<std::uint32_t>(batches_.size());
  batches_.clear();
  for (const std::int64_t tokens : of_micro_batch) {
    auto batch = std::make_unique<MicroBatch>();
    batch->own_tokens = tokens;
    batch->layers.resize(layers_.size());
    for (Flow& flow : batch->layers) flow.slices.resize(static_cast<std::size_t>(options_.route.slices));
    batches_.push_back(std::move(batch));
  }
}

Experts::Flow& Experts::flow(int layer, int micro_batch) {
  return batches_.at(static_cast<std::size_t>(micro_batch))->layers[static_cast<std::size_t>(layer)];
}
const Experts::Flow& Experts::flow(int layer, int micro_batch) const {
  return batches_.at(static_cast<std::size_t>(micro_batch))->layers[static_cast<std::size_t>(layer)];
}

SubmitOptions Experts::submit_options(int exchange, const When& when, std::string_view title) const {
  return {.name = title,
          .traffic = TrafficClass::blocking,
          .slot = options_.first_slot + static_cast<std::uint32_t>(exchange),
          .step = walked_ + static_cast<std::uint32_t>(when.micro_batch),
          .holds = options_.holds};
}

double Experts::announced(int exchange, const When& when) {
  Held& held = held_[static_cast<std::size_t>(exchange)];
  held.since = engine_.now();
  const Kind& kind = kinds_[static_cast<std::size_t>(exchange)];
  if (held.seconds > 0 || !goes_back(kind.rows)) return held.seconds;
  return 2 * flow(kind.layer, when.micro_batch).forward_seconds;  // as backward computes twice as much
}

std::int64_t Experts::memory_bytes(const Slice& slice, RowExchange kind) const {
  return sum(goes_out(kind) ? slice.got : slice.sent) * static_cast<std::int64_t>(size_of(options_.dtype));
}

void Experts::let_go(Slice& slice, RowExchange kind) {
  if (slice.memory[index(kind)] == nullptr) return;
  row_bytes_ -= memory_bytes(slice, kind);
  slice.memory[index(kind)].reset();
}

// What a piece was given is not needed here any more.
void Experts::computed(const Piece& piece) {
  const auto at = std::ranges::find(layers_, piece.block, &ExpertShape::block);
  const bool back = goes_back(piece.work);
  if (alone() || at == layers_.end() || (piece.work != Work::forward && !back)) return;
  Flow& of_layer = flow(static_cast<int>(at - layers_.begin()), piece.micro_batch);
  const int slice = piece.part - at->first_slice;
  if (slice >= 0 && slice < at->slices)
    let_go(of_layer.slices[static_cast<std::size_t>(slice)],
           back ? RowExchange::combine_back : RowExchange::dispatch);
  if (piece.part == (back ? at->gate : at->merge())) {
    for (Slice& each : of_layer.slices)
      let_go(each, back ? RowExchange::dispatch_back : RowExchange::combine);
  }
  if (!back && piece.part == at->merge()) of_layer.forward_seconds = seconds(engine_.now() - of_layer.began);
}

void Experts::start(int exchange, const When& when, TensorSource& tensors) {
  if (static_cast<std::size_t>(when.micro_batch) >= batches_.size())
    refuse("micro-batch " + std::to_string(when.micro_batch) + " of a step whose tokens nobody has told");
  const Kind& kind = kinds_[static_cast<std::size_t>(exchange)];
  Held& held = held_[static_cast<std::size_t>(exchange)];
  if (held.since != Time{}) held.seconds = seconds(engine_.now() - std::exchange(held.since, Time{}));
  switch (kind.of) {
    case Kind::Of::tokens:
      return start_tokens(exchange, when);
    case Kind::Of::counts:
      return start_counts(exchange, kind, when, tensors);
    case Kind::Of::rows:
      return start_rows(exchange, kind, when, tensors);
  }
}

void Experts::start_tokens(int exchange, const When& when) {
  MicroBatch& batch = *batches_[static_cast<std::size_t>(when.micro_batch)];
  batch.tokens.assign(static_cast<std::size_t>(comm_.size()), 0);
  batch.tokens[static_cast<std::size_t>(comm_.rank())] = batch.own_tokens;
  SubmitOptions how = submit_options(exchange, when, "tokens of each rank");
  how.holds = false;
  const Dense all(std::span<std::int64_t>{batch.tokens});
  batch.known = engine_.submit(comm_, how, [all](Comm comm) { return all_gather(comm, all); });
}

// Rows of a slice that leave, by the gate's tensor of them.
void Experts::take_counts(const Kind& kind, const When& when, TensorSource& tensors) {
  Flow& flow = this->flow(kind.layer, when.micro_batch);
  Slice& slice = flow.slices[static_cast<std::size_t>(kind.slice)];
  const ExpertShape& layer = this->layer(kind.layer);
  const auto experts = static_cast<std::size_t>(options_.route.experts),
             local = static_cast<std::size_t>(local_experts());
  const Dense given =
      tensors.tensor({TensorName::Of::activation, layer.counts(kind.slice), when.micro_batch});
  slice.sent.assign(static_cast<std::size_t>(comm_.size()), 0);
  if (given.count == 0) return;  // a rank without tokens
  if (given.dtype != DType::int64 || static_cast<std::size_t>(given.count) != experts)
    refuse("layer '" + layer.name + "': counts of " + std::to_string(given.count) + " experts of " +
           std::to_string(experts));
  const std::span counts(reinterpret_cast<const std::int64_t*>(given.data), experts);
  for (std::size_t e = 0; e < experts; ++e) slice.sent[e / local] += counts[e] * layer.width;
}

void Experts::start_counts(int exchange, const Kind& kind, const When& when, TensorSource& tensors) {
  Flow& flow = this->flow(kind.layer, when.micro_batch);
  flow.counts.assign(static_cast<std::size_t>(options_.route.experts), 0);
  flow.arrived_counts.assign(flow.counts.size(), 0);
  for (int s = 0; s < options_.route.slices; ++s) {
    const Dense given =
        tensors.tensor({TensorName::Of::activation, layer(kind.layer).counts(s), when.micro_batch});
    const std::span counts(reinterpret_cast<const std::int64_t*>(given.data),
                           static_cast<std::size_t>(given.count));
    for (std::size_t e = 0; e < counts.size(); ++e) flow.counts[e] += static_cast<std::int32_t>(counts[e]);
  }
  const Dense mine(std::span<std::int32_t>{flow.counts}),
      others(std::span<std::int32_t>{flow.arrived_counts});
  flow.known = engine_.submit(comm_, submit_options(exchange, when, "rows for each expert"),
                              [mine, others](Comm comm) { return all_to_all(comm, mine, others); });
}

// Slices go one behind the other, in the order in which they are computed: side by side they would share the
// port, and the first would be here no sooner than the last.
Ticket Experts::before_it(const Flow& flow, const Kind& kind) {
  const int slice = kind.slice + (goes_back(kind.rows) ? 1 : -1);
  if (slice < 0 || slice >= static_cast<int>(flow.slices.size())) return {};
  return flow.slices[static_cast<std::size_t>(slice)].tickets[index(kind.rows)];
}

// Of every slice, when it is known who has how many tokens, or sends how many rows.
void Experts::learn_arrivals(const MicroBatch& batch, Flow& flow, std::int64_t width) const {
  const auto local = static_cast<std::size_t>(local_experts()),
             ranks = static_cast<std::size_t>(comm_.size());
  if (!flow.slices.front().got.empty()) return;
  for (Slice& slice : flow.slices) {
    slice.got.assign(ranks, 0);
    slice.counts.assign(ranks * local, 0);
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::size_t e = 0; e < local; ++e) {
      const std::int64_t places =
          capped() ? capacity_of(options_.route, batch.tokens[r]) : flow.arrived_counts[r * local + e];
      const std::vector<std::int64_t> rows = rows_of_slices(places, options_.route.slices);
      for (std::size_t s = 0; s < rows.size(); ++s) {
        flow.slices[s].counts[r * local + e] = rows[s];
        flow.slices[s].got[r] += rows[s] * width;
      }
    }
  }
}

// Of a slice, as long as they are on average: all ranks know all tokens, and so choose alike.
AllToAllOptions Experts::exchange_options(const MicroBatch& batch, std::int64_t width) const {
  const std::int64_t tokens = sum(batch.tokens) / comm_.size();
  const std::int64_t rows = capped() ? options_.route.experts * capacity_of(options_.route, tokens)
                                     : options_.route.choices * tokens;
  return {.algorithm = options_.all_to_all,
          .micro_op_bytes = options_.whole ? kWhole : 0,
          .expected_count = std::max<std::int64_t>(1, rows / options_.route.slices * width)};
}

Task<void> Experts::travel(Comm comm, Experts* me, MicroBatch* batch, Flow* flow, Kind kind, Dense rows) {
  const Ticket before = before_it(*flow, kind);
  if (before.valid()) co_await before.behind();
  if (kind.rows == RowExchange::dispatch) {
    const Ticket tokens = batch->known, rows_known = flow->known;
    co_await tokens;
    if (!me->capped()) co_await rows_known;
    me->learn_arrivals(*batch, *flow, me->layer(kind.layer).width);
  }
  Slice& slice = flow->slices[static_cast<std::size_t>(kind.slice)];
  const bool out = goes_out(kind.rows);
  const std::vector<std::int64_t>&to = out ? slice.sent : slice.got, &from = out ? slice.got : slice.sent;
  const std::int64_t count = sum(from);
  std::shared_ptr<std::byte[]>& memory = slice.memory[index(kind.rows)];
  memory = std::make_shared_for_overwrite<std::byte[]>(static_cast<std::size_t>(count) *
                                                       size_of(me->options_.dtype));
  me->row_bytes_ += me->memory_bytes(slice, kind.rows);
  me->peak_row_bytes_ = std::max<std::int64_t>(me->peak_row_bytes_, me->row_bytes_);
  const Parts send{rows, to}, recv{Dense(memory.get(), count, me->options_.dtype), from};
  const AllToAllOptions how = me->exchange_options(*batch, me->layer(kind.layer).width);
  const Time began = comm.now();
  co_await all_to_all_v(comm, send, recv, how);
  slice.seconds[index(kind.rows)] = seconds(comm.now() - began);
  me->sent_bytes_ += comm.bytes_sent();
}

void Experts::start_rows(int exchange, const Kind& kind, const When& when, TensorSource& tensors) {
  MicroBatch& batch = *batches_[static_cast<std::size_t>(when.micro_batch)];
  Flow& flow = this->flow(kind.layer, when.micro_batch);
  Slice& slice = flow.slices[static_cast<std::size_t>(kind.slice)];
  if (kind.rows == RowExchange::dispatch) {
    take_counts(kind, when, tensors);
    if (kind.slice == 0) flow.began = engine_.now();
  }
  TensorName name = tensor_of(kind);
  name.micro_batch = when.micro_batch;
  Dense rows = tensors.tensor(name);
  const std::int64_t expected = sum(goes_out(kind.rows) ? slice.sent : slice.got);
  if (rows.count == 0) rows = Dense(nullptr, 0, options_.dtype);
  if (rows.count != expected || rows.dtype != options_.dtype)
    refuse("layer '" + layer(kind.layer).name + "', " + kTitles[index(kind.rows)] + " of slice " +
           std::to_string(kind.slice) + ": " + std::to_string(rows.count) + " values of type " +
           std::string(name_of(rows.dtype)) + " instead of " + std::to_string(expected) + " of " +
           std::string(name_of(options_.dtype)));
  SubmitOptions how = submit_options(exchange, when, kTitles[index(kind.rows)]);
  how.predicted_seconds = link_.hop_seconds * (comm_.size() - 1) +
                          link_.seconds_per_byte * static_cast<double>(rows.size_bytes());
  slice.tickets[index(kind.rows)] = engine_.submit(comm_, how, [this, &batch, &flow, kind, rows](Comm comm) {
    return travel(comm, this, &batch, &flow, kind, rows);
  });
}

Ticket Experts::ticket(int exchange, const When& when) const {
  if (when.offset != 0 || static_cast<std::size_t>(when.micro_batch) >= batches_.size()) return {};
  const Kind& kind = kinds_[static_cast<std::size_t>(exchange)];
  if (kind.of == Kind::Of::tokens) return batches_[static_cast<std::size_t>(when.micro_batch)]->known;
  const Flow& flow = this->flow(kind.layer, when.micro_batch);
  if (kind.of == Kind::Of::counts) return flow.known;
  return flow.slices[static_cast<std::size_t>(kind.slice)].tickets[index(kind.rows)];
}

std::vector<Ticket> Experts::work() const {
  std::vector<Ticket> out;
  for (const auto& batch : batches_) {
    out.push_back(batch->known);
    for (const Flow& flow : batch->layers) {
      out.push_back(flow.known);
      for (const Slice& slice : flow.slices)
        out.insert(out.end(), slice.tickets.begin(), slice.tickets.end());
    }
  }
  return out;
}

// All rows have been awaited by now.
void Experts::step_end() {
  ended_bytes_ = sent_bytes_;
  ended_formula_ = 0;
  forward_seconds_ = 0;
  if (alone()) return;
  double exchanges = 0;
  for (const auto& batch : batches_) {
    for (const Flow& flow : batch->layers) {
      for (const Slice& slice : flow.slices) {
        forward_seconds_ +=
            slice.seconds[index(RowExchange::dispatch)] + slice.seconds[index(RowExchange::combine)];
        exchanges += 2;
      }
    }
  }
  if (exchanges > 0) forward_seconds_ /= exchanges;
  const int me = comm_.rank();
  for (const auto& batch : batches_) {
    for (int l = 0; l < num_layers(); ++l) {
      const std::int64_t width = layer(l).width;
      const AllToAllOptions how = exchange_options(*batch, width);
      const Shape shape = uneven_shape(comm_, options_.dtype, how);
      const Algorithm& row = pick(Family::all_to_all, how.algorithm, shape, comm_.cost());
      for (std::size_t s = 0; s < static_cast<std::size_t>(options_.route.slices); ++s) {
        const Slice& slice = batch->layers[static_cast<std::size_t>(l)].slices[s];
        // With a capacity it follows from the tokens; else a rank knows what it sends itself.
        const auto out = [&](int from, int to) -> std::int64_t {
          if (!capped()) return from == me ? slice.sent[static_cast<std::size_t>(to)] : 0;
          const std::int64_t places =
              capacity_of(options_.route, batch->tokens[static_cast<std::size_t>(from)]);
          return rows_of_slices(places, options_.route.slices)[s] * local_experts() * width;
        };
        const auto home = [&](int from, int to) -> std::int64_t {
          if (!capped()) return from == me ? slice.got[static_cast<std::size_t>(to)] : 0;
          return out(to, from);
        };
        ended_formula_ += 2 * static_cast<std::int64_t>(row.uneven_bytes(shape, me, out) +
                                                        row.uneven_bytes(shape, me, home));
      }
    }
  }
}

Experts::Rows Experts::arrived(int layer, RowExchange kind, int slice, int micro_batch) const {
  const Slice& from = flow(layer, micro_batch).slices[static_cast<std::size_t>(slice)];
  Rows out;
  out.memory = from.memory[index(kind)];
  out.count = sum(goes_out(kind) ? from.got : from.sent) / this->layer(layer).width;
  if (kind == RowExchange::dispatch) out.counts = from.counts;
  return out;
}

}  // namespace weft
