// The codec of what goes back over one link between two stages: a gradient of n tokens by m values travels as two
// thin factors, and what they leave behind joins the link's next message (Optimus-CC; Song et al., ASPLOS 2023).
//
//   Step 1  A = gradient + e, e being what the message before left behind (zeros at first)
//   Step 2  P = orthonormal columns of A Q, n x r; Q: of the message before, orthonormal
//   Step 3  Q = A^T P, m x r; e = A - P Q^T. P and Q travel: (n + m) r values in place of n m
//   The receiver has P Q^T.
//
// So that over any run of messages what arrived is what was sent, but for the e in front and the e behind:
//   sum of P Q^T = sum of gradients + e before - e after
// Where factors would be no shorter than the matrix, it travels as it is, with e added; then nothing is left.
//
// Where the link carries bfloat16, P and Q (or the matrix) are rounded before e is taken: e = A - P' Q'^T is what the
// receiver really lacks, and the sums above hold as they stand.
//
// Rows are tokens, always: a message of fewer tokens meets the first rows of e. Gradients are those of a loss that
// counts `scale` times (set_scale): where the scale changes, e changes with it.
//
// A step that is left out takes nothing of it back into account: e and Q are those of the last commit.
//
// Thread: one at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compressors/low_rank.h"
#include "weft/train/stage_options.h"

namespace weft {

// Columns of the factors of a message of so many tokens; 0: it travels as it is.
int factor_columns(const BackwardOptions& options, std::int64_t tokens, std::int64_t width);
// Values that travel.
std::int64_t coded_count(const BackwardOptions& options, std::int64_t tokens, std::int64_t width);

class StageCodec {
 public:
  // `rounds`: what it codes is carried as bfloat16.
  StageCodec(std::string name, std::int64_t width, const BackwardOptions& options, bool rounds = false)
      : name_(std::move(name)), width_(width), options_(options), rounds_(rounds) {}

  // `coded` has coded_count() values, each of them a bfloat16 where it rounds. What is not finite in the gradient, or
  // too large, makes all of them NaN.
  void encode(std::span<const float> gradient, std::span<float> coded);
  // What encode() made of a gradient of so many tokens: any rank's.
  static void decode(const BackwardOptions& options, std::int64_t width, std::span<const float> coded,
                     std::span<float> gradient);
  double encode_seconds(const KernelCosts& kernels, std::int64_t tokens) const;
  static double decode_seconds(const KernelCosts& kernels, const BackwardOptions& options,
                               std::int64_t tokens, std::int64_t width);

  // Of the messages to come.
  void set_scale(double scale);
  // Messages to come have so many tokens at most: an error of another number is forgotten, not Q, which is of the
  // values of a token. Gives whether it was any. REQUIRES: no step is under way.
  bool fit(std::int64_t tokens);

  void commit() { committed_ = working_; }
  void roll_back() { working_ = committed_; }

  // What is committed: the error, [tokens, width], and Q, column after column.
  struct State {
    std::vector<float> error, factor;
    double scale = 0;            // of the error; 0: it is zero
    std::uint32_t messages = 0;  // so far: a key of what is drawn
  };
  const State& state() const { return committed_; }
  const State& working() const { return working_; }
  void load(State state) { committed_ = working_ = std::move(state); }
  std::int64_t width() const { return width_; }
  const BackwardOptions& options() const { return options_; }
  bool rounds() const { return rounds_; }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::int64_t width_;
  BackwardOptions options_;
  bool rounds_;
  State working_, committed_;
};

}  // namespace weft
