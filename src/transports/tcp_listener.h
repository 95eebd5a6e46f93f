// Where other ranks knock. Accepts connections and lets each prove that it belongs to the job; whoever cannot
// is turned away without having cost more than a socket and a few hundred bytes.
//
// Limits for strangers: 160 bytes are read of fixed layout, kGuestSeconds to prove themselves, kGuests of
// them at a time. When all places are taken, one that was there for kPatience without finishing makes room
// for the newcomer, otherwise the newcomer is closed at once: a flood slows ranks down (they try again) and
// cannot lock them out.
#pragma once

#include <array>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "transports/tcp_socket.h"

namespace weft::tcp {

inline constexpr std::size_t kGuests = 64;
inline constexpr Time kGuestTime = 5s;
inline constexpr Time kPatience = 250ms;

class Listener {
 public:
  struct Host {
    Hello expected;                             // what a connector must say, but for `from` and the nonce
    std::function<const std::string&()> token;  // asked once a guest has sent its proof
    // It is proven to be this rank; none: the place is reserved for it.
    std::function<Refusal(int, const Place&)> admit;
    std::function<void(int, Socket)> joined;    // after admit, and the guest was told
    std::function<void(int)> withdrawn;         // after admit, but the guest has gone
    std::function<void(int, Refusal)> refused;  // who says it is this rank was turned away
  };

  // Listens at once. Throws UsageError where the address cannot be had.
  Listener(asio::io_context& io, const SocketEndpoint& at, Host host, HandshakeBytes& bytes);
  ~Listener();  // closes everything; handlers that are left in `io` do nothing more
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  SocketEndpoint where() const { return where_; }

 private:
  struct Guest;
  struct Shared;  // what handlers hold; its `listener` becomes null when this object goes
  void accept();
  void accepted(const std::error_code& error, Socket socket);
  void sweep();
  void heard_hello(const std::shared_ptr<Guest>& guest);
  void heard_proof(const std::shared_ptr<Guest>& guest);
  void turn_away(const std::shared_ptr<Guest>& guest);
  void drop(std::shared_ptr<Guest> guest);  // by value: what is passed may be the list's own

  Host host_;
  HandshakeBytes& bytes_;
  SocketAcceptor acceptor_;
  SteadyTimer sweeper_;
  SocketEndpoint where_;
  std::list<std::shared_ptr<Guest>> guests_;  // oldest first
  bool accepting_ = false;
  std::shared_ptr<Shared> shared_;
};

}  // namespace weft::tcp
