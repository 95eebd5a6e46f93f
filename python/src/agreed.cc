#include "agreed.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include "base/identity.h"
#include "weft/collective.h"
#include "weft/error.h"

namespace weft::python {

struct Agreement::Told {
  std::string mine;
  std::vector<std::int64_t> heads;   // of each rank: hash and length
  std::vector<std::int64_t> counts;  // the lengths, where the hashes differ
  std::string all;                   // then, of all ranks, one behind the other
  std::string fix;

  static Task<void> tell(Comm comm, std::shared_ptr<Told> told);
  std::string of(std::size_t rank) const {
    std::size_t first = 0;
    for (std::size_t r = 0; r < rank; ++r) first += static_cast<std::size_t>(counts[r]);
    return all.substr(first, static_cast<std::size_t>(counts[rank]));
  }
};

namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 24;  // what a peer says is not trusted
constexpr char kBetween = '\t', kBehind = '\n';

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = mix(text.size());
  for (const char c : text) hash = mix(hash ^ static_cast<unsigned char>(c));
  return hash;
}

std::vector<AgreedLine> lines_of(const std::string& text) {
  std::vector<AgreedLine> out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(kBehind, at), text.size());
    const std::size_t between = std::min(text.find(kBetween, at), end);
    out.push_back({text.substr(at, between - at),
                   text.substr(std::min(between + 1, end), end - std::min(between + 1, end))});
    at = end + 1;
  }
  return out;
}

// "table 'words' is 50 x 4 of float32 on rank 0 and 50 x 5 of float32 on rank 1"; empty: they are the same.
std::string difference(const std::string& first, const std::string& other, std::size_t rank) {
  const std::vector<AgreedLine> a = lines_of(first), b = lines_of(other);
  const std::string there = " on rank " + std::to_string(rank);
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i].what != b[i].what)
      return "rank 0 has " + a[i].what + " where rank " + std::to_string(rank) + " has " + b[i].what;
    if (a[i].value != b[i].value)
      return a[i].what + " is " + a[i].value + " on rank 0 and " + b[i].value + there;
  }
  if (a.size() == b.size()) return {};
  const AgreedLine& more = a.size() > b.size() ? a[b.size()] : b[a.size()];
  return more.what + " is there only on rank " +
         (a.size() > b.size() ? "0 and not" + there : std::to_string(rank) + " and not on rank 0");
}

}  // namespace

Task<void> Agreement::Told::tell(Comm comm, std::shared_ptr<Told> told) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto me = static_cast<std::size_t>(comm.rank());
  told->heads.assign(2 * size, 0);
  told->heads[2 * me] = static_cast<std::int64_t>(hash_of(told->mine));
  told->heads[2 * me + 1] = static_cast<std::int64_t>(told->mine.size());
  const Dense heads(std::span<std::int64_t>(told->heads));
  co_await all_gather(comm, heads);
  bool same = true;
  std::vector<std::int64_t> counts;
  std::int64_t before = 0, total = 0;
  for (std::size_t r = 0; r < size; ++r) {
    same = same && told->heads[2 * r] == told->heads[0];
    counts.push_back(told->heads[2 * r + 1]);
    if (counts.back() < 0 || counts.back() > kMostBytes) {
      const int peer = comm.world_rank(static_cast<int>(r));
      throw TransportError(TransportError::Kind::mismatch, peer,
                           "rank " + std::to_string(peer) + " says that its lines have " +
                               std::to_string(counts.back()) + " bytes");
    }
    if (r < me) before += counts.back();
    total += counts.back();
  }
  if (same) co_return;
  told->counts = std::move(counts);
  told->all.resize(static_cast<std::size_t>(total));
  told->all.replace(static_cast<std::size_t>(before), told->mine.size(), told->mine);
  const Dense texts(reinterpret_cast<std::byte*>(told->all.data()), total, DType::bytes);
  const std::span<const std::int64_t> lengths(told->counts);
  const Comm behind = comm.hops_from(static_cast<std::uint32_t>(comm.size()));
  co_await all_gather_v(behind, texts, lengths);
}

void Agreement::start(Engine& engine, const Comm& group, const SubmitOptions& submit,
                      const std::vector<AgreedLine>& lines, std::string fix) {
  told_ = std::make_shared<Told>();
  told_->fix = std::move(fix);
  for (const AgreedLine& line : lines) told_->mine += line.what + kBetween + line.value + kBehind;
  ticket_ = engine.submit(group, submit, [told = told_](Comm comm) { return Told::tell(comm, told); });
}

void Agreement::check() {
  const std::shared_ptr<Told> told = std::exchange(told_, nullptr);
  if (told == nullptr || told->counts.empty()) return;
  for (std::size_t r = 0; r < told->counts.size(); ++r) {
    const std::vector<AgreedLine> lines = lines_of(told->of(r));
    if (!lines.empty() && lines[0].what.empty())
      throw UsageError("rank " + std::to_string(r) + ": " + lines[0].value);
  }
  const std::string first = told->of(0);
  for (std::size_t r = 1; r < told->counts.size(); ++r) {
    const std::string what = difference(first, told->of(r), r);
    if (!what.empty()) throw UsageError(what + ": " + told->fix);
  }
}

}  // namespace weft::python
