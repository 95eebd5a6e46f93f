#include "pipeline/pipeline.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/identity.h"
#include "base/names.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "wire/bfloat16.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("pipeline: " + what); }

constexpr std::size_t index(StageExchange what) { return static_cast<std::size_t>(what); }
constexpr bool is_back(StageExchange what) {
  return what == StageExchange::leaves_back || what == StageExchange::arrives_back;
}
constexpr bool is_sent(StageExchange what) {
  return what == StageExchange::leaves || what == StageExchange::leaves_back;
}

constexpr std::string_view kMessages[] = {"epilogue", "all", "critical"};
constexpr const char* kError = "error";  // kind of a row

std::string dropped(const std::string& why) {
  return "what compressed gradients between stages had left behind is dropped: " + why;
}

// "pp=4,tp=2": what an error is of, beside the link and the place among the ranks of a stage.
std::string layout_of(const StageOptions& stage, int copies) {
  std::string out = "pp=" + std::to_string(stage.stages) + ",tp=" + std::to_string(copies);
  if (stage.chunks > 1) out += ",chunks=" + std::to_string(stage.chunks);
  for (std::size_t i = 0; i < stage.layers.size(); ++i)
    out += (i == 0 ? ",layers=" : ".") + std::to_string(stage.layers[i]);
  return out;
}

std::span<const float> floats(const Dense& data) {
  return {reinterpret_cast<const float*>(data.data), static_cast<std::size_t>(data.count)};
}
std::span<bfloat16> bfloats(const Dense& data) {
  return {reinterpret_cast<bfloat16*>(data.data), static_cast<std::size_t>(data.count)};
}

}  // namespace

void check(const PipelineOptions& o) {
  check_stage(o.stage);
  if (o.backward.columns < 0)
    refuse("gradients between stages travel as factors of 1 or more columns, or as they are (0), not " +
           std::to_string(o.backward.columns));
  if (o.backward.messages == "critical")
    refuse(
        "critical messages are chosen before a run, by a plan: what they are called then is a list of them");
  if (std::ranges::find(kMessages, o.backward.messages) == std::end(kMessages) &&
      !MessageSet::parse(o.backward.messages))
    throw UsageError(unknown_name("choice of messages between stages", o.backward.messages, kMessages));
  if (o.dtype != DType::float32 && o.dtype != DType::float64)
    refuse("activations are float32 or float64, not " + std::string(name_of(o.dtype)));
  if (o.backward.compresses() && o.dtype != DType::float32)
    refuse("gradients between stages travel as factors of float32 only, not of " +
           std::string(name_of(o.dtype)));
  if (o.stage.bf16 && o.dtype != DType::float32)
    refuse("what is rounded to bfloat16 between stages is float32, not " + std::string(name_of(o.dtype)));
}

Pipeline::Pipeline(Engine& engine, const Comm& group, const ModelShape& shape, PipelineOptions options,
                   StateRegistry& registry)
    : engine_(engine),
      comm_(group),
      chunks_(shape.chunks),
      width_(shape.width),
      options_(std::move(options)),
      registry_(registry),
      chosen_(MessageSet::parse(options_.backward.messages)),
      layout_(layout_of(options_.stage, options_.copies ? options_.copies->size() : 1)) {
  check(options_);
  if (comm_.size() != options_.stage.stages || comm_.rank() != options_.stage.stage)
    refuse("stage " + std::to_string(options_.stage.stage) + " of " + std::to_string(options_.stage.stages) +
           " is on rank " + std::to_string(comm_.rank()) + " of " + std::to_string(comm_.size()));
  if (width_ < 1) refuse("nobody has said how many values of a token pass from block to block");
  for (int c = 0; c < static_cast<int>(chunks_.size()); ++c) {
    const ChunkShape& chunk = chunks_[static_cast<std::size_t>(c)];
    const BlockShape& last = shape.blocks[static_cast<std::size_t>(chunk.first + chunk.count - 1)];
    last_parts_.push_back(static_cast<int>(last.parts.size()) - 1);
    if (!chunk.arrives.empty()) {
      kinds_.push_back({c, StageExchange::arrives});
      kinds_.push_back({c, StageExchange::leaves_back});
      if (options_.backward.compresses())
        codecs_.emplace(chunk.number, std::make_unique<StageCodec>("gradients of " + chunk.arrives, width_,
                                                                   options_.backward, options_.stage.bf16));
    }
    if (!chunk.leaves.empty()) {
      kinds_.push_back({c, StageExchange::leaves});
      kinds_.push_back({c, StageExchange::arrives_back});
    }
  }
  if (codecs_.empty()) return;
  registry_.add(options_.name, {.rows = [this] { return state_rows(); },
                                .missing = {},
                                .commit =
                                    [this] {
                                      for (auto& [chunk, codec] : codecs_) codec->commit();
                                    },
                                .roll_back =
                                    [this] {
                                      for (auto& [chunk, codec] : codecs_) codec->roll_back();
                                    }});
}

