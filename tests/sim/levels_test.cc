// Two levels of a network, in virtual time: which ranks share a node, what is measured inside and between
// nodes, and what the collectives that know of it send through a node's port, and how long they take.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "collectives/registry.h"
#include "transports/decorator.h"
#include "transports/endpoint.h"
#include "transports/records.h"
#include "weft/collective.h"
#include "world/calibrate.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

constexpr double kRate = 100e6, kUp = 1000e6, kLatency = 20e-6;

// Payload that a rank sends to other nodes.
class Port final : public Decorator {
 public:
  Port(Transport& inner, const LinkOptions& link) : Decorator(inner), link_(link) {}
  using Decorator::post;
  void post(SendRecord& send) noexcept override {
    if (node_of(link_, send.peer) != node_of(link_, rank())) bytes += send.payload.size();
    inner_.post(send);
  }
  std::uint64_t bytes = 0;

 private:
  const LinkOptions link_;
};

class Network {
 public:
  Network(int ranks, int nodes) {
    SimRanksOptions options;
    LinkOptions& link = options.sim.link;
    link.ranks = ranks;
    link.nodes = nodes;
    link.bytes_per_second = kRate;
    link.latency_seconds = kLatency;
    link.scale_up_bytes_per_second = kUp;
    link.scale_up_latency_seconds = kLatency / 10;
    options.kernels.fold_byte = 0;
    options.decorate = [this, link](Transport& inner) {
      auto port = std::make_unique<Port>(inner, link);
      ports_.push_back(port.get());
      return port;
    };
    ranks_ = std::make_unique<SimRanks>(options);
  }
  SimRanks& ranks() { return *ranks_; }
  Comm world() { return ranks_->engine(0).world(); }

  struct Ran {
    double seconds = 0;
    std::vector<std::uint64_t> port_bytes;  // of each node
  };
  Ran run(const std::function<Task<void>(Comm, int)>& make) {
    for (Port* port : ports_) port->bytes = 0;
    Ran out{.seconds = seconds(ranks_->run({.name = "exchange"}, make)), .port_bytes = {}};
    const int node_size = std::max(1, world().node_size());
    for (std::size_t r = 0; r < ports_.size(); ++r) {
      if (r % static_cast<std::size_t>(node_size) == 0) out.port_bytes.push_back(0);
      out.port_bytes.back() += ports_[r]->bytes;
    }
    return out;
  }

 private:
  std::vector<Port*> ports_;
  std::unique_ptr<SimRanks> ranks_;
};

TEST(Nodes, OfAGroupFollowFromItsMembers) {
  Network network(8, 2);
  const auto node_size = [&](const std::vector<int>& ranks) {
    return network.world().subgroup(ranks).node_size();
  };
  EXPECT_EQ(network.world().node_size(), 4);
  EXPECT_EQ(node_size({0, 1, 2, 3}), 4) << "inside a node";
  EXPECT_EQ(node_size({0, 4}), 1) << "a rank of each";
  EXPECT_EQ(node_size({0, 1, 4, 5}), 2);
  EXPECT_EQ(node_size({0, 2, 5, 7}), 2);
  EXPECT_EQ(node_size({0, 1, 2, 4}), 1) << "not evenly cut";
  EXPECT_EQ(node_size({0, 4, 1, 5}), 1) << "not consecutive";
  EXPECT_EQ(node_size({0}), 1);
  EXPECT_EQ(Network(8, 3).world().node_size(), 1) << "nodes of 2 and 3 ranks";
  EXPECT_EQ(Network(8, 0).world().node_size(), 1);
  EXPECT_EQ(Network(8, 1).world().node_size(), 8);
}

struct Agreed {
  std::vector<Agreement> of_rank;
};

