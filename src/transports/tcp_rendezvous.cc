#include "transports/tcp_rendezvous.h"

#include <sys/socket.h>

#include <algorithm>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "transports/tcp_addresses.h"
#include "transports/tcp_dial.h"
#include "transports/tcp_listener.h"
#include "transports/tcp_token.h"
#include "weft/error.h"

namespace weft::tcp {

Place place_of(const SocketEndpoint& at) {
  const asio::ip::address_v6 address =
      at.address().is_v6() ? at.address().to_v6()
                           : asio::ip::make_address_v6(asio::ip::v4_mapped, at.address().to_v4());
  Place place{.port = at.port()};
  const asio::ip::address_v6::bytes_type bytes = address.to_bytes();
  std::transform(bytes.begin(), bytes.end(), place.address.begin(),
                 [](unsigned char b) { return std::byte(b); });
  return place;
}

SocketEndpoint endpoint_of(const Place& place) {
  asio::ip::address_v6::bytes_type bytes;
  std::transform(place.address.begin(), place.address.end(), bytes.begin(),
                 [](std::byte b) { return static_cast<unsigned char>(b); });
  const asio::ip::address_v6 address(bytes);
  if (address.is_v4_mapped()) return {asio::ip::make_address_v4(asio::ip::v4_mapped, address), place.port};
  return {address, place.port};
}

namespace {

constexpr std::size_t kShortestToken = 32;
// The others wait that much longer than rank 0, so that its list of missing ranks reaches them.
constexpr Time kGrace = 1s;

// IPv4 first: "localhost" then means the same on all hosts.
std::vector<SocketEndpoint> resolve(asio::io_context& io, const std::string& host, std::uint16_t port) {
  std::error_code error;
  asio::ip::basic_resolver<asio::ip::tcp, IoExecutor> resolver(io.get_executor());
  const auto found = resolver.resolve(host, std::to_string(port), error);
  std::vector<SocketEndpoint> endpoints;
  for (const bool v4 : {true, false}) {
    for (const auto& entry : found) {
      if (entry.endpoint().address().is_v4() == v4) endpoints.push_back(entry.endpoint());
    }
  }
  if (error || endpoints.empty()) {
    throw UsageError("MASTER_ADDR '" + host + "' cannot be resolved: " + error.message());
  }
  return endpoints;
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 16) return text + " and " + std::to_string(ranks.size() - i) + " more";
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::string seconds_text(Time t) {
  std::string text = std::to_string(seconds(t));
  return text.substr(0, text.find('.') + 2) + " s";
}

// The other side has closed it, and nothing is left to read.
bool hung_up(Socket& socket) {
  std::byte next{};
  const ssize_t n = ::recv(socket.native_handle(), &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

class Rendezvous {
 public:
  Rendezvous(asio::io_context& io, const TcpOptions& options)
      : io_(io), options_(options), members_(static_cast<std::size_t>(options.size)), started_(steady_now()) {
    hello_ = {.job = job_hash(options.job),
              .epoch = options.epoch,
              .from = options.rank,
              .size = options.size,
              .settings = settings_of(options)};
  }
  Mesh run();

 private:
  struct Member {
    std::optional<Socket> socket;
    Place place;
    bool reserved = false;
    bool ready = false;
    std::array<std::byte, kNoticeBytes> head{};
    std::vector<std::byte> body;
    std::vector<std::vector<std::byte>> outgoing;  // kept until the end: they are short
  };
  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  bool leads() const { return options_.rank == 0; }

  void prepare();
  void listen(const std::vector<Address>& at, std::uint16_t port);
  Listener::Host host();
  std::vector<std::byte> table_for(int receiver);
  void call(int rank, std::vector<SocketEndpoint> endpoints);
  void joined(int rank, Socket socket);
  void read_notice(int rank);
  void heard(int rank, const Notice& notice);
  void lost(int rank);
  void send(int rank, NoticeKind kind, std::span<const std::byte> body = {});
  void take_table(std::span<const std::byte> body);
  void proceed();
  void fail(std::exception_ptr error) {
    if (!error_) error_ = std::move(error);
  }
  [[noreturn]] void out_of_time();
  std::string places_text() const;   // where this rank listens
  std::string refused_text() const;  // whom it has turned away, or nothing
  void abort_all(char kind, const std::string& text);
  void stop() noexcept;

  asio::io_context& io_;
  const TcpOptions& options_;
  std::vector<Member> members_;
  Time started_;
  Hello hello_;
  HandshakeBytes bytes_;
  std::vector<SocketEndpoint> master_;
  Meeting meeting_;
  std::string token_;
  std::string token_path_;  // empty: the token was given
  TokenFile token_file_;
  std::vector<std::unique_ptr<Listener>> listeners_;  // at one port of several addresses
  std::map<int, std::shared_ptr<Dial>> dials_;
  bool table_known_ = false;
  bool said_ready_ = false;
  bool done_ = false;
  int going_ = 0;                   // rank 0: "go" is still to be written to so many
  std::map<int, Refusal> refused_;  // whom this rank has turned away, and why last; -1: who is no rank at all
  std::exception_ptr error_;
  // Handlers look here before they touch this object.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

void Rendezvous::prepare() {
  master_ = resolve(io_, options_.master_addr, options_.port);
  meeting_.master = options_.master_addr;
  meeting_.bind = options_.bind;
  meeting_.has_token = !options_.token.empty();
  for (const SocketEndpoint& endpoint : master_) meeting_.resolved.push_back(endpoint.address());
  std::vector<Address> wanted = bound_addresses(options_.bind, own_addresses());
  wanted.insert(wanted.end(), meeting_.resolved.begin(), meeting_.resolved.end());
  const auto beyond =
      std::find_if(wanted.begin(), wanted.end(), [](const Address& a) { return !a.is_loopback(); });
  if (options_.token.empty() && beyond != wanted.end()) {
    throw UsageError(
        "the ranks would meet at " + beyond->to_string() +
        ", which is not loopback, so they need a shared secret: set the same WEFT_TOKEN for all of "
        "them, e.g. export WEFT_TOKEN=$(openssl rand -hex 32)");
  }
  if (!options_.token.empty() && options_.token.size() < kShortestToken) {
    throw UsageError("WEFT_TOKEN is shorter than " + std::to_string(kShortestToken) +
                     " characters: use e.g. $(openssl rand -hex 32)");
  }
  token_ = options_.token;
  if (token_.empty()) token_path_ = token_path(options_.token_dir, hello_.job, options_.port);
}

// The same port at all of them. Port 0: any that is free at all.
void Rendezvous::listen(const std::vector<Address>& at, std::uint16_t port) {
  constexpr int kTries = 16;
  for (int attempt = 1;; ++attempt) {
    try {
      for (const Address& address : at) {
        const std::uint16_t same = listeners_.empty() ? port : listeners_.front()->where().port();
        listeners_.push_back(std::make_unique<Listener>(io_, SocketEndpoint(address, same), host(), bytes_));
      }
      return;
    } catch (const UsageError&) {
      listeners_.clear();
      if (port != 0 || attempt == kTries) throw;
    }
  }
}

Listener::Host Rendezvous::host() {
  Listener::Host host;
  host.expected = hello_;
  host.expected.to = options_.rank;
  host.expected.role = leads() ? Role::rendezvous : Role::mesh;
  host.token = [this]() -> const std::string& { return token_; };
  host.admit = [this](int rank, const Place& place) {
    Member& before = member(rank);
    // A busy host may answer a call that was given up meanwhile. Rank 0 hears the end of it by itself.
    if (!leads() && before.socket && hung_up(*before.socket)) before = Member{};
    if (before.reserved) return Refusal::taken;
    member(rank).reserved = true;
    member(rank).place = place;
    return Refusal::none;
  };
  host.joined = [this](int rank, Socket socket) { joined(rank, std::move(socket)); };
  host.withdrawn = [this](int rank) { member(rank).reserved = false; };
  host.refused = [this](int rank, Refusal refusal) {
    refused_[rank >= 0 && rank < options_.size ? rank : -1] = refusal;
  };
  return host;
}

void Rendezvous::call(int rank, std::vector<SocketEndpoint> endpoints) {
  Dial::Call call;
  call.hello = hello_;
  call.hello.to = rank;
  call.hello.role = rank == 0 ? Role::rendezvous : Role::mesh;
  call.endpoints = std::move(endpoints);
  call.token = [this] {
    // Read late: rank 0 has answered, so its file is the one of this job.
    if (token_.empty()) token_ = read_token(token_path_);
    return token_;
  };
  call.listens = [this](const Socket& socket) {
    if (listeners_.empty())
      listen(addresses_of_others(meeting_, own_addresses(), socket.local_endpoint().address()), 0);
    return place_of(listeners_.front()->where());
  };
  call.connected = [this, rank](Socket socket) { joined(rank, std::move(socket)); };
  call.refused = [this](std::exception_ptr error) { fail(std::move(error)); };
  dials_[rank] = Dial::start(io_, std::move(call), bytes_);
}

void Rendezvous::joined(int rank, Socket socket) {
  Member& m = member(rank);
  m.reserved = true;
  refused_.erase(rank);  // it has come after all
  std::error_code ignored;
  socket.set_option(asio::ip::tcp::no_delay(true), ignored);
  m.socket.emplace(std::move(socket));
  if (leads() || rank == 0) read_notice(rank);
  proceed();
}

void Rendezvous::read_notice(int rank) {
  Member& m = member(rank);
  asio::async_read(*m.socket, asio::buffer(m.head),
                   [this, alive = alive_, rank](const std::error_code& error, std::size_t n) {
                     if (!*alive) return;
                     bytes_.received += n;
                     if (error) return lost(rank);
                     Member& from = member(rank);
                     const std::optional<Notice> notice = parse_notice(from.head, options_.size);
                     if (!notice) return lost(rank);
                     from.body.resize(notice->length);  // parse_notice has bounded it
                     asio::async_read(
                         *from.socket, asio::buffer(from.body),
                         [this, alive, rank, notice](const std::error_code& cut, std::size_t m_bytes) {
                           if (!*alive) return;
                           bytes_.received += m_bytes;
                           if (cut || !body_is_whole(*notice, member(rank).body)) return lost(rank);
                           heard(rank, *notice);
                         });
                   });
}

void Rendezvous::heard(int rank, const Notice& notice) {
  const std::vector<std::byte>& body = member(rank).body;
  if (leads()) {
    if (notice.kind != NoticeKind::ready || !table_known_) return lost(rank);
    member(rank).ready = true;
    return proceed();
  }
  switch (notice.kind) {
    case NoticeKind::table:
      take_table(body);
      read_notice(rank);
      break;
    case NoticeKind::go:
      done_ = true;
      break;
    case NoticeKind::abort: {
      const bool time = !body.empty() && body[0] == std::byte{'t'};
      const std::string text = printable(std::span(body).subspan(body.empty() ? 0 : 1));
      const double waited = seconds(steady_now() - started_);
      fail(time ? std::make_exception_ptr(TimeoutError(-1, waited, text))
                : std::make_exception_ptr(TransportError(TransportError::Kind::refused, -1, text)));
      break;
    }
    case NoticeKind::ready:
      lost(rank);
      break;
  }
}

void Rendezvous::lost(int rank) {
  Member& m = member(rank);
  if (leads() && !table_known_) {  // it may come back
    m = Member{};
    return;
  }
  const std::string text = "rank " + std::to_string(rank) + " left while the job was forming";
  if (leads()) abort_all('r', text);
  fail(std::make_exception_ptr(TransportError(TransportError::Kind::peer_lost, rank, text)));
}

void Rendezvous::send(int rank, NoticeKind kind, std::span<const std::byte> body) {
  Member& m = member(rank);
  m.outgoing.push_back(encode_notice(kind, body));
  asio::async_write(*m.socket, asio::buffer(m.outgoing.back()),
                    [this, alive = alive_, kind](const std::error_code&, std::size_t n) {
                      if (!*alive) return;  // an error shows in what is read from that rank
                      bytes_.sent += n;
                      if (kind == NoticeKind::go && --going_ == 0) done_ = true;
                    });
}

void Rendezvous::take_table(std::span<const std::byte> body) {
  if (table_known_) return lost(0);
  table_known_ = true;
  const std::vector<Place> places = parse_table(body);
  for (int rank = 1; rank < options_.rank; ++rank)
    call(rank, {endpoint_of(places[static_cast<std::size_t>(rank)])});
  proceed();
}

// A rank that came over loopback shares this host and listens at all its addresses: whoever came from
// elsewhere reaches it where it has reached rank 0.
std::vector<std::byte> Rendezvous::table_for(int receiver) {
  std::error_code gone;  // then nobody reads the table
  const Address met = member(receiver).socket->local_endpoint(gone).address();
  std::vector<Place> places;
  places.reserve(members_.size());
  for (const Member& m : members_) {
    const SocketEndpoint at = endpoint_of(m.place);
    const bool hidden = at.address().is_loopback() && !gone && !met.is_loopback();
    places.push_back(hidden ? place_of({met, at.port()}) : m.place);
  }
  return encode_table(places);
}

void Rendezvous::proceed() {
  bool all_here = true;
  bool all_ready = true;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) continue;
    all_here = all_here && member(rank).socket.has_value();
    all_ready = all_ready && member(rank).ready;
  }
  if (!all_here) return;
  if (!leads()) {
    if (table_known_ && !std::exchange(said_ready_, true)) send(0, NoticeKind::ready);
    return;
  }
  if (!std::exchange(table_known_, true)) {
    for (int rank = 1; rank < options_.size; ++rank) send(rank, NoticeKind::table, table_for(rank));
    return;
  }
  if (!all_ready) return;
  going_ = options_.size - 1;
  for (int rank = 1; rank < options_.size; ++rank) send(rank, NoticeKind::go);
}

void Rendezvous::abort_all(char kind, const std::string& text) {
  const std::string body = (kind + text).substr(0, kAbortText);
  const std::vector<std::byte> notice = encode_notice(NoticeKind::abort, bytes_of(body));
  for (Member& m : members_) {
    if (!m.socket) continue;
    std::error_code ignored;
    m.socket->non_blocking(true, ignored);
    m.socket->write_some(asio::buffer(notice), ignored);
    m.socket->shutdown(asio::socket_base::shutdown_send, ignored);
  }
}

void Rendezvous::out_of_time() {
  std::vector<int> missing;
  for (int rank = 0; rank < options_.size; ++rank) {
    const Member& m = member(rank);
    if (rank != options_.rank && (!m.socket || (leads() && table_known_ && !m.ready)))
      missing.push_back(rank);
  }
  const double waited = seconds(steady_now() - started_);
  const int blame = missing.size() == 1 ? missing[0] : -1;
  const std::string after = " within " + seconds_text(options_.connect_timeout);
  if (leads()) {
    const std::string text = "the job did not form: " + list_of(missing) + " did not come" + after +
                             " (rank 0 is at " + places_text() + ")" + refused_text();
    abort_all('t', text);
    throw TimeoutError(blame, waited, text);
  }
  if (!member(0).socket) {
    throw TimeoutError(0, waited,
                       "the job did not form: rank 0 did not answer at " + options_.master_addr + ":" +
                           std::to_string(options_.port) + after + " (tried " + dials_[0]->tried() + ")");
  }
  if (!table_known_ || missing.empty()) {
    throw TimeoutError(0, waited,
                       "the job did not form: rank 0 is waiting for others and did not say for whom" + after);
  }
  std::string tried;
  for (const int rank : missing) {
    if (!dials_.contains(rank)) continue;  // it should have called
    tried += (tried.empty() ? " (tried " : "; ") + dials_[rank]->tried();
  }
  throw TimeoutError(blame, waited,
                     "the job did not form: no connection with " + list_of(missing) + after + tried +
                         (tried.empty() ? "" : ")") + refused_text());
}

std::string Rendezvous::places_text() const {
  std::string text;
  bool loopback = true;
  for (const auto& listener : listeners_) {
    text += (text.empty() ? "" : ", ") + tcp::text_of(listener->where());
    loopback = loopback && listener->where().address().is_loopback();
  }
  if (!loopback) return text;
  return text +
         ", where only its own host reaches it: for ranks elsewhere give all the same WEFT_TOKEN, and "
         "MASTER_ADDR or WEFT_BIND of rank 0 an address that they reach";
}

std::string Rendezvous::refused_text() const {
  std::map<Refusal, std::vector<int>> ranks_by_reason;
  for (const auto& [rank, why] : refused_) ranks_by_reason[why].push_back(rank);
  std::string text;
  for (const auto& [why, ranks] : ranks_by_reason) {
    const bool one = ranks.size() == 1;
    text += one ? "; a caller that says it is " : "; callers that say they are ";
    text += ranks.front() < 0 && one ? "no rank of this job" : list_of(ranks);
    text += (one ? " was refused: " : " were refused: ") + std::string(text_of(why));
  }
  return text;
}

// Nothing of this object may be called after it has gone.
void Rendezvous::stop() noexcept {
  *alive_ = false;
  try {
    listeners_.clear();
    for (auto& [rank, dial] : dials_) dial->stop();
    if (!done_) members_.clear();
    io_.restart();
    while (io_.poll() > 0) {
    }
  } catch (...) {
    io_.stop();  // what is left in it looks at alive_ and does nothing
  }
}

Mesh Rendezvous::run() {
  struct Stop {
    Rendezvous& self;
    ~Stop() { self.stop(); }
  };
  {
    const Stop at_end{*this};
    prepare();
    if (leads()) {
      listen(addresses_of_rank_0(meeting_, own_addresses()), options_.port);
      if (token_.empty()) {
        token_file_ = TokenFile(token_path_);  // nobody is answered before run_one
        token_ = token_file_.token();
      }
    } else {
      call(0, master_);
    }
    const Time deadline = later(later(started_, options_.connect_timeout), leads() ? 0ms : kGrace);
    while (!done_ && !error_) {
      // Rank 0 itself: no grace, it is the one that knows who is missing.
      const bool alone = !leads() && !member(0).socket;
      if (steady_now() >= deadline - (alone ? kGrace : 0ms)) out_of_time();
      io_.restart();
      io_.run_one_until(point(std::min(deadline, steady_now() + 50ms)));
    }
    if (error_) std::rethrow_exception(error_);
  }
  Mesh mesh;
  mesh.bytes = bytes_;
  for (Member& m : members_) mesh.sockets.push_back(std::move(m.socket));
  return mesh;
}

}  // namespace

Mesh form_mesh(asio::io_context& io, const TcpOptions& options) { return Rendezvous(io, options).run(); }

}  // namespace weft::tcp