Pipeline::~Pipeline() {
  if (!codecs_.empty()) registry_.remove(options_.name);
}

std::uint32_t Pipeline::num_slots() const {
  return 2 * static_cast<std::uint32_t>(options_.stage.stages * options_.stage.chunks);
}

const std::string& Pipeline::activation_of(const Kind& kind) const {
  const ChunkShape& chunk = chunks_[static_cast<std::size_t>(kind.chunk)];
  return kind.what == StageExchange::arrives || kind.what == StageExchange::leaves_back ? chunk.arrives
                                                                                        : chunk.leaves;
}

int Pipeline::peer_of(const Kind& kind) const {
  const bool before = kind.what == StageExchange::arrives || kind.what == StageExchange::leaves_back;
  return before ? comm_.before(1) : comm_.after(1);
}

// Of the pipe behind a chunk of the model: forward, and back.
std::uint32_t Pipeline::slot_of(const Kind& kind) const {
  const int number = chunks_[static_cast<std::size_t>(kind.chunk)].number;
  const bool before = kind.what == StageExchange::arrives || kind.what == StageExchange::leaves_back;
  const int pipe = before ? number - 1 : number;
  return options_.first_slot + 2 * static_cast<std::uint32_t>(pipe) + (is_back(kind.what) ? 1 : 0);
}

int Pipeline::place_of(int chunk, StageExchange what) const {
  const auto found =
      std::ranges::find_if(kinds_, [&](const Kind& k) { return k.chunk == chunk && k.what == what; });
  return found == kinds_.end() ? -1 : static_cast<int>(found - kinds_.begin());
}

bool Pipeline::is_compressed(int chunk, int micro_batch, int micro_batches) const {
  if (!options_.backward.compresses()) return false;
  if (options_.backward.messages == "all") return true;
  if (chosen_) return chosen_->micro_batches() == micro_batches && chosen_->has(chunk, micro_batch);
  return in_epilogue(pipeline_shape(options_.stage, micro_batches), chunk, micro_batch);
}

StageCodec* Pipeline::codec(int chunk) {
  const auto found = codecs_.find(chunk);
  return found == codecs_.end() ? nullptr : found->second.get();
}

std::vector<Exchange> Pipeline::exchanges() const {
  std::vector<Exchange> out;
  for (const Kind& kind : kinds_) {
    const bool back = is_back(kind.what), sent = is_sent(kind.what);
    const int peer = comm_.world_rank(peer_of(kind));
    Exchange exchange{.name = std::string(back ? "gradients of " : "activations of ") + activation_of(kind) +
                              (sent ? " to rank " : " from rank ") + std::to_string(peer),
                      .kind = sent ? Exchange::Kind::send : Exchange::Kind::receive,
                      .traffic = TrafficClass::blocking,
                      .group = comm_.group_id(),
                      .slot = slot_of(kind),
                      .peer = peer,
                      .each_micro_batch = true};
    if (back && options_.backward.compresses())
      exchange.codec =
          "rank " + std::to_string(options_.backward.columns) + ", " + options_.backward.messages;
    if (options_.stage.bf16) exchange.codec += exchange.codec.empty() ? "bf16" : ", bf16";
    const TensorName tensor{back ? TensorName::Of::gradient : TensorName::Of::activation,
                            activation_of(kind)};
    (sent ? exchange.reads : exchange.writes).push_back(tensor);
    out.push_back(std::move(exchange));
  }
  return out;
}

