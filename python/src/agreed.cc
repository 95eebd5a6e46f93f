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
  std::size_t parts = 1;
  std::string mine, of_part;         // lines that all have alike; those of a part
  std::vector<std::int64_t> heads;   // of each rank: a hash of each, the length of both
  std::vector<std::int64_t> counts;  // the lengths, where the hashes differ
  std::string all;                   // then, of all ranks, one behind the other
  std::string fix;

  static Task<void> tell(Comm comm, std::shared_ptr<Told> told);
  std::string of(std::size_t rank) const {
    std::size_t first = 0;
    for (std::size_t r = 0; r < rank; ++r) first += static_cast<std::size_t>(counts[r]);
    return all.substr(first, static_cast<std::size_t>(counts[rank]));
  }
  std::size_t first_of_part(std::size_t rank) const { return rank % parts; }
};

namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 24;  // what a peer says is not trusted
constexpr std::size_t kHead = 3;                            // values of a rank
constexpr char kBetween = '\t', kBehind = '\n', kParts = '\f';

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = mix(text.size());
  for (const char c : text) hash = mix(hash ^ static_cast<unsigned char>(c));
  return hash;
}

std::vector<AgreedLine> lines_of(const std::string& text, bool of_part) {
  const std::size_t parts = std::min(text.find(kParts), text.size());
  const std::size_t last = of_part ? text.size() : parts;
  std::vector<AgreedLine> out;
  for (std::size_t at = of_part ? std::min(parts + 1, last) : 0; at < last;) {
    const std::size_t end = std::min(text.find(kBehind, at), last);
    const std::size_t between = std::min(text.find(kBetween, at), end);
    out.push_back({text.substr(at, between - at),
                   text.substr(std::min(between + 1, end), end - std::min(between + 1, end)), of_part});
    at = end + 1;
  }
  return out;
}

// What a rank has told.
struct Lines {
  std::size_t rank = 0;
  std::vector<AgreedLine> lines;
};

// "table 'words' is 50 x 4 of float32 on rank 0 and 50 x 5 of float32 on rank 1"; empty: they are the same.
std::string difference(const Lines& first, const Lines& other) {
  const std::vector<AgreedLine>&a = first.lines, &b = other.lines;
  const std::string here = "rank " + std::to_string(first.rank), there = "rank " + std::to_string(other.rank);
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i].what != b[i].what) return here + " has " + a[i].what + " where " + there + " has " + b[i].what;
    if (a[i].value != b[i].value)
      return a[i].what + " is " + a[i].value + " on " + here + " and " + b[i].value + " on " + there;
  }
  if (a.size() == b.size()) return {};
  const bool in_first = a.size() > b.size();
  return (in_first ? a[b.size()] : b[a.size()]).what + " is there only on " + (in_first ? here : there) +
         " and not on " + (in_first ? there : here);
}

}  // namespace

Task<void> Agreement::Told::tell(Comm comm, std::shared_ptr<Told> told) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto me = static_cast<std::size_t>(comm.rank());
  const std::string text = told->mine + kParts + told->of_part;
  told->heads.assign(kHead * size, 0);
  told->heads[kHead * me] = static_cast<std::int64_t>(hash_of(told->mine));
  told->heads[kHead * me + 1] = static_cast<std::int64_t>(hash_of(told->of_part));
  told->heads[kHead * me + 2] = static_cast<std::int64_t>(text.size());
  const Dense heads(std::span<std::int64_t>(told->heads));
  co_await all_gather(comm, heads);
  bool same = true;
  std::vector<std::int64_t> counts;
  std::int64_t before = 0, total = 0;
  for (std::size_t r = 0; r < size; ++r) {
    same = same && told->heads[kHead * r] == told->heads[0] &&
           told->heads[kHead * r + 1] == told->heads[kHead * told->first_of_part(r) + 1];
    counts.push_back(told->heads[kHead * r + 2]);
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
  told->all.replace(static_cast<std::size_t>(before), text.size(), text);
  const Dense texts(reinterpret_cast<std::byte*>(told->all.data()), total, DType::bytes);
  const std::span<const std::int64_t> lengths(told->counts);
  const Comm behind = comm.hops_from(static_cast<std::uint32_t>(comm.size()));
  co_await all_gather_v(behind, texts, lengths);
}

void Agreement::start(Engine& engine, const Comm& group, const SubmitOptions& submit,
                      const std::vector<AgreedLine>& lines, std::string fix) {
  told_ = std::make_shared<Told>();
  told_->parts = static_cast<std::size_t>(parts_);
  told_->fix = std::move(fix);
  for (const AgreedLine& line : lines)
    (line.of_part ? told_->of_part : told_->mine) += line.what + kBetween + line.value + kBehind;
  ticket_ = engine.submit(group, submit, [told = told_](Comm comm) { return Told::tell(comm, told); });
}

void Agreement::check() {
  const std::shared_ptr<Told> told = std::exchange(told_, nullptr);
  if (told == nullptr || told->counts.empty()) return;
  for (std::size_t r = 0; r < told->counts.size(); ++r) {
    const std::vector<AgreedLine> lines = lines_of(told->of(r), false);
    if (!lines.empty() && lines[0].what.empty())
      throw UsageError("rank " + std::to_string(r) + ": " + lines[0].value);
  }
  for (const bool of_part : {false, true}) {
    for (std::size_t r = 1; r < told->counts.size(); ++r) {
      const std::size_t first = of_part ? told->first_of_part(r) : 0;
      const std::string what =
          difference({first, lines_of(told->of(first), of_part)}, {r, lines_of(told->of(r), of_part)});
      if (!what.empty()) throw UsageError(what + ": " + told->fix);
    }
  }
}

}  // namespace weft::python
