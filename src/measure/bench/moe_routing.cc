// Who goes where in `weft bench moe`, and what it means in bytes.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>

#include "measure/bench/moe.h"
#include "patterns/blocks.h"
#include "weft/error.h"
#include "weft/random.h"

namespace weft {

namespace {

constexpr std::uint64_t kSeed = 1;
constexpr std::uint32_t kPurpose = 0x6d6f65;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;  // of a file
constexpr std::size_t kLongestLine = 4096;

[[noreturn]] void refuse(const std::string& file, std::int64_t line, const std::string& what) {
  throw UsageError("--routing " + file + ", line " + std::to_string(line) + ": " + what);
}

// The numbers of a line, as many as a token has choices, all different.
std::vector<std::int64_t> parse_line(const MoeBench& bench, const std::string& text, std::int64_t line) {
  if (text.size() > kLongestLine) refuse(bench.routing, line, "is too long for the experts of one token");
  std::vector<std::int64_t> out;
  const char *at = text.data(), *const end = at + text.size();
  const auto is_space = [](char c) { return c == ' ' || c == '\t' || c == ',' || c == '\r'; };
  while (true) {
    while (at != end && is_space(*at)) ++at;
    if (at == end) break;
    std::int64_t expert = 0;
    const auto [next, error] = std::from_chars(at, end, expert);
    if (error != std::errc() || (next != end && !is_space(*next)))
      refuse(bench.routing, line, "has something that is no number of an expert");
    if (expert < 0 || expert >= bench.experts)
      refuse(bench.routing, line,
             "expert " + std::to_string(expert) + " is none of 0 to " + std::to_string(bench.experts - 1));
    if (std::ranges::find(out, expert) != out.end())
      refuse(bench.routing, line, "expert " + std::to_string(expert) + " is there twice");
    out.push_back(expert);
    at = next;
  }
  if (out.size() != static_cast<std::size_t>(bench.choices))
    refuse(bench.routing, line,
           std::to_string(out.size()) + " experts, and a token has " + std::to_string(bench.choices) +
               " choices");
  return out;
}

}  // namespace

MoeRouting::MoeRouting(const MoeBench& bench, int ranks)
    : bench_(bench), choices_(static_cast<std::size_t>(ranks)) {
  if (bench.routing == "uniform" || bench.routing == "zipf")
    draw();
  else
    read_file();
}

void MoeRouting::draw() {
  std::vector<double> cumulative;
  cumulative.reserve(static_cast<std::size_t>(bench_.experts));
  double sum = 0;
  for (int e = 0; e < bench_.experts; ++e)
    cumulative.push_back(sum += bench_.routing == "zipf" ? std::pow(e + 1, -bench_.zipf) : 1);
  for (std::size_t r = 0; r < choices_.size(); ++r) {
    Random random(kSeed, kPurpose, static_cast<std::uint32_t>(r));
    std::vector<std::int64_t>& mine = choices_[r];
    for (std::int64_t t = 0; t < bench_.tokens; ++t) {
      const auto first = static_cast<std::ptrdiff_t>(mine.size());
      while (static_cast<std::ptrdiff_t>(mine.size()) < first + bench_.choices) {
        const auto found = std::ranges::upper_bound(cumulative, random.uniform() * sum);
        const std::int64_t expert =
            std::min<std::int64_t>(found - cumulative.begin(), bench_.experts - std::int64_t{1});
        if (std::find(mine.begin() + first, mine.end(), expert) == mine.end()) mine.push_back(expert);
      }
    }
  }
}

void MoeRouting::read_file() {
  std::ifstream file(bench_.routing);
  if (!file)
    throw UsageError("--routing '" + bench_.routing +
                     "' is none of uniform and zipf, and no file that can be read");
  std::vector<std::int64_t> all;
  std::string text;
  std::int64_t tokens = 0;
  while (std::getline(file, text)) {
    if (++tokens > kMostTokens) refuse(bench_.routing, tokens, "there are more tokens than a bench takes");
    const std::vector<std::int64_t> of_token = parse_line(bench_, text, tokens);
    all.insert(all.end(), of_token.begin(), of_token.end());
  }
  const auto ranks = static_cast<std::int64_t>(choices_.size());
  if (tokens == 0) throw UsageError("--routing " + bench_.routing + " has no token");
  if (bench_.tokens > 0 && bench_.tokens * ranks > tokens)
    throw UsageError("--routing " + bench_.routing + " has " + std::to_string(tokens) + " tokens, and " +
                     std::to_string(ranks) + " ranks of --tokens " + std::to_string(bench_.tokens) +
                     " need " + std::to_string(bench_.tokens * ranks));
  const Blocks blocks(static_cast<int>(ranks), bench_.tokens > 0 ? bench_.tokens * ranks : tokens);
  for (int r = 0; r < static_cast<int>(ranks); ++r)
    choices_[static_cast<std::size_t>(r)].assign(all.begin() + blocks.begin(r) * bench_.choices,
                                                 all.begin() + blocks.begin(r + 1) * bench_.choices);
}

std::vector<std::int64_t> MoeRouting::load() const {
  std::vector<std::int64_t> out(static_cast<std::size_t>(bench_.experts));
  for (const std::vector<std::int64_t>& mine : choices_) {
    for (const std::int64_t expert : mine) ++out[static_cast<std::size_t>(expert)];
  }
  return out;
}

std::int64_t MoeRouting::num_dropped() const {
  if (bench_.capacity_factor == 0) return 0;
  std::int64_t out = 0;
  for (std::size_t r = 0; r < choices_.size(); ++r) {
    const std::int64_t places = capacity_of(
        {.experts = bench_.experts, .choices = bench_.choices, .capacity_factor = bench_.capacity_factor},
        tokens(static_cast<int>(r)));
    std::vector<std::int64_t> of_expert(static_cast<std::size_t>(bench_.experts));
    for (const std::int64_t expert : choices_[r]) ++of_expert[static_cast<std::size_t>(expert)];
    for (const std::int64_t copies : of_expert) out += std::max<std::int64_t>(0, copies - places);
  }
  return out;
}

std::vector<std::vector<std::int64_t>> moe_rows(const MoeBench& bench, const MoeRouting& routing, int ranks,
                                                int slices) {
  const auto size = static_cast<std::size_t>(ranks);
  const RouteOptions options{
      .experts = bench.experts, .choices = bench.choices, .capacity_factor = bench.capacity_factor};
  std::vector<std::vector<std::int64_t>> out(static_cast<std::size_t>(slices),
                                             std::vector<std::int64_t>(size * size));
  const std::size_t local = static_cast<std::size_t>(bench.experts) / size;
  for (std::size_t from = 0; from < size; ++from) {
    const int rank = static_cast<int>(from);
    std::vector<std::int64_t> places(static_cast<std::size_t>(bench.experts));
    if (bench.capacity_factor > 0)
      std::ranges::fill(places, capacity_of(options, routing.tokens(rank)));
    else
      for (const std::int64_t expert : routing.of(rank)) ++places[static_cast<std::size_t>(expert)];
    for (std::size_t e = 0; e < places.size(); ++e) {
      const Blocks blocks(slices, places[e]);
      for (int s = 0; s < slices; ++s)
        out[static_cast<std::size_t>(s)][from * size + e / local] += blocks.count(s);
    }
  }
  return out;
}

std::vector<std::uint64_t> moe_formula(const MoeBench& bench, const MoeRouting& routing, int ranks,
                                       const MoeCase& c) {
  const auto size = static_cast<std::size_t>(ranks), node = static_cast<std::size_t>(c.node_size);
  const bool two_levels = c.algorithm == "hierarchical" && c.node_size > 1;
  const std::size_t nodes = size / node;
  std::vector<std::uint64_t> out(size);
  for (const std::vector<std::int64_t>& rows : moe_rows(bench, routing, ranks, c.slices)) {
    const auto part = [&](std::size_t from, std::size_t to, bool home) {
      const std::int64_t count = home ? rows[to * size + from] : rows[from * size + to];
      return static_cast<std::uint64_t>(count * bench.width) * sizeof(float);
    };
    for (const bool home : {false, true}) {
      for (std::size_t me = 0; me < size; ++me) {
        const std::size_t at = me / node, column = me % node;
        for (std::size_t to = 0; !two_levels && to < size; ++to)
          if (to != me) out[me] += part(me, to, home);
        if (!two_levels) continue;
        out[me] += (node - 1) * nodes * sizeof(std::int64_t);  // how much there is for each node
        for (std::size_t to = 0; to < size; ++to)
          if (to % node != column) out[me] += part(me, to, home);
        for (std::size_t other = 0; other < nodes; ++other) {
          for (std::size_t mate = 0; other != at && mate < node; ++mate)
            out[me] += part(at * node + mate, other * node + column, home);
        }
      }
    }
  }
  return out;
}

}  // namespace weft