Agreed calibrated(Network& network, const std::vector<std::uint64_t>& hosts,
                  const LinkCost* known = nullptr) {
  Agreed out;
  out.of_rank.resize(hosts.size());
  const Config config;
  network.ranks().run({.name = "calibrate"}, [&](Comm comm, int r) {
    const auto at = static_cast<std::size_t>(r);
    return calibrate(comm, r == 0 ? known : nullptr, hosts[at], config, out.of_rank[at]);
  });
  for (const Agreement& agreed : out.of_rank) {
    EXPECT_EQ(agreed.micro_op_bytes, out.of_rank[0].micro_op_bytes);
    EXPECT_EQ(agreed.cost.seconds_per_byte, out.of_rank[0].cost.seconds_per_byte);
    EXPECT_EQ(agreed.cost.scale_up_seconds_per_byte, out.of_rank[0].cost.scale_up_seconds_per_byte);
    EXPECT_EQ(agreed.cost.node_ranks, out.of_rank[0].cost.node_ranks);
  }
  return out;
}

TEST(Calibration, MeasuresInsideAndBetweenNodesApart) {
  Network network(8, 2);
  const LinkCost cost = calibrated(network, {7, 7, 7, 7, 9, 9, 9, 9}).of_rank[0].cost;
  EXPECT_EQ(cost.node_ranks, 4);
  EXPECT_NEAR(cost.hop_seconds, kLatency, 1e-6);
  EXPECT_NEAR(cost.seconds_per_byte * kRate, 1, 0.02);
  EXPECT_NEAR(cost.scale_up_hop_seconds, kLatency / 10, 1e-6);
  EXPECT_NEAR(cost.scale_up_seconds_per_byte * kUp, 1, 0.02);
  // Control: where hosts are not told apart, what is inside a node stands for everything.
  const LinkCost blind = calibrated(network, {7, 7, 7, 7, 7, 7, 7, 7}).of_rank[0].cost;
  EXPECT_EQ(blind.node_ranks, 1);
  EXPECT_NEAR(blind.seconds_per_byte * kUp, 1, 0.02);
  // Nodes that are no even runs are none; what is known counts, with its nodes.
  EXPECT_EQ(calibrated(network, {7, 7, 7, 9, 9, 9, 9, 9}).of_rank[0].cost.node_ranks, 1);
  LinkCost known;
  known.node_ranks = 2;
  EXPECT_EQ(calibrated(network, {7, 7, 7, 7, 9, 9, 9, 9}, &known).of_rank[0].cost.node_ranks, 2);
}

TEST(Calibration, TellsNodesFromHosts) {
  using Hosts = std::vector<std::uint64_t>;
  EXPECT_EQ(node_ranks_of(Hosts{1, 1, 2, 2}), 2);
  EXPECT_EQ(node_ranks_of(Hosts{1, 1, 2, 2, 1, 1}), 2);
  EXPECT_EQ(node_ranks_of(Hosts{1, 2, 1, 2}), 1);
  EXPECT_EQ(node_ranks_of(Hosts{1, 1, 2, 2, 2, 2}), 1);
  EXPECT_EQ(node_ranks_of(Hosts{1, 1, 2}), 1);
  EXPECT_EQ(node_ranks_of(Hosts{1, 1}), 1) << "one host is one level";
  EXPECT_EQ(node_ranks_of(Hosts{1}), 1);
}

Network::Ran run_all_reduce(Network& network, const char* algorithm, std::int64_t count) {
  const int ranks = network.ranks().size();
  std::vector<std::vector<float>> data(static_cast<std::size_t>(ranks),
                                       std::vector<float>(static_cast<std::size_t>(count), 1));
  const Network::Ran ran = network.run([&](Comm comm, int r) {
    return all_reduce(comm, std::span<float>(data[static_cast<std::size_t>(r)]), {.algorithm = algorithm});
  });
  for (const std::vector<float>& sum : data)
    EXPECT_EQ(sum, std::vector<float>(static_cast<std::size_t>(count), static_cast<float>(ranks)));
  return ran;
}

