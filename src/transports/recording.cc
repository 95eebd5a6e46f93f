#include "transports/recording.h"

namespace weft {

void RecordingTransport::post(SendRecord& send) noexcept {
  OperationTraffic& traffic = of(send.id);
  traffic.messages_sent += 1;
  traffic.payload_bytes_sent += send.payload.size();
  traffic.hops.insert(send.id.hop);
  inner_.post(send);
}

void RecordingTransport::post(RecvRecord& recv) noexcept {
  OperationTraffic& traffic = of(recv.id);
  traffic.messages_received += 1;
  traffic.hops.insert(recv.id.hop);
  inner_.post(recv);
}

OperationTraffic RecordingTransport::traffic(std::uint64_t group, std::uint32_t slot,
                                             std::uint32_t step) const {
  const auto found = operations_.find({slot, step, group});
  return found == operations_.end() ? OperationTraffic{} : found->second;
}

OperationTraffic RecordingTransport::traffic(std::uint32_t slot, std::uint32_t step) const {
  OperationTraffic sum;
  for (auto it = operations_.lower_bound({slot, step, 0}); it != operations_.end(); ++it) {
    if (it->first.slot != slot || it->first.step != step) break;
    sum.messages_sent += it->second.messages_sent;
    sum.messages_received += it->second.messages_received;
    sum.payload_bytes_sent += it->second.payload_bytes_sent;
    sum.hops.insert(it->second.hops.begin(), it->second.hops.end());
  }
  return sum;
}

}  // namespace weft
