#include "step/plan.h"

#include <bit>
#include <string_view>

#include "base/identity.h"
#include "weft/collective.h"
#include "weft/error.h"

namespace weft {

namespace {

void add(std::uint64_t& hash, std::uint64_t value) { hash = mix(hash ^ value); }
void add(std::uint64_t& hash, std::string_view text) {
  add(hash, text.size());
  for (const char c : text) add(hash, static_cast<unsigned char>(c));
}

struct Compared {
  std::vector<std::int64_t> values;  // of each rank: its hash and its wish
  std::string what;
  Wishes wishes;
};

Task<void> compare(Comm comm, std::shared_ptr<Compared> compared) {
  std::vector<std::int64_t>& values = compared->values;
  const Dense all(std::span<std::int64_t>{values});
  co_await all_gather(comm, all);
  const std::int64_t mine = values[2 * static_cast<std::size_t>(comm.rank())];
  for (int r = 0; r < comm.size(); ++r) {
    const auto i = 2 * static_cast<std::size_t>(r);
    if (compared->wishes != nullptr) compared->wishes->push_back(values[i + 1]);
    if (values[i] == mine) continue;
    throw TransportError(TransportError::Kind::mismatch, comm.world_rank(r),
                         "rank " + std::to_string(comm.world_rank(r)) + " has another " + compared->what +
                             " than rank " + std::to_string(comm.world_rank(comm.rank())));
  }
}

}  // namespace

std::uint64_t hash_of(std::span<const PlanRow> rows, std::span<const Exchange> exchanges,
                      std::span<const std::uint64_t> options) {
  std::uint64_t hash = mix(rows.size());
  for (const PlanRow& row : rows) {
    for (const std::string_view text : {row.tensor, row.strategy, row.scheme, row.codec, row.why})
      add(hash, text);
    for (const std::uint64_t value :
         {static_cast<std::uint64_t>(row.count), row.group, static_cast<std::uint64_t>(row.ranks),
          hash_part(row.divisor), static_cast<std::uint64_t>(row.traffic), std::uint64_t{row.slot},
          hash_part(row.bytes), hash_part(row.seconds)}) {
      add(hash, value);
    }
  }
  add(hash, exchanges.size());
  for (const Exchange& e : exchanges) {
    add(hash, e.name);
    add(hash, e.codec);
    // Then each end has a kind and a peer of its own.
    const bool one_way = e.kind != Exchange::Kind::collective;
    for (const std::uint64_t value :
         {std::uint64_t{one_way}, static_cast<std::uint64_t>(e.traffic), e.group, std::uint64_t{e.slot},
          std::uint64_t{e.at_installation}, std::uint64_t{e.each_micro_batch}}) {
      add(hash, value);
    }
    for (const std::vector<TensorName>* tensors : {&e.reads, &e.writes}) {
      add(hash, tensors->size());
      for (const TensorName& tensor : *tensors) {
        add(hash, static_cast<std::uint64_t>(tensor.of));
        add(hash, tensor.name);
        add(hash, static_cast<std::uint64_t>(tensor.micro_batch));
      }
    }
  }
  for (const std::uint64_t part : options) add(hash, part);
  return hash;
}

Ticket compare_plans(Engine& engine, const Comm& group, const SubmitOptions& submit, std::uint64_t hash,
                     std::string what, std::int64_t wish, const Wishes& wishes) {
  auto compared = std::make_shared<Compared>();
  compared->values.resize(2 * static_cast<std::size_t>(group.size()));
  compared->values[2 * static_cast<std::size_t>(group.rank())] = static_cast<std::int64_t>(hash);
  compared->values[2 * static_cast<std::size_t>(group.rank()) + 1] = wish;
  compared->what = std::move(what);
  compared->wishes = wishes;
  return engine.submit(group, submit, [compared](Comm comm) { return compare(comm, compared); });
}

}  // namespace weft
