// One call to another rank: connects, proves itself, checks the other's proof. Tries again, slower each time,
// while nobody listens, the line is cut before an answer, or an attempt takes longer than kAttempt; a clear
// refusal ends it.
#pragma once

#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transports/tcp_socket.h"

namespace weft::tcp {

inline constexpr Time kAttempt = 3s;

class Dial : public std::enable_shared_from_this<Dial> {
 public:
  struct Call {
    Hello hello;                                  // a fresh nonce is put in at each attempt
    std::vector<SocketEndpoint> endpoints;        // tried in turn
    std::function<std::string()> token;           // asked once the other side has answered; may throw
    std::function<Place(const Socket&)> listens;  // where this rank listens; may throw
    std::function<void(Socket)> connected;
    std::function<void(std::exception_ptr)> refused;
  };

  static std::shared_ptr<Dial> start(asio::io_context& io, Call call, HandshakeBytes& bytes);
  // No callback is made any more.
  void stop();
  // Every address that was called and what went wrong there last, for a person.
  std::string tried() const;

  Dial(asio::io_context& io, Call call, HandshakeBytes& bytes);  // use start()

 private:
  void attempt();
  void again(const std::string& problem);
  void fail(std::exception_ptr error);
  void refuse(Refusal refusal);
  void say_hello();
  void heard_challenge();
  void heard_verdict();
  // A handler that ignores what belongs to an attempt that was given up, and tries again upon an error.
  template <class Then>
  auto then(Then next);

  Call call_;
  HandshakeBytes& bytes_;
  Socket socket_;
  SteadyTimer timer_;
  std::size_t turn_ = 0;      // which endpoint is called
  std::size_t attempts_ = 0;  // counted up at the start and at the end of each
  std::size_t proofs_ = 0;    // that were sent
  Time pause_ = 5ms;
  bool stopped_ = false;
  std::vector<std::string> problems_;  // by endpoint; empty: none so far
  std::string token_;
  HelloBytes hello_{};
  ChallengeBytes challenge_{};
  ProofBytes proof_{};
  VerdictBytes verdict_{};
};

}  // namespace weft::tcp
