#include "transports/delivery.h"

#include <algorithm>

namespace weft {

void check_arrival(const RecvRecord& recv, const wire::Frame& frame, int rank) {
  const bool exact = recv.sink.kind == Sink::Kind::into;
  wire::check_message(frame,
                      {.id = recv.id,
                       .dtype = recv.dtype,
                       .codec = recv.codec,
                       .fingerprint = recv.operation.fingerprint,
                       .exact_length = exact,
                       .length = exact ? recv.sink.into.size() : recv.sink.limit},
                      rank);
}

void deliver(RecvRecord& recv, std::span<const std::byte> payload, Arena& arena) {
  switch (recv.sink.kind) {
    case Sink::Kind::into:
      std::copy(payload.begin(), payload.end(), recv.sink.into.begin());
      break;
    case Sink::Kind::consume:
      recv.sink.consume(payload);
      break;
    case Sink::Kind::keep:
      recv.sink.kept = Buffer(arena, payload.size());
      std::copy(payload.begin(), payload.end(), recv.sink.kept.data());
      break;
  }
}

wire::Frame frame_of(const SendRecord& send, std::uint64_t job, std::uint32_t epoch, int rank) {
  return {.kind = wire::FrameKind::data,
          .dtype = send.dtype,
          .codec = send.codec,
          .epoch = epoch,
          .job = job,
          .id = send.id,
          .source = rank,
          .length = send.payload.size(),
          .fingerprint = send.operation.fingerprint,
          .payload_crc = 0};
}

}  // namespace weft
