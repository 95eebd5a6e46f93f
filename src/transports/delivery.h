// What happens to a payload when it meets its receive: checks, then the sink. Shared by all transports.
#pragma once

#include <span>

#include "transports/records.h"
#include "wire/frame.h"

namespace weft {

// What the record expects of the frame of its message; throws as wire::check_message does.
void check_arrival(const RecvRecord& recv, const wire::Frame& frame, int rank);
// Puts a payload that lies in memory where the record wants it. May throw (a consumer may refuse what it was
// given).
void deliver(RecvRecord& recv, std::span<const std::byte> payload, Arena& arena);
// The frame of a send, without a payload checksum.
wire::Frame frame_of(const SendRecord& send, std::uint64_t job, std::uint32_t epoch, int rank);

}  // namespace weft
