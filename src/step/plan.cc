#include "step/plan.h"

#include <bit>
#include <string_view>

#include "weft/collective.h"
#include "weft/error.h"
#include "weft/identity.h"

namespace weft {

namespace {

void add(std::uint64_t& hash, std::uint64_t value) { hash = mix(hash ^ value); }
void add(std::uint64_t& hash, std::string_view text) {
  add(hash, text.size());
  for (const char c : text) add(hash, static_cast<unsigned char>(c));
}

Task<void> compare(Comm comm, std::shared_ptr<std::vector<std::int64_t>> hashes, std::string what) {
  const Dense all(std::span<std::int64_t>{*hashes});
  co_await all_gather(comm, all);
  const std::int64_t mine = (*hashes)[static_cast<std::size_t>(comm.rank())];
  for (int r = 0; r < comm.size(); ++r) {
    if ((*hashes)[static_cast<std::size_t>(r)] == mine) continue;
    throw TransportError(TransportError::Kind::mismatch, comm.world_rank(r),
                         "rank " + std::to_string(comm.world_rank(r)) + " has another " + what +
                             " than rank " + std::to_string(comm.world_rank(comm.rank())));
  }
}

}  // namespace

std::uint64_t hash_of(std::span<const PlanRow> rows, std::span<const std::uint64_t> options) {
  std::uint64_t hash = mix(rows.size());
  for (const PlanRow& row : rows) {
    for (const std::string_view text : {std::string_view(row.tensor), std::string_view(row.strategy),
                                        std::string_view(row.scheme), std::string_view(row.codec)}) {
      add(hash, text);
    }
    for (const std::uint64_t value :
         {static_cast<std::uint64_t>(row.count), row.group, static_cast<std::uint64_t>(row.ranks),
          hash_part(row.divisor), static_cast<std::uint64_t>(row.traffic), std::uint64_t{row.slot}}) {
      add(hash, value);
    }
  }
  for (const std::uint64_t part : options) add(hash, part);
  return hash;
}

Ticket compare_plans(Engine& engine, const Comm& group, const SubmitOptions& submit, std::uint64_t hash,
                     std::string what) {
  auto hashes = std::make_shared<std::vector<std::int64_t>>(static_cast<std::size_t>(group.size()));
  (*hashes)[static_cast<std::size_t>(group.rank())] = static_cast<std::int64_t>(hash);
  return engine.submit(group, submit,
                       [hashes, text = std::move(what)](Comm comm) { return compare(comm, hashes, text); });
}

}  // namespace weft
