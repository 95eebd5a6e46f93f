// The asio types of the tcp transport, bound to io_context's own executor (no type erasure, so nothing is
// allocated for it).
#pragma once

#include <asio/basic_socket_acceptor.hpp>
#include <asio/basic_stream_socket.hpp>
#include <asio/basic_waitable_timer.hpp>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <chrono>
#include <string>
#include <system_error>
#include <vector>

#include "transports/tcp_handshake.h"
#include "weft/clock.h"

namespace weft::tcp {

using IoExecutor = asio::io_context::executor_type;
using Socket = asio::basic_stream_socket<asio::ip::tcp, IoExecutor>;
using SocketAcceptor = asio::basic_socket_acceptor<asio::ip::tcp, IoExecutor>;
using SteadyTimer = asio::basic_waitable_timer<std::chrono::steady_clock,
                                               asio::wait_traits<std::chrono::steady_clock>, IoExecutor>;
using Address = asio::ip::address;
using SocketEndpoint = asio::ip::tcp::endpoint;

inline std::chrono::steady_clock::time_point point(Time t) {
  return std::chrono::steady_clock::time_point(t);
}
inline Time steady_now() { return std::chrono::steady_clock::now().time_since_epoch(); }
inline std::string text_of(const SocketEndpoint& at) {
  const std::string address = at.address().to_string();
  return (at.address().is_v6() ? "[" + address + "]" : address) + ":" + std::to_string(at.port());
}

// Bytes of handshakes, for the transport's counters.
struct HandshakeBytes {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
};

Place place_of(const SocketEndpoint& at);
SocketEndpoint endpoint_of(const Place& place);

}  // namespace weft::tcp
