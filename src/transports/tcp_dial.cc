#include "transports/tcp_dial.h"

#include <algorithm>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <utility>

#include "weft/error.h"

namespace weft::tcp {

namespace {
constexpr Time kLongestPause = 200ms;
}

Dial::Dial(asio::io_context& io, Call call, HandshakeBytes& bytes)
    : call_(std::move(call)),
      bytes_(bytes),
      socket_(io.get_executor()),
      timer_(io.get_executor()),
      problems_(call_.endpoints.size()) {}

std::shared_ptr<Dial> Dial::start(asio::io_context& io, Call call, HandshakeBytes& bytes) {
  auto dial = std::make_shared<Dial>(io, std::move(call), bytes);
  dial->attempt();
  return dial;
}

void Dial::stop() {
  stopped_ = true;
  std::error_code ignored;
  socket_.close(ignored);
  timer_.cancel();
}

template <class Then>
auto Dial::then(Then next) {
  return [self = shared_from_this(), attempt = attempts_, next](const std::error_code& error,
                                                                std::size_t n = 0) {
    if (self->stopped_ || attempt != self->attempts_) return;
    if (error) return self->again(error.message());
    try {
      next(*self, n);
    } catch (...) {
      self->fail(std::current_exception());
    }
  };
}

void Dial::attempt() {
  const SocketEndpoint& to = call_.endpoints[turn_];
  ++attempts_;
  timer_.expires_after(kAttempt);
  timer_.async_wait([self = shared_from_this(), attempt = attempts_](const std::error_code& error) {
    if (!error && !self->stopped_ && attempt == self->attempts_) self->again("no answer");
  });
  socket_.async_connect(to, then([](Dial& self, std::size_t) { self.say_hello(); }));
}

void Dial::again(const std::string& problem) {
  problems_[turn_] = problem;
  turn_ = (turn_ + 1) % call_.endpoints.size();
  std::error_code ignored;
  socket_.close(ignored);
  ++attempts_;  // what is left of this attempt is ignored
  timer_.expires_after(pause_);
  pause_ = std::min(2 * pause_, kLongestPause);
  timer_.async_wait([self = shared_from_this(), attempt = attempts_](const std::error_code& error) {
    if (!error && !self->stopped_ && attempt == self->attempts_) self->attempt();
  });
}

std::string Dial::tried() const {
  std::string text;
  for (std::size_t i = 0; i < problems_.size(); ++i) {
    text += (i == 0 ? "" : "; ") + text_of(call_.endpoints[i]) + ": " +
            (problems_[i].empty() ? "no answer" : problems_[i]);
  }
  return text;
}

void Dial::fail(std::exception_ptr error) {
  stop();
  call_.refused(std::move(error));
}

void Dial::refuse(Refusal refusal) {
  std::error_code ignored;
  const SocketEndpoint there = socket_.remote_endpoint(ignored);
  fail(std::make_exception_ptr(TransportError(
      TransportError::Kind::refused, call_.hello.to,
      "rank " + std::to_string(call_.hello.from) + ": rank " + std::to_string(call_.hello.to) + " at " +
          text_of(there) + " refused the connection: " + std::string(text_of(refusal)))));
}

void Dial::say_hello() {
  std::error_code error;
  // A connection to an ephemeral port of one's own host where nobody listens can meet itself.
  if (socket_.local_endpoint(error) == socket_.remote_endpoint(error)) return again("nobody listens");
  call_.hello.nonce = random_nonce();
  hello_ = encode(call_.hello);
  asio::async_write(socket_, asio::buffer(hello_), then([](Dial& self, std::size_t n) {
                      self.bytes_.sent += n;
                      asio::async_read(self.socket_, asio::buffer(self.challenge_),
                                       self.then([](Dial& me, std::size_t m) {
                                         me.bytes_.received += m;
                                         me.heard_challenge();
                                       }));
                    }));
}

void Dial::heard_challenge() {
  const std::optional<Challenge> challenge = parse_challenge(challenge_);
  if (!challenge) {
    throw TransportError(TransportError::Kind::refused, call_.hello.to,
                         "what answers at " + text_of(socket_.remote_endpoint()) +
                             " is no rank of a weft job: set WEFT_PORT to a free port on all ranks");
  }
  if (challenge->refusal != Refusal::none) return refuse(challenge->refusal);
  token_ = call_.token();
  proof_ = make_proof(token_, hello_, challenge_, call_.listens(socket_));
  ++proofs_;
  asio::async_write(socket_, asio::buffer(proof_), then([](Dial& self, std::size_t n) {
                      self.bytes_.sent += n;
                      asio::async_read(self.socket_, asio::buffer(self.verdict_),
                                       self.then([](Dial& me, std::size_t m) {
                                         me.bytes_.received += m;
                                         me.heard_verdict();
                                       }));
                    }));
}

void Dial::heard_verdict() {
  const std::optional<Refusal> refusal = check_verdict(token_, hello_, challenge_, proof_, verdict_);
  if (!refusal) return again("an answer that makes no sense");
  // By an attempt of ours that was given up before its answer came: the other side will notice.
  if (*refusal == Refusal::taken && proofs_ > 1) return again(std::string(text_of(*refusal)));
  if (*refusal != Refusal::none) return refuse(*refusal);
  Socket socket = std::move(socket_);
  stop();
  call_.connected(std::move(socket));
}

}  // namespace weft::tcp