std::optional<std::uint64_t> Pipeline::compared() const {
  const StageOptions& s = options_.stage;
  const BackwardOptions& b = options_.backward;
  std::uint64_t hash = mix(static_cast<std::uint64_t>(width_));
  const auto add = [&hash](std::uint64_t part) { hash = mix(hash ^ part); };
  for (const std::string* text : {&s.schedule, &b.messages}) {
    add(text->size());
    for (const char c : *text) add(static_cast<unsigned char>(c));
  }
  for (const int value : {s.stages, s.chunks, s.double_warmup ? 1 : 0, b.columns, b.lazy_error ? 1 : 0,
                          static_cast<int>(options_.dtype), s.bf16 ? 1 : 0})
    add(static_cast<std::uint64_t>(value));
  for (const int layers : s.layers) add(static_cast<std::uint64_t>(layers));
  add(b.seed);
  return hash;
}

std::string Pipeline::codec_text(int chunk, int micro_batches) const {
  if (!options_.backward.compresses()) return "as they are";
  int some = 0;
  for (int m = 0; m < micro_batches; ++m) some += is_compressed(chunk, m, micro_batches) ? 1 : 0;
  std::string out = "factors of " + std::to_string(options_.backward.columns) + " columns";
  if (micro_batches > 0) out += " in " + std::to_string(some) + " of " + std::to_string(micro_batches);
  if (options_.backward.messages == "epilogue") out += ", those that no forward could hide";
  if (chosen_) out += ", those that have less slack than it saves";
  if (!options_.backward.lazy_error) out += ", what is left behind is lost";
  return out;
}

std::vector<PlanRow> Pipeline::rows() const {
  std::vector<PlanRow> out;
  const int m = options_.micro_batches;
  const auto size = static_cast<double>(size_of(wire()));
  const std::int64_t tokens = shares_of(options_.tokens).count(share());
  for (const Kind& kind : kinds_) {
    if (!is_sent(kind.what)) continue;
    const int number = chunks_[static_cast<std::size_t>(kind.chunk)].number;
    const bool back = is_back(kind.what);
    PlanRow row{.tensor = std::string(back ? "gradients of " : "activations of ") + activation_of(kind),
                .count = tokens * width_,
                .strategy = std::string(name()),
                .group = comm_.group_id(),
                .ranks = 2,
                .scheme = "send",
                .codec = options_.stage.bf16 ? "bf16" : "",
                .traffic = TrafficClass::blocking,
                .slot = slot_of(kind)};
    std::int64_t values = 0;
    for (int i = 0; i < m; ++i)
      values += is_coded(kind, i, m) ? coded_count(options_.backward, tokens, width_) : tokens * width_;
    row.bytes = static_cast<double>(values) * size;
    row.seconds = m * comm_.cost().hop_seconds + row.bytes * comm_.cost().seconds_per_byte;
    row.why = "to stage " + std::to_string(peer_of(kind)) + " in each micro-batch";
    if (back) row.why += ": " + codec_text(number, m);
    out.push_back(std::move(row));
  }
  return out;
}

void Pipeline::weave(Weaver& weaver) const {
  const int micro_batches = weaver.micro_batches();
  if (weaver.phase() == Phase::settle) {
    for (std::size_t e = 0; e < kinds_.size(); ++e) {
      if (kinds_[e].what != StageExchange::leaves_back) continue;
      for (int m = 0; m < micro_batches; ++m) weaver.at_end(wait_of(static_cast<int>(e), 0, m));
    }
    return;
  }
  const bool forward_only = weaver.phase() == Phase::forward;
  std::vector<StageItem> items;
  if (forward_only) {
    for (const ChunkShape& chunk : chunks_) items.push_back({Work::forward, chunk.number, 0});
  } else {
    items = pipeline_order(pipeline_shape(options_.stage, micro_batches), options_.stage.stage);
    std::erase_if(items, [](const StageItem& item) { return item.work == Work::weight_gradient; });
  }
  const auto chunk_of = [&](const StageItem& item) {
    return static_cast<int>(std::ranges::find(chunks_, item.chunk, &ChunkShape::number) - chunks_.begin());
  };
  const auto first_piece = [&](const StageItem& item) {
    const ChunkShape& chunk = chunks_[static_cast<std::size_t>(chunk_of(item))];
    const int block = item.work == Work::forward ? chunk.first : chunk.first + chunk.count - 1;
    const auto parts = weaver.shape().blocks[static_cast<std::size_t>(block)].parts.size();
    return Piece{item.work, block, item.work == Work::forward ? 0 : static_cast<int>(parts) - 1,
                 item.micro_batch};
  };
  const auto last_piece = [&](const StageItem& item) {
    const ChunkShape& chunk = chunks_[static_cast<std::size_t>(chunk_of(item))];
    const int block = item.work == Work::forward ? chunk.first + chunk.count - 1 : chunk.first;
    const auto parts = weaver.shape().blocks[static_cast<std::size_t>(block)].parts.size();
    return Piece{item.work, block, item.work == Work::forward ? static_cast<int>(parts) - 1 : 0,
                 item.micro_batch};
  };
  const std::size_t ahead = static_cast<std::size_t>(options_.stage.stages);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const StageItem& item = items[i];
    const int chunk = chunk_of(item), m = item.micro_batch;
    const bool forward = item.work == Work::forward;
    const int received = place_of(chunk, forward ? StageExchange::arrives : StageExchange::arrives_back);
    const int sent = place_of(chunk, forward ? StageExchange::leaves : StageExchange::leaves_back);
    if (received >= 0) {
      if (i < ahead)
        weaver.at_begin(start_of(received, 0, m));
      else
        weaver.before(first_piece(items[i - ahead]), start_of(received, 0, m));
      weaver.before(first_piece(item), wait_of(received, 0, m));
    }
    if (!forward) {
      if (const int activations = place_of(chunk, StageExchange::leaves); activations >= 0)
        weaver.before(first_piece(item), wait_of(activations, 0, m));
      if (sent >= 0 && weaver.phase() == Phase::steady) weaver.before(first_piece(item), wait_of(sent, 1, m));
    }
    if (sent < 0) continue;
    weaver.after(last_piece(item), start_of(sent, 0, m));
    if (forward_only) weaver.at_end(wait_of(sent, 0, m));
  }
}

