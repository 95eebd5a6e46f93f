// The flags of `weft bench embedding`.
#pragma once

#include <string>
#include <vector>

#include "measure/bench/embedding_bench.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace weft::cli {

// As typed.
struct TypedEmbedding {
  EmbeddingBench bench;
  std::vector<std::string> ways;
  std::vector<CLI::Option*> flags;  // of this family alone
};

void add_embedding_options(CLI::App& verb, TypedEmbedding& typed);
// Throws UsageError.
EmbeddingBench checked(const TypedEmbedding& typed);
// Throws UsageError if one of them was given that is not among the others' flags: they are for embedding.
void refuse_embedding_options(const TypedEmbedding& typed, const std::vector<std::string>& shared = {});
bool was_given(const TypedEmbedding& typed, const std::string& flag);

}  // namespace weft::cli
