// The codec of what goes back over one link between two stages: a gradient of n tokens by m values travels as two
// thin factors, or as whole numbers of few bits, and what that leaves behind joins the link's next message
// (Optimus-CC; Song et al., ASPLOS 2023; whole numbers are ours: docs/decisions/0029).
//
//   Step 1  A = gradient + e, e being what the message before left behind (zeros at first)
//   factors, of r columns:
//   Step 2  P = orthonormal columns of A Q, n x r; Q: of the message before, orthonormal
//   Step 3  Q = A^T P, m x r; e = A - P Q^T. P and Q travel: (n + m) r values in place of n m
//   The receiver has P Q^T.
//   whole numbers, of b bits:
//   Step 2  each token's values are multiples of its largest / (2^(b-1) - 1), to nearest (kernels/whole.h)
//   Step 3  e = A - what they stand for. n float32 and n m whole numbers travel: n (4 + ceil(m b / 8)) bytes, to a
//           multiple of 4
//
// So that over any run of messages what arrived is what was sent, but for the e in front and the e behind:
//   sum of what arrived = sum of gradients + e before - e after
// Where that would be no shorter than the matrix, it travels as it is, with e added; then nothing is left but what
// rounding takes.
//
// Where the link carries bfloat16, P and Q (or the matrix) are rounded before e is taken: e = A - P' Q'^T is what the
// receiver really lacks, and the sums above hold as they stand. Whole numbers are what they are.
//
// Rows are tokens, always: a message of fewer tokens meets the first rows of e. Before a step that has one of more than
// any before what was left behind is forgotten, whether the run has just begun again or not (fit). Gradients are those
// of a loss that counts `scale` times (set_scale): where the scale changes, e changes with it.
//
// A step that is left out takes nothing of it back into account: e and Q are those of the last commit.
//
// Thread: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compressors/low_rank.h"
#include "weft/train/stage_options.h"

namespace weft {

// What both ends of a link know of its messages.
struct MessageForm {
  std::int64_t width = 0;  // values of a token
  BackwardOptions options;
  bool rounds = false;  // factors, and what travels as it is, are carried as bfloat16, not as float32

  // Columns of the factors of a message of so many tokens; 0: it does not travel as factors.
  int columns(std::int64_t tokens) const;
  bool is_whole(std::int64_t tokens) const;
  // Whether it travels as either, which it does where that is shorter.
  bool shortens(std::int64_t tokens) const { return is_whole(tokens) || columns(tokens) > 0; }
  // That travel, however they do: a multiple of the carried type's, of whole numbers of 4.
  std::int64_t bytes(std::int64_t tokens) const;
};

class StageCodec {
 public:
  StageCodec(std::string name, MessageForm form) : name_(std::move(name)), form_(std::move(form)) {}

  // `coded` has form().bytes(), aligned for float32. What is not finite in the gradient is not where it arrives: of
  // factors nothing is, of whole numbers the token's values are not.
  void encode(std::span<const float> gradient, std::span<std::byte> coded);
  // What encode() made of a gradient of so many tokens: any rank's. REQUIRES: aligned as what is carried.
  static void decode(const MessageForm& form, std::span<const std::byte> coded, std::span<float> gradient);
  double encode_seconds(const KernelCosts& kernels, std::int64_t tokens) const;
  static double decode_seconds(const KernelCosts& kernels, const MessageForm& form, std::int64_t tokens);

  // Of the messages to come.
  void set_scale(double scale);
  // Messages of the step to come have so many tokens at most, those of the run `most` (0: nobody knows). An error of
  // fewer than the one, or of more than the other, is forgotten; not Q, which is of the values of a token. Gives
  // whether it was any. REQUIRES: no step is under way.
  bool fit(std::int64_t tokens, std::int64_t most);

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
  const MessageForm& form() const { return form_; }
  const std::string& name() const { return name_; }

 private:
  // `left`, what is left behind (empty: it is lost), is not changed where something is not finite.
  void encode_plain(std::span<const float> gradient, std::span<float> left, std::span<std::byte> coded) const;
  void encode_factors(std::span<const float> gradient, std::span<float> left, std::span<std::byte> coded);
  void encode_whole(std::span<const float> gradient, std::span<float> left, std::span<std::byte> coded) const;

  std::string name_;
  MessageForm form_;
  State working_, committed_;
};

}  // namespace weft
