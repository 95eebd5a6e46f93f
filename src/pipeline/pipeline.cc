#include "pipeline/pipeline.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/identity.h"
#include "base/names.h"
#include "transports/endpoint.h"
#include "weft/collective.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("pipeline: " + what); }

constexpr std::string_view kMessages[] = {"epilogue", "all", "critical"};

// "pp=4,tp=2": what an error is of, beside the link and the place among the ranks of a stage.
std::string layout_of(const StageOptions& stage, int copies) {
  std::string out = "pp=" + std::to_string(stage.stages) + ",tp=" + std::to_string(copies);
  if (stage.chunks > 1) out += ",chunks=" + std::to_string(stage.chunks);
  const std::vector<int>& layers = stage.layers;  // by hand, unless they are where they would be anyway
  const int all = std::accumulate(layers.begin(), layers.end(), 0), chunks = static_cast<int>(layers.size());
  std::string by_hand;
  bool even = true;
  for (int c = 0; c < chunks; ++c) {
    const int count = layers[static_cast<std::size_t>(c)];
    even = even && count == even_chunk(all, chunks, c).count;
    by_hand += (c == 0 ? ",layers=" : ".") + std::to_string(count);
  }
  return even ? out : out + by_hand;
}

}  // namespace

void check(const PipelineOptions& o) {
  check_stage(o.stage);
  if (o.backward.columns < 0)
    refuse("gradients between stages travel as factors of 1 or more columns, or as they are (0), not " +
           std::to_string(o.backward.columns));
  if (o.backward.bits != 0 && o.backward.bits != 4 && o.backward.bits != 8)
    refuse("gradients between stages travel as whole numbers of 4 or 8 bits, or as they are (0), not " +
           std::to_string(o.backward.bits));
  if (o.backward.columns > 0 && o.backward.bits > 0)
    refuse("gradients between stages travel as factors or as whole numbers, not as both");
  if (o.backward.messages == "critical")
    refuse(
        "critical messages are chosen before a run, by a plan: what they are called then is a list of them");
  if (std::ranges::find(kMessages, o.backward.messages) == std::end(kMessages) &&
      !MessageSet::parse(o.backward.messages))
    throw UsageError(unknown_name("choice of messages between stages", o.backward.messages, kMessages));
  if (o.dtype != DType::float32 && o.dtype != DType::float64)
    refuse("activations are float32 or float64, not " + std::string(name_of(o.dtype)));
  if (o.backward.compresses() && o.dtype != DType::float32)
    refuse("gradients between stages travel as factors or whole numbers of float32 only, not of " +
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
      form_{shape.width, options_.backward, options_.stage.bf16},
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
        codecs_.emplace(chunk.number, std::make_unique<StageCodec>("gradients of " + chunk.arrives, form_));
    }
    if (!chunk.leaves.empty()) {
      kinds_.push_back({c, StageExchange::leaves});
      kinds_.push_back({c, StageExchange::arrives_back});
    }
  }
  // Tokens travel, each for itself.
  comm_.endpoint().add_whole_slots(comm_.group_id(), options_.first_slot, num_slots());
  if (options_.copies)
    comm_.endpoint().add_whole_slots(options_.copies->group_id(), options_.gather_slot, num_slots());
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
          (options_.backward.bits > 0 ? std::to_string(options_.backward.bits) + " bits, "
                                      : "rank " + std::to_string(options_.backward.columns) + ", ") +
          options_.backward.messages;
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
  for (const int value : {s.stages, s.chunks, s.double_warmup ? 1 : 0, b.columns, b.bits,
                          b.lazy_error ? 1 : 0, static_cast<int>(options_.dtype), s.bf16 ? 1 : 0})
    add(static_cast<std::uint64_t>(value));
  for (const int layers : s.layers) add(static_cast<std::uint64_t>(layers));
  add(b.seed);
  return hash;
}

std::string Pipeline::codec_text(int chunk, int micro_batches) const {
  if (!options_.backward.compresses()) return "as they are";
  std::string out = options_.backward.bits > 0
                        ? "whole numbers of " + std::to_string(options_.backward.bits) + " bits"
                        : "factors of " + std::to_string(options_.backward.columns) + " columns";
  const std::int64_t tokens = shares_of(options_.tokens).count(share());
  if (tokens > 0 && !form_.shortens(tokens)) return "as they are, because " + out + " would be no shorter";
  int some = 0;
  for (int m = 0; m < micro_batches; ++m) some += is_compressed(chunk, m, micro_batches) ? 1 : 0;
  if (micro_batches > 0) out += " in " + std::to_string(some) + " of " + std::to_string(micro_batches);
  if (options_.backward.messages == "epilogue") out += ", those that no forward could hide";
  if (chosen_) out += ", those that have less slack than it saves";
  if (!options_.backward.lazy_error) out += ", what is left behind is lost";
  return out;
}

std::vector<PlanRow> Pipeline::rows() const {
  std::vector<PlanRow> out;
  const int m = options_.micro_batches;
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
    std::int64_t bytes = 0;
    for (int i = 0; i < m; ++i) bytes += message_bytes(tokens, is_coded(kind, i, m));
    row.bytes = static_cast<double>(bytes);
    const LinkCost& cost = comm_.endpoint().cost(/*whole=*/true);
    row.seconds = m * cost.hop_seconds + row.bytes * cost.seconds_per_byte;
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

bool Pipeline::is_coded(const Kind& kind, int micro_batch, int micro_batches) const {
  if (!is_back(kind.what)) return false;
  const int number = chunks_[static_cast<std::size_t>(kind.chunk)].number;
  return is_compressed(is_sent(kind.what) ? number : number + 1, micro_batch, micro_batches);
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

void Pipeline::step_end() {
  ended_ = bytes_;
  if (ended_ != nullptr) ended_->formula = formula_of_step();
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
