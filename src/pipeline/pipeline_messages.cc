// What a stage sends and takes: one operation of the engine a message, and behind it the gather of shares.
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "pipeline/pipeline.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "wire/bfloat16.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("pipeline: " + what); }

std::span<float> floats(const Dense& data) {
  return {reinterpret_cast<float*>(data.data), static_cast<std::size_t>(data.count)};
}
std::span<bfloat16> bfloats(const Dense& data) {
  return {reinterpret_cast<bfloat16*>(data.data), static_cast<std::size_t>(data.count)};
}

}  // namespace

SubmitOptions Pipeline::submit_options(const Kind& kind, const When& when) const {
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
  is_sent(kind.what) ? start_send(kind, when, tensors) : start_receive(kind, when);
}

void Pipeline::start_receive(const Kind& kind, const When& when) {
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
    const std::int64_t count_of_all =
        std::accumulate(arrival->counts.begin(), arrival->counts.end(), std::int64_t{0});
    const DType type = arrival->coded ? DType::bytes : wire();
    arrival->memory = on_the_way_.take(static_cast<std::size_t>(count_of_all) * size_of(type));
    arrival->all = Dense(arrival->memory.get(), count_of_all, type);
  }
  const int peer = peer_of(kind);
  const SubmitOptions how = submit_options(kind, when);
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

std::int64_t Pipeline::message_bytes(std::int64_t tokens, bool coded) const {
  return coded ? form_.bytes(tokens) : tokens * width_ * static_cast<std::int64_t>(size_of(wire()));
}

std::vector<std::int64_t> Pipeline::arriving(std::int64_t tokens, bool coded) const {
  const Blocks shares = shares_of(tokens);
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(shares.size()));
  for (int r = 0; r < shares.size(); ++r)
    out.push_back(coded ? form_.bytes(shares.count(r)) : shares.count(r) * width_);
  return out;
}

// Of this rank, by the ring: every share but its neighbour's.
std::int64_t Pipeline::gather_bytes(std::int64_t tokens, bool coded) const {
  if (!options_.copies) return 0;
  const Blocks shares = shares_of(tokens);
  std::int64_t bytes = 0;
  for (int r = 0; r < shares.size(); ++r)
    bytes += r == (share() + 1) % shares.size() ? 0 : message_bytes(shares.count(r), coded);
  return bytes;
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
  if (!arrival.coded) {
    wire::widen(bfloats(arrival.all), floats(arrival.into));
    return kernels.widen_element * static_cast<double>(arrival.all.count);
  }
  const Blocks shares = shares_of(arrival.into.count / width_);
  double spent = 0;
  std::int64_t at = 0;
  for (int r = 0; r < shares.size(); ++r) {
    const std::int64_t bytes = arrival.counts[static_cast<std::size_t>(r)];
    const Dense goes = arrival.into.sub(shares.begin(r) * width_, shares.count(r) * width_);
    if (bytes > 0)
      StageCodec::decode(form_, {arrival.all.data + at, static_cast<std::size_t>(bytes)}, floats(goes));
    spent += StageCodec::decode_seconds(kernels, form_, shares.count(r));
    at += bytes;
  }
  return spent;
}

void Pipeline::start_send(const Kind& kind, const When& when, TensorSource& tensors) {
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
  const SubmitOptions how = submit_options(kind, when);
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
  const std::int64_t tokens = departure->data.count / codec->form().width;
  const std::int64_t bytes = codec->form().bytes(tokens);
  const MessageMemory::Piece coded = me->on_the_way_.take(static_cast<std::size_t>(bytes));
  auto work = [&] {
    codec->encode(gradient, {coded.get(), static_cast<std::size_t>(bytes)});
    return codec->encode_seconds(comm.kernels(), tokens);
  };
  Compute computed = comm.compute(work);
  co_await computed;
  departure->copy.reset();
  const Dense message(coded.get(), bytes, DType::bytes);
  Transfer sent = comm.send(departure->peer, 0, message);
  departure->bytes->sent += comm.bytes_sent();
  co_await sent;
}

std::int64_t Pipeline::formula_of_step() const {
  const int micro_batches = static_cast<int>(batches_.size());
  std::int64_t bytes = 0;
  for (const Kind& kind : kinds_) {
    if (!is_sent(kind.what)) {
      for (int m = 0; m < micro_batches; ++m)
        bytes +=
            gather_bytes(batches_[static_cast<std::size_t>(m)]->tokens, is_coded(kind, m, micro_batches));
      continue;
    }
    for (int m = 0; m < micro_batches; ++m) {
      const std::int64_t tokens = shares_of(batches_[static_cast<std::size_t>(m)]->tokens).count(share());
      bytes += message_bytes(tokens, is_coded(kind, m, micro_batches));
    }
  }
  return bytes;
}

}  // namespace weft
