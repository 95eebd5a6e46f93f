// Gates without a model: which experts tokens choose, layer by layer, as a Markov chain of a given order over
// the layers. What the placement of experts is measured with.
//
//   Popularity   in every layer a Zipf law whose hottest expert gets `ratio` times the rows of the coldest; the
//                ratio is drawn between two bounds, and which expert is how hot is drawn too
//   Topics       experts of a layer belong to topics, hot and cold ones to each. A token whose last experts were
//                of a topic goes on to experts of that topic exp(persistence) times as likely for each of them
//   Table        of each layer: for every path of the last `order` experts the shares of the next one. Beside
//                popularity and topic, each share has a factor of its own (exp of a normal number times
//                `scatter`); then the table is scaled so that tokens which start as all do have exactly the
//                layer's popularity
//   Drift        which topics tokens start with: as popular as they are, always; or coming and going, each once
//                in `period` batches. The table stays as it is
//
// A table is a function of its options; what tokens choose is a function of the table, the seed of the draw, the
// batch and the rank. Thread: any, once it is made.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft {

struct DrawnRouterOptions {
  int layers = 12;
  int experts = 8;
  int order = 3;
  int topics = 4;  // 1: none
  double least_ratio = 4, most_ratio = 6;
  double persistence = 1.5;
  double scatter = 0.5;
  std::uint64_t seed = 1;  // of the table
  bool drifts = false;
  int period = 64;      // batches
  double swing = 1.25;  // a topic is exp(swing) times as frequent at its best, and exp(-swing) at its worst
};
// Throws UsageError of one sentence.
void check(const DrawnRouterOptions& options);

class DrawnRouter {
 public:
  explicit DrawnRouter(const DrawnRouterOptions& options);

  const DrawnRouterOptions& options() const { return options_; }

  // Experts of each token and layer: [token * layers + layer].
  std::vector<std::int32_t> draw(std::uint64_t seed, std::int64_t batch, int rank, std::int64_t tokens) const;

  // Shares of the experts of a layer behind the experts of all layers before it; and of all tokens, where
  // nothing drifts.
  std::span<const double> shares(int layer, std::span<const std::int32_t> path) const;
  std::span<const double> popularity(int layer) const { return popularity_[static_cast<std::size_t>(layer)]; }

 private:
  void make_popularity();
  void make_table(int layer, const std::vector<double>& paths);
  std::vector<double> first_shares(std::int64_t batch) const;
  std::size_t experts() const { return static_cast<std::size_t>(options_.experts); }
  std::size_t paths_of(int layer) const;  // as many as the table of a layer has

  DrawnRouterOptions options_;
  std::vector<std::vector<double>> popularity_;  // of each layer: shares
  std::vector<std::vector<int>> topics_;         // of each layer's each expert
  std::vector<std::vector<double>> tables_;      // of each layer: [path * experts + expert]
};

}  // namespace weft
