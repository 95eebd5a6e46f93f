// How popular the experts of a layer will be, before its gate has spoken: from the experts that each token has
// met in the layers before. Tokens that came the same way tend to go on the same way.
//
//   Path       a token's experts (first choices) in the last l layers, fewer in the first layers
//   Profile    for every layer and path of 0 .. l layers, how often each expert came next, as it was recorded
//   Estimate   of a token: the shares behind the longest end of its path that was ever recorded; of no end at
//              all: as all tokens went (the empty path). Of many tokens: their sum, which is how many rows each
//              expert is expected to get
//
// A profile is fitted on some tokens and used on others. Its file (safetensors) is checked as untrusted.
//
// Memory: of each layer and length at most `most_paths` rows of E numbers. Where one more comes, the half that came
// least often is forgotten (of equal ones those that came first), as if it had never been recorded:
// tokens that take such a path are estimated by a shorter one, which is forgotten less easily, and by that of length 0,
// which never is. A path that is among the more frequent half each time stays with all that was recorded of it.
// Thread: one at a time; estimate() from any, while nobody records.
//
// Li et al., USENIX ATC 2023 (the estimate; backing off to shorter paths is ours).
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <unordered_map>
#include <vector>

namespace weft {

struct PopularityOptions {
  // affects results
  int layers = 1;                  // of experts
  int experts = 1;                 // of a layer
  int path = 3;                    // layers that are looked back to; 0: none
  int choices = 1;                 // of a token, the best first; paths go by the best
  int top = 0;                     // of a token's estimate only so many experts count; 0: all
  std::int64_t most_paths = 4096;  // of one length, of a layer
};
// Throws UsageError of one sentence.
void check(const PopularityOptions& options);

class Popularity {
 public:
  explicit Popularity(const PopularityOptions& options);

  const PopularityOptions& options() const { return options_; }

  // What one token chose: [layers * choices]. Throws UsageError for an expert that is not there.
  void record(std::span<const std::int32_t> chosen);

  // Adds what a token's choices of `layer` are expected to be to `rows`, one number for each expert. `path`: its
  // first choices in layers 0 .. layer - 1. All that is added is `choices`, less where `top` cuts it, and
  // nothing where nothing was recorded.
  void estimate(int layer, std::span<const std::int32_t> path, std::span<double> rows) const;
  // Layers of the path that the estimate goes by; -1: nothing was recorded.
  int depth(int layer, std::span<const std::int32_t> path) const;
  // Paths of this length that are known in a layer.
  std::int64_t num_paths(int layer, int length) const;

  void save(const std::filesystem::path& file) const;
  // Throws UsageError: no such file, or not a profile of this form. `top` and `most_paths` are not in a file:
  // they are the defaults, and of more paths the most frequent are taken.
  static Popularity load(const std::filesystem::path& file);

 private:
  struct Seen {  // paths of one length, of one layer
    std::unordered_map<std::uint64_t, std::size_t> row_of_path;
    std::vector<std::int64_t> counts;  // [row * experts + expert]
  };
  std::uint64_t key(std::span<const std::int32_t> path) const;
  void forget(Seen& seen, std::size_t kept) const;
  const std::int64_t* find(int layer, std::span<const std::int32_t> path, int* depth) const;
  std::size_t experts() const { return static_cast<std::size_t>(options_.experts); }

  PopularityOptions options_;
  std::vector<std::vector<Seen>> layers_;  // of each length from 0 on
};

}  // namespace weft