void Pipeline::set_tokens(std::span<const std::int64_t> of_micro_batch) {
  for (const auto& batch : batches_) {
    for (const Flow& flow : batch->chunks) {
      for (const StageExchange what :
           {StageExchange::arrives, StageExchange::leaves, StageExchange::arrives_back}) {
        const Ticket& ticket = flow.tickets[index(what)];
        if (ticket.valid() && !ticket.done())
          refuse("a step begins while activations of the last one travel");
      }
    }
  }
  bytes_ = std::make_shared<Bytes>();
  walked_ += static_cast<std::uint32_t>(batches_.size());
  last_ = std::move(batches_);
  for (const auto& batch : last_) {  // of an evaluation, which has no backward
    for (Flow& flow : batch->chunks) flow.activation.reset();
  }
  batches_.clear();
  kept_.begin_step();
  on_the_way_.begin_step();
  for (const std::int64_t tokens : of_micro_batch) {
    auto batch = std::make_unique<MicroBatch>();
    batch->tokens = tokens;
    batch->chunks.resize(chunks_.size());
    batches_.push_back(std::move(batch));
  }
}

// The step before has been committed by now.
void Pipeline::set_scale(double scale) {
  if (std::exchange(loaded_, false)) drop_misfits();
  for (auto& [chunk, codec] : codecs_) codec->set_scale(scale);
}

// All links have the same micro-batches, so that one rank's line is said for all.
void Pipeline::drop_misfits() {
  const int micro_batches = static_cast<int>(batches_.size());
  bool any = false;
  for (auto& [chunk, codec] : codecs_) {
    std::int64_t most = 0;
    for (int m = 0; m < micro_batches; ++m) {
      if (is_compressed(chunk, m, micro_batches))
        most = std::max(most, shares_of(batches_[static_cast<std::size_t>(m)]->tokens).count(share()));
    }
    any = codec->fit(most) || any;
  }
  const int last = options_.stage.stages * options_.stage.chunks - 1;
  if (any && codecs_.contains(last) && options_.peers.rank == 0)
    engine_.log_line(dropped("its messages had another number of tokens"));
}

std::string Pipeline::left_out(const StateSource& source, const Pipeline* here) {
  for (const StateSource::Saved& saved : source.rows()) {
    const StateRow& row = saved.row;
    if (row.key.owner != PipelineOptions{}.name || row.key.kind != kError || row.shard.num_elements() == 1)
      continue;
    if (here == nullptr || !here->options_.backward.compresses())
      return dropped("no gradient travels as factors here");
    const int ranks = here->options_.peers.size;
    if (row.key.name.ends_with("(" + here->layout_ + ")") && row.peers.size == ranks) continue;
    const std::string layout = row.key.name.substr(row.key.name.find_last_of('(') + 1);
    const auto over = [](int n) { return " over " + std::to_string(n) + (n == 1 ? " rank" : " ranks"); };
    return dropped("it is of stages " + layout.substr(0, layout.size() - 1) + over(row.peers.size) +
                   " each, here " + here->layout_ + over(ranks));
  }
  return {};
}