// 2 n (nodes-1)/nodes of an all-reduce, half of it of its halves; a flat ring sends 2 n (P-1)/P.
TEST(TwoLevels, SendTheLeastThroughAPort) {
  for (const int nodes : {1, 2, 4, 8}) {
    Network network(8, nodes);
    constexpr std::int64_t kCount = 8 * 1000;
    constexpr std::uint64_t kBytes = 4 * kCount;
    const auto parts = static_cast<std::uint64_t>(nodes);
    for (const std::uint64_t bytes : run_all_reduce(network, "two_level", kCount).port_bytes)
      EXPECT_EQ(bytes, 2 * kBytes * (parts - 1) / parts) << nodes;
    std::vector<std::vector<float>> data(8, std::vector<float>(kCount, 1));
    const Network::Ran scattered = network.run([&](Comm comm, int r) {
      return reduce_scatter(comm, std::span<float>(data[static_cast<std::size_t>(r)]),
                            {.algorithm = "two_level"});
    });
    for (const std::uint64_t bytes : scattered.port_bytes)
      EXPECT_EQ(bytes, kBytes * (parts - 1) / parts) << nodes;
    const Network::Ran gathered = network.run([&](Comm comm, int r) {
      return all_gather(comm, std::span<float>(data[static_cast<std::size_t>(r)]),
                        {.algorithm = "two_level"});
    });
    for (const std::uint64_t bytes : gathered.port_bytes)
      EXPECT_EQ(bytes, kBytes * (parts - 1) / parts) << nodes;
    if (nodes == 1 || nodes == 8) continue;
    for (const std::uint64_t bytes : run_all_reduce(network, "ring", kCount).port_bytes)
      EXPECT_EQ(bytes, 2 * kBytes * 7 / 8) << "control: a flat ring";
  }
}

TEST(TwoLevels, TakeAsLongAsPredictedAndAreChosen) {
  Network network(8, 2);
  constexpr std::int64_t kCount = 1 << 20;
  const Shape shape{.size = 8, .count = kCount, .node_size = 4};
  const auto predicted = [&](const char* name) {
    return find_algorithm(Family::all_reduce, name).seconds(shape, network.world().cost());
  };
  const double two_level = run_all_reduce(network, "two_level", kCount).seconds;
  const double ring = run_all_reduce(network, "ring", kCount).seconds;
  EXPECT_NEAR(two_level / predicted("two_level"), 1, 0.1);
  EXPECT_NEAR(ring / predicted("ring"), 1, 0.1);
  EXPECT_LT(two_level * 1.4, ring);
  EXPECT_EQ(run_all_reduce(network, "auto", kCount).seconds, two_level);
  // Control: without nodes it is the ring, or what is as fast.
  Network flat(8, 0);
  EXPECT_EQ(choose(Family::all_reduce, {.size = 8, .count = kCount}, flat.world().cost()).name, "ring");
}

// Every rank sends what its row says of any counts.
TEST(AllToAll, OfAnyCountsSendsWhatItsFormulaSays) {
  for (const int nodes : {2, 4}) {
    Network network(8, nodes);
    const auto count = [](int from, int to) -> std::int64_t { return (from * 5 + to * 3) % 7 * 11; };
    for (const Algorithm& row : algorithms(Family::all_to_all)) {
      if (row.uneven_bytes == nullptr) continue;
      std::vector<std::uint64_t> sent(8);
      network.run([&](Comm comm, int r) -> Task<void> {
        std::vector<std::int64_t> out, in;
        std::int64_t outgoing = 0, incoming = 0;
        for (int peer = 0; peer < 8; ++peer) {
          outgoing += out.emplace_back(count(r, peer));
          incoming += in.emplace_back(count(peer, r));
        }
        std::vector<float> from(static_cast<std::size_t>(outgoing)), into(static_cast<std::size_t>(incoming));
        const Parts send{std::span<float>(from), out}, recv{std::span<float>(into), in};
        const AllToAllOptions options{.algorithm = row.name};
        co_await all_to_all_v(comm, send, recv, options);
        sent[static_cast<std::size_t>(r)] = comm.bytes_sent();
      });
      const AllToAllOptions options{.algorithm = row.name};
      const Shape shape = uneven_shape(network.world(), DType::float32, options);
      for (int r = 0; r < 8; ++r)
        EXPECT_EQ(sent[static_cast<std::size_t>(r)], row.uneven_bytes(shape, r, count))
            << row.name << " " << r;
    }
  }
}

}  // namespace
}  // namespace weft
