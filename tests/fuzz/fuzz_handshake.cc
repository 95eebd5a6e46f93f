// libFuzzer: everything of the tcp handshake that reads bytes of a stranger. What parses is written again and
// must read the same.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "transports/tcp_handshake.h"

using namespace weft::tcp;  // NOLINT(google-build-using-namespace): a single-purpose program

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::span<const std::byte> rest = std::as_bytes(std::span(data, size));
  const auto take = [&rest](auto bytes) {  // as much as there is; zeros behind it
    const std::size_t n = std::min(rest.size(), bytes.size());
    std::copy_n(rest.begin(), n, bytes.begin());
    rest = rest.subspan(n);
    return bytes;
  };
  static const std::string token(32, 't');
  const HelloBytes hello = take(HelloBytes{});
  const ChallengeBytes challenge = take(ChallengeBytes{});
  const ProofBytes proof = take(ProofBytes{});
  const VerdictBytes verdict = take(VerdictBytes{});
  if (const auto parsed = parse_hello(hello)) {
    Hello mine = *parsed;
    mine.version = kHandshakeVersion;
    check_hello(*parsed, mine);
    if (parsed->version == kHandshakeVersion && parsed->from >= 0 && parsed->to >= 0 && parsed->size >= 0) {
      if (parse_hello(encode(*parsed)) != parsed) std::abort();
    }
  }
  parse_challenge(challenge);
  // The fuzzer does not know an HMAC of this token: nothing may be believed.
  if (check_proof(token, hello, challenge, proof)) std::abort();
  if (check_verdict(token, hello, challenge, proof, verdict) == Refusal::none) std::abort();

  std::array<std::byte, kNoticeBytes> head = take(std::array<std::byte, kNoticeBytes>{});
  const int ranks = 1 + static_cast<int>(size % 40);
  if (const auto notice = parse_notice(head, ranks)) {
    if (notice->length > std::max(kAbortText, static_cast<std::size_t>(ranks) * kPlaceBytes)) std::abort();
    const auto body = rest.first(std::min<std::size_t>(rest.size(), notice->length));
    body_is_whole(*notice, body);
    if (notice->kind == NoticeKind::table) parse_table(body.first(body.size() / kPlaceBytes * kPlaceBytes));
    printable(body);
  }
  return 0;
}