SubmitOptions Pipeline::submit_options(int exchange, const Kind& kind, const When& when) const {
  static_cast<void>(exchange);
  constexpr std::array<std::string_view, kStageExchanges> kTitles{
      "activations from a stage", "activations to a stage", "gradients to a stage", "gradients from a stage"};
  return {.name = kTitles[index(kind.what)],
          .traffic = TrafficClass::blocking,
          .slot = slot_of(kind),
          .step = walked_ + static_cast<std::uint32_t>(when.micro_batch)};
}

void Pipeline::start(int exchange, const When& when, TensorSource& tensors) {
  if (static_cast<std::size_t>(when.micro_batch) >= batches_.size())
    refuse("micro-batch " + std::to_string(when.micro_batch) + " of a step whose tokens nobody has told");
  const Kind& kind = kinds_[static_cast<std::size_t>(exchange)];
  if (batches_[static_cast<std::size_t>(when.micro_batch)]->tokens == 0)
    return;  // on all ranks of the pipeline
  is_sent(kind.what) ? start_send(exchange, kind, when, tensors) : start_receive(exchange, kind, when);
}

bool Pipeline::is_coded(const Kind& kind, int micro_batch, int micro_batches) const {
  if (!is_back(kind.what)) return false;
  const int number = chunks_[static_cast<std::size_t>(kind.chunk)].number;
  return is_compressed(is_sent(kind.what) ? number : number + 1, micro_batch, micro_batches);
}

void Pipeline::start_receive(int exchange, const Kind& kind, const When& when) {
  MicroBatch& batch = *batches_[static_cast<std::size_t>(when.micro_batch)];
  Flow& flow = batch.chunks[static_cast<std::size_t>(kind.chunk)];
  const std::int64_t count = batch.tokens * width_;
  const auto arrival = std::make_shared<Arrival>();
  arrival->kept = kept_.take(static_cast<std::size_t>(count) * size_of(options_.dtype));
  (is_back(kind.what) ? flow.gradient : flow.activation) = arrival->kept;
  arrival->into = Dense(arrival->kept.get(), count, options_.dtype);
  arrival->coded = is_coded(kind, when.micro_batch, static_cast<int>(batches_.size()));
  arrival->counts = arriving(batch.tokens, arrival->coded);
  arrival->all = arrival->into;
  if (arrival->coded || wire() != options_.dtype) {
    const std::int64_t values =
        std::accumulate(arrival->counts.begin(), arrival->counts.end(), std::int64_t{0});
    arrival->memory = on_the_way_.take(static_cast<std::size_t>(values) * size_of(wire()));
    arrival->all = Dense(arrival->memory.get(), values, wire());
  }
  const int peer = peer_of(kind);
  const SubmitOptions how = submit_options(exchange, kind, when);
  Ticket received;
  if (arrival->counts[static_cast<std::size_t>(share())] > 0)
    received = engine_.submit(
        comm_, how, [this, peer, arrival](Comm comm) { return receive(comm, this, peer, arrival); });
  flow.tickets[index(kind.what)] = received;
  if (!options_.copies) return;
  SubmitOptions gathers = how;
  gathers.name = "shares of what came from a stage";
  gathers.slot = options_.gather_slot + (slot_of(kind) - options_.first_slot);
  flow.tickets[index(kind.what)] =
      engine_.submit(*options_.copies, gathers, [this, bytes = bytes_, received, arrival](Comm comm) {
        return gather(comm, this, bytes, received, arrival);
      });
}

Blocks Pipeline::shares_of(std::int64_t tokens) const {
  return {options_.copies ? options_.copies->size() : 1, tokens};
}

std::vector<std::int64_t> Pipeline::arriving(std::int64_t tokens, bool coded) const {
  const Blocks shares = shares_of(tokens);
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(shares.size()));
  for (int r = 0; r < shares.size(); ++r)
    out.push_back(coded ? coded_count(options_.backward, shares.count(r), width_) : shares.count(r) * width_);
  return out;
}

