// Writes seeds for fuzz_handshake into the folder it is given: one whole handshake for each kind of notice
// behind it.
#include <fstream>
#include <string>
#include <vector>

#include "transports/tcp_handshake.h"

using namespace weft::tcp;  // NOLINT(google-build-using-namespace): a single-purpose program

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string token(32, 's');  // not the one that the target believes
  const HelloBytes hello = encode(Hello{.job = 7, .from = 1, .size = 2, .settings = {}, .nonce = {}});
  const ChallengeBytes challenge = encode(Challenge{});
  const ProofBytes proof = make_proof(token, hello, challenge, Place{});
  const VerdictBytes verdict = make_verdict(token, hello, challenge, proof, Refusal::none);
  const std::vector<std::vector<std::byte>> notices = {
      encode_notice(NoticeKind::table, encode_table(std::vector<Place>(2))),
      encode_notice(NoticeKind::ready, {}), encode_notice(NoticeKind::go, {}),
      encode_notice(NoticeKind::abort, std::vector<std::byte>(20, std::byte{'x'}))};
  for (std::size_t i = 0; i < notices.size(); ++i) {
    std::ofstream file(std::string(argv[1]) + "/talk" + std::to_string(i), std::ios::binary);
    const auto put = [&file](const auto& bytes) {
      file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    };
    put(hello);
    put(challenge);
    put(proof);
    put(verdict);
    put(notices[i]);
  }
  return 0;
}
