#include "transports/tcp_listener.h"

#include <fcntl.h>

#include <asio/error.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <utility>

#include "weft/error.h"

namespace weft::tcp {

struct Listener::Shared {
  Listener* listener;
};

struct Listener::Guest {
  explicit Guest(Socket s) : socket(std::move(s)) {}
  Socket socket;
  Time since = steady_now();
  bool leaving = false;  // was refused and told so; stays until it has read that, or is swept
  Hello hello;
  HelloBytes hello_bytes{};
  ChallengeBytes challenge{};
  ProofBytes proof{};
  VerdictBytes verdict{};
  std::array<std::byte, 16> rest{};
};

Listener::Listener(asio::io_context& io, const SocketEndpoint& at, Host host, HandshakeBytes& bytes)
    : host_(std::move(host)),
      bytes_(bytes),
      acceptor_(io.get_executor()),
      sweeper_(io.get_executor()),
      shared_(std::make_shared<Shared>(Shared{this})) {
  std::error_code error;
  acceptor_.open(at.protocol(), error);
  if (!error) acceptor_.set_option(SocketAcceptor::reuse_address(true), error);
  if (!error) acceptor_.bind(at, error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  if (error == asio::error::address_in_use) {
    throw UsageError("port " + std::to_string(at.port()) + " of " + at.address().to_string() +
                     " is in use by another program or job: set WEFT_PORT to a free port on all ranks");
  }
  if (error) throw UsageError("cannot listen at " + text_of(at) + ": " + error.message());
  ::fcntl(acceptor_.native_handle(), F_SETFD, FD_CLOEXEC);
  where_ = acceptor_.local_endpoint();
  accept();
  sweep();
}

Listener::~Listener() {
  shared_->listener = nullptr;
  std::error_code ignored;
  acceptor_.close(ignored);
  for (const auto& guest : guests_) guest->socket.close(ignored);
}

void Listener::accept() {
  accepting_ = true;
  acceptor_.async_accept([shared = shared_](const std::error_code& error, Socket socket) {
    if (shared->listener != nullptr && error != asio::error::operation_aborted) {
      shared->listener->accepted(error, std::move(socket));
    }
  });
}

void Listener::accepted(const std::error_code& error, Socket socket) {
  // Out of descriptors: the next sweep takes it up again.
  accepting_ = false;
  if (error == asio::error::no_descriptors || error.value() == ENFILE || error == asio::error::no_memory)
    return;
  if (!error && guests_.size() >= kGuests && steady_now() - guests_.front()->since > kPatience)
    drop(guests_.front());
  if (!error && guests_.size() < kGuests) {
    auto guest = std::make_shared<Guest>(std::move(socket));
    guests_.push_back(guest);
    asio::async_read(guest->socket, asio::buffer(guest->hello_bytes),
                     [shared = shared_, guest](const std::error_code& failed, std::size_t n) {
                       if (shared->listener == nullptr) return;
                       shared->listener->bytes_.received += n;
                       if (failed)
                         shared->listener->drop(guest);
                       else
                         shared->listener->heard_hello(guest);
                     });
  }
  accept();
}

void Listener::sweep() {
  const Time now = steady_now();
  while (!guests_.empty() && now - guests_.front()->since > kGuestTime) drop(guests_.front());
  sweeper_.expires_after(kPatience);
  sweeper_.async_wait([shared = shared_](const std::error_code& error) {
    if (error || shared->listener == nullptr) return;
    if (!shared->listener->accepting_) shared->listener->accept();
    shared->listener->sweep();
  });
}

void Listener::drop(
    std::shared_ptr<Guest> guest) {  // NOLINT(performance-unnecessary-value-param): see its declaration
  // By reset: a stranger must not fill this host with sockets that wait for their time to pass.
  std::error_code ignored;
  if (!guest->leaving) guest->socket.set_option(asio::socket_base::linger(true, 0), ignored);
  guest->socket.close(ignored);
  std::erase(guests_, guest);
}

void Listener::heard_hello(const std::shared_ptr<Guest>& guest) {
  const std::optional<Hello> hello = parse_hello(guest->hello_bytes);
  if (!hello) {
    drop(guest);
    return;
  }
  guest->hello = *hello;
  const Refusal refusal = check_hello(*hello, host_.expected);
  if (refusal != Refusal::none) host_.refused(hello->from, refusal);
  guest->challenge = encode(Challenge{.refusal = refusal, .nonce = random_nonce()});
  asio::async_write(guest->socket, asio::buffer(guest->challenge),
                    [shared = shared_, guest, refusal](const std::error_code& failed, std::size_t n) {
                      if (shared->listener == nullptr) return;
                      shared->listener->bytes_.sent += n;
                      if (failed) return shared->listener->drop(guest);
                      if (refusal != Refusal::none) return shared->listener->turn_away(guest);
                      asio::async_read(guest->socket, asio::buffer(guest->proof),
                                       [shared, guest](const std::error_code& cut, std::size_t m) {
                                         if (shared->listener == nullptr) return;
                                         shared->listener->bytes_.received += m;
                                         if (cut)
                                           shared->listener->drop(guest);
                                         else
                                           shared->listener->heard_proof(guest);
                                       });
                    });
}

void Listener::heard_proof(const std::shared_ptr<Guest>& guest) {
  const std::string& token = host_.token();
  const std::optional<Place> place = check_proof(token, guest->hello_bytes, guest->challenge, guest->proof);
  const int rank = guest->hello.from;
  const Refusal refusal = place ? host_.admit(rank, *place) : Refusal::token;
  if (refusal != Refusal::none) host_.refused(rank, refusal);
  guest->verdict = make_verdict(token, guest->hello_bytes, guest->challenge, guest->proof, refusal);
  // A rank now, and no longer a stranger that makes room for the next one. Its handler keeps it alive.
  if (refusal == Refusal::none) std::erase(guests_, guest);
  asio::async_write(guest->socket, asio::buffer(guest->verdict),
                    [shared = shared_, guest, refusal, rank](const std::error_code& failed, std::size_t n) {
                      Listener* self = shared->listener;
                      if (self == nullptr) return;
                      self->bytes_.sent += n;
                      if (refusal != Refusal::none)
                        return failed ? self->drop(guest) : self->turn_away(guest);
                      if (failed)
                        self->host_.withdrawn(rank);
                      else
                        self->host_.joined(rank, std::move(guest->socket));
                    });
}

// The reason is on its way; closing now could overtake it.
void Listener::turn_away(const std::shared_ptr<Guest>& guest) {
  guest->leaving = true;
  std::error_code ignored;
  guest->socket.shutdown(asio::socket_base::shutdown_send, ignored);
  guest->socket.async_read_some(asio::buffer(guest->rest),
                                [shared = shared_, guest](const std::error_code&, std::size_t) {
                                  if (shared->listener != nullptr) shared->listener->drop(guest);
                                });
}

}  // namespace weft::tcp