// Of this rank, by the ring: every share but its neighbour's.
std::int64_t Pipeline::gather_bytes(std::int64_t tokens, bool coded) const {
  if (!options_.copies) return 0;
  const std::vector<std::int64_t> counts = arriving(tokens, coded);
  const std::int64_t all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const std::int64_t kept = counts[static_cast<std::size_t>(share() + 1) % counts.size()];
  return (all - kept) * static_cast<std::int64_t>(size_of(wire()));
}

Task<void> Pipeline::receive(Comm comm, Pipeline* me, int peer, std::shared_ptr<Arrival> arrival) {
  const auto mine = arrival->counts.begin() + me->share();
  const std::int64_t first = std::accumulate(arrival->counts.begin(), mine, std::int64_t{0});
  Transfer received = comm.recv(peer, 0, arrival->all.sub(first, *mine));
  co_await received;
  if (me->options_.copies || arrival->is_in_place()) co_return;
  auto work = [&] { return me->take_over(comm.kernels(), *arrival); };
  Compute taken = comm.compute(work);
  co_await taken;
}

Task<void> Pipeline::gather(Comm comm, Pipeline* me, std::shared_ptr<Bytes> bytes, Ticket received,
                            std::shared_ptr<Arrival> arrival) {
  if (received.valid()) co_await received;
  const AllGatherOptions options{.algorithm = "ring"};
  const std::span<const std::int64_t> of_ranks(arrival->counts);
  co_await all_gather_v(comm, arrival->all, of_ranks, options);
  bytes->sent += comm.bytes_sent();
  if (arrival->is_in_place()) co_return;
  auto work = [&] { return me->take_over(comm.kernels(), *arrival); };
  Compute taken = comm.compute(work);
  co_await taken;
}

double Pipeline::take_over(const KernelCosts& kernels, const Arrival& arrival) const {
  const bool rounded = arrival.all.dtype == DType::bfloat16;
  const Blocks shares = shares_of(arrival.into.count / width_);
  double spent = rounded ? kernels.widen_element * static_cast<double>(arrival.all.count) : 0;
  std::vector<float> wide;
  std::int64_t at = 0;
  for (int r = 0; r < shares.size(); ++r) {
    const Dense came = arrival.all.sub(at, arrival.counts[static_cast<std::size_t>(r)]);
    const Dense goes = arrival.into.sub(shares.begin(r) * width_, shares.count(r) * width_);
    at += came.count;
    const std::span<float> gradient(reinterpret_cast<float*>(goes.data),
                                    static_cast<std::size_t>(goes.count));
    std::span<const float> values = floats(came);
    if (rounded) {
      wide.resize(arrival.coded ? static_cast<std::size_t>(came.count) : 0);
      const std::span<float> into = arrival.coded ? std::span(wide) : gradient;
      wire::widen(bfloats(came), into);
      values = into;
    }
    if (!arrival.coded || goes.count == 0) continue;
    StageCodec::decode(options_.backward, width_, values, gradient);
    spent += StageCodec::decode_seconds(kernels, options_.backward, shares.count(r), width_);
  }
  return spent;
}

void Pipeline::start_send(int exchange, const Kind& kind, const When& when, TensorSource& tensors) {
  MicroBatch& batch = *batches_[static_cast<std::size_t>(when.micro_batch)];
  Flow& flow = batch.chunks[static_cast<std::size_t>(kind.chunk)];
  const bool back = is_back(kind.what);
  const Dense given = tensors.tensor(
      {back ? TensorName::Of::gradient : TensorName::Of::activation, activation_of(kind), when.micro_batch});
  const std::int64_t count = batch.tokens * width_;
  if (given.count != count || given.dtype != options_.dtype)
    refuse("'" + activation_of(kind) + "' of micro-batch " + std::to_string(when.micro_batch) + " has " +
           std::to_string(given.count) + " values of type " + std::string(name_of(given.dtype)) +
           " instead of " + std::to_string(count) + " of " + std::string(name_of(options_.dtype)));
  const Blocks shares = shares_of(batch.tokens);
  Dense data = given.sub(shares.begin(share()) * width_, shares.count(share()) * width_);
  if (data.count == 0) return;  // neither does its receiver have a share
  const auto departure = std::make_shared<Departure>();
  departure->peer = peer_of(kind);
  departure->bytes = bytes_;
  if (back) {  // whose it is may let go of it
    departure->copy = on_the_way_.take(data.size_bytes());
    std::memcpy(departure->copy.get(), data.data, data.size_bytes());
    data = Dense(departure->copy.get(), data.count, options_.dtype);
  }
  departure->data = data;
  const int number = chunks_[static_cast<std::size_t>(kind.chunk)].number;
  const SubmitOptions how = submit_options(exchange, kind, when);
  Ticket& ticket = flow.tickets[index(kind.what)];
  if (!is_coded(kind, when.micro_batch, static_cast<int>(batches_.size()))) {
    ticket = engine_.submit(comm_, how, [this, departure](Comm comm) { return send(comm, this, departure); });
    return;
  }
  // Messages of a link are coded one behind the other: each takes along what the one before left behind.
  Ticket& before = coded_[number];
  StageCodec* const coder = codec(number);
  ticket = engine_.submit(comm_, how, [this, coder, after = before, departure](Comm comm) {
    return send_coded(comm, this, coder, after, departure);
  });
  before = ticket;
}

