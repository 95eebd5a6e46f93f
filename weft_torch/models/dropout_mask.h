// Dropout masks as functions of what is dropped, not of who drops it: a rank that has sequences 5 to 7 of a
// batch writes the same rows of the mask as a rank that has them all. No torch here.
#pragma once

#include <cstdint>
#include <span>

namespace weft {

struct DropoutKey {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::uint32_t site = 0;  // which dropout of the model; below 2^16
};

struct DropoutRows {
  std::int64_t first_token = 0;  // global: sequence * length + position; below 2^40
  std::int64_t features = 0;     // of a token; below 2^18
};

// out[token][feature] is 0 with the probability, else 1 / (1 - probability); the probability is rounded to
// 1/65536. About 3 ns an element. REQUIRES: out.size() is a multiple of features; 0 <= probability < 1.
void write_dropout_mask(const DropoutKey& key, double probability, const DropoutRows& rows,
                        std::span<float> out);

// out[token][feature] is one of 65536 values from 1 - amount to 1 + amount, all as likely; of other random
// numbers than a mask's of the same key.
void write_jitter(const DropoutKey& key, double amount, const DropoutRows& rows, std::span<float> out);

}  // namespace weft
