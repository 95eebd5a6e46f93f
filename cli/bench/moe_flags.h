// The flags of `weft bench moe`; --tokens and --zipf it shares with `weft bench embedding`.
#pragma once

#include <string>
#include <vector>

#include "measure/bench/embedding_bench.h"
#include "measure/bench/moe_bench.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace weft::cli {

// As typed.
struct TypedMoe {
  MoeBench bench;
  std::vector<CLI::Option*> flags;  // of this family alone
};

void add_moe_options(CLI::App& verb, TypedMoe& typed);
// `tokens_given`: --tokens was typed. Throws UsageError.
MoeBench checked(const TypedMoe& typed, const EmbeddingBench& shared, bool tokens_given);
// Throws UsageError if one of them was given: they are for moe.
void refuse_moe_options(const TypedMoe& typed);

}  // namespace weft::cli