// (Counted when it is posted: who has it already may be a step ahead.)
Task<void> Pipeline::send(Comm comm, Pipeline* me, std::shared_ptr<Departure> departure) {
  Dense message = departure->data;
  MessageMemory::Piece rounded;
  if (me->options_.stage.bf16) {
    rounded = me->on_the_way_.take(static_cast<std::size_t>(message.count) * sizeof(bfloat16));
    message = Dense(rounded.get(), message.count, DType::bfloat16);
    auto work = [&] {
      wire::narrow(floats(departure->data), bfloats(message));
      return comm.kernels().round_element * static_cast<double>(message.count);
    };
    Compute narrowed = comm.compute(work);
    co_await narrowed;
    departure->copy.reset();
  }
  Transfer sent = comm.send(departure->peer, 0, message);
  departure->bytes->sent += comm.bytes_sent();
  co_await sent;
}

Task<void> Pipeline::send_coded(Comm comm, Pipeline* me, StageCodec* codec, Ticket before,
                                std::shared_ptr<Departure> departure) {
  if (before.valid()) co_await before;
  const std::span<const float> gradient = floats(departure->data);
  const std::int64_t tokens = departure->data.count / codec->width();
  const auto count = static_cast<std::size_t>(coded_count(codec->options(), tokens, codec->width()));
  MessageMemory::Piece coded = me->on_the_way_.take(count * sizeof(float));
  const MessageMemory::Piece rounded = me->on_the_way_.take(codec->rounds() ? count * sizeof(bfloat16) : 0);
  Dense message(coded.get(), static_cast<std::int64_t>(count), DType::float32);
  auto work = [&] {
    const std::span<float> factors(reinterpret_cast<float*>(coded.get()), count);
    codec->encode(gradient, factors);
    const double spent = codec->encode_seconds(comm.kernels(), tokens);
    if (!codec->rounds()) return spent;
    message = Dense(rounded.get(), message.count, DType::bfloat16);
    wire::narrow(factors, bfloats(message));
    return spent + comm.kernels().narrow_element * static_cast<double>(count);
  };
  Compute computed = comm.compute(work);
  co_await computed;
  departure->copy.reset();
  if (codec->rounds()) coded.reset();
  Transfer sent = comm.send(departure->peer, 0, message);
  departure->bytes->sent += comm.bytes_sent();
  co_await sent;
}

Ticket Pipeline::ticket(int exchange, const When& when) const {
  const auto& batches = when.offset == 0 ? batches_ : last_;
  if (when.offset < 0 || when.offset > 1 || static_cast<std::size_t>(when.micro_batch) >= batches.size())
    return {};
  const Kind& kind = kinds_[static_cast<std::size_t>(exchange)];
  return batches[static_cast<std::size_t>(when.micro_batch)]
      ->chunks[static_cast<std::size_t>(kind.chunk)]
      .tickets[index(kind.what)];
}

std::vector<Ticket> Pipeline::work() const {
  std::vector<Ticket> out;
  for (const auto* batches : {&batches_, &last_}) {
    for (const auto& batch : *batches) {
      for (const Flow& flow : batch->chunks) out.insert(out.end(), flow.tickets.begin(), flow.tickets.end());
    }
  }
  return out;
}

void Pipeline::computed(const Piece& piece) {
  if (!adds_gradients(piece.work)) return;
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    const ChunkShape& chunk = chunks_[c];
    Flow& flow = batches_[static_cast<std::size_t>(piece.micro_batch)]->chunks[c];
    if (piece.block == chunk.first && piece.part == 0) flow.activation.reset();
    if (piece.block == chunk.first + chunk.count - 1 && piece.part == last_parts_[c]) flow.gradient.reset();
  }
}

