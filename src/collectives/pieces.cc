#include "collectives/pieces.h"

namespace weft {

namespace {
// About 100 us at 10 GB/s: what is shorter is not worth a trip to the pool.
constexpr std::size_t kInline = std::size_t{1} << 20;
}  // namespace

Task<void> run_local(Comm comm, std::size_t bytes, FunctionRef<void()> work) {
  auto move = [&] {
    work();
    return comm.kernels().copy_byte * static_cast<double>(bytes);
  };
  if (bytes > kInline)
    co_await comm.compute(move);
  else
    co_await comm.charge(move());
}

Task<void> copy_bytes(Comm comm, std::span<const std::byte> from, std::span<std::byte> into) {
  auto copy = [from, into] { std::copy(from.begin(), from.end(), into.begin()); };
  co_await run_local(comm, from.size(), copy);
}

Task<void> exchange_bags(Comm comm, BagExchange exchange, Bag outgoing, Bag incoming) {
  TransferQueue receives(comm);
  TransferQueue sends(comm);
  for (const Dense& run : incoming) {
    const Pieces pieces(run, exchange.micro_op_bytes);
    for (std::int64_t i = 0; i < pieces.size(); ++i) {
      if (exchange.fold)
        receives.add(comm.recv_fold(exchange.from, exchange.hop, pieces[i], exchange.reduction));
      else
        receives.add(comm.recv(exchange.from, exchange.hop, pieces[i]));
    }
  }
  for (const Dense& run : outgoing) {
    const Pieces pieces(run, exchange.micro_op_bytes);
    for (std::int64_t i = 0; i < pieces.size(); ++i)
      sends.add(comm.send(exchange.to, exchange.hop, pieces[i]));
  }
  while (!receives.empty()) co_await receives.next();
  while (!sends.empty()) co_await sends.next();
}

}  // namespace weft