std::int64_t Pipeline::formula_of_step() const {
  const int micro_batches = static_cast<int>(batches_.size());
  std::int64_t values = 0, gathered = 0;
  for (const Kind& kind : kinds_) {
    if (!is_sent(kind.what)) {
      for (int m = 0; m < micro_batches; ++m)
        gathered +=
            gather_bytes(batches_[static_cast<std::size_t>(m)]->tokens, is_coded(kind, m, micro_batches));
      continue;
    }
    for (int m = 0; m < micro_batches; ++m) {
      const std::int64_t tokens = shares_of(batches_[static_cast<std::size_t>(m)]->tokens).count(share());
      values +=
          is_coded(kind, m, micro_batches) ? coded_count(options_.backward, tokens, width_) : tokens * width_;
    }
  }
  return values * static_cast<std::int64_t>(size_of(wire())) + gathered;
}

void Pipeline::step_end() {
  ended_ = bytes_;
  if (ended_ != nullptr) ended_->formula = formula_of_step();
}

std::vector<LiveRow> Pipeline::state_rows() {
  std::vector<LiveRow> out;
  for (auto& [chunk, codec] : codecs_) {
    StageCodec* const mine = codec.get();
    const auto add = [&](const char* kind, auto values_of, auto set) {
      using Values = std::decay_t<decltype(values_of(mine->state()))>;
      using T = typename Values::value_type;
      LiveRow row;
      row.row = {.key = {options_.name, kind, mine->name() + " (" + layout_ + ")"},
                 .dtype = std::is_same_v<T, double> ? DType::float64 : DType::float32,
                 .rule = LayoutRule::restart,
                 .shard = Shard::whole({static_cast<std::int64_t>(values_of(mine->state()).size())}),
                 .peers = options_.peers};
      row.read = [mine, values_of](std::vector<std::byte>& scratch) -> std::span<const std::byte> {
        const Values values = values_of(mine->state());
        const auto bytes = std::as_bytes(std::span(values));
        scratch.assign(bytes.begin(), bytes.end());
        return scratch;
      };
      row.write = [this, mine, set](std::span<const std::byte> bytes) {
        loaded_ = true;
        Values values(bytes.size() / sizeof(T));
        if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
        StageCodec::State state = mine->state();
        set(state, values);
        mine->load(std::move(state));
      };
      row.takes = [](const Shard&, std::span<const std::byte> bytes) {
        return bytes.size() % sizeof(T) == 0;
      };
      out.push_back(std::move(row));
    };
    // (A row has at least one value: a zero stands for none.)
    using Floats = std::vector<float>;
    const auto at_least_one = [](const Floats& values) { return values.empty() ? Floats{0.0F} : values; };
    const auto or_none = [](const Floats& values) {
      return values.size() == 1 && values[0] == 0 ? Floats{} : values;
    };
    add(
        kError, [at_least_one](const StageCodec::State& s) { return at_least_one(s.error); },
        [or_none](StageCodec::State& s, const Floats& values) { s.error = or_none(values); });
    add(
        "factor", [at_least_one](const StageCodec::State& s) { return at_least_one(s.factor); },
        [or_none](StageCodec::State& s, const Floats& values) { s.factor = or_none(values); });
    add(
        "scale",
        [](const StageCodec::State& s) {
          return std::vector<double>{s.scale, static_cast<double>(s.messages)};
        },
        [](StageCodec::State& s, const std::vector<double>& values) {
          s.scale = values.size() == 2 ? values[0] : 0;
          s.messages = values.size() == 2 ? static_cast<std::uint32_t>(values[1]) : 0;
        });
  }
  return out;
}

const Pipeline::Flow* Pipeline::find(const std::string& activation, int micro_batch, bool leaves) const {
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    if ((leaves ? chunks_[c].leaves : chunks_[c].arrives) == activation)
      return &batches_.at(static_cast<std::size_t>(micro_batch))->chunks[c];
  }
  refuse("nothing travels that is called '" + activation + "'");
}

std::shared_ptr<std::byte[]> Pipeline::arrived(const std::string& activation, int micro_batch) const {
  return find(activation, micro_batch, false)->activation;
}

std::shared_ptr<std::byte[]> Pipeline::gradient_arrived(const std::string& activation,
                                                        int micro_batch) const {
  return find(activation, micro_batch, true)->gradient;
}

}  // namespace weft
