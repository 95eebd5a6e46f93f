// Requests of `weft serve` as lines of JSON, and answers.
//
//   {"prompt": "text", "max_tokens": 32, "temperature": 0.8, "top_k": 40, "seed": 1, "id": ...}
//   {"tokens": [5, 17, 3]}                          the prompt as numbers, where there are no words
//   {"id": ..., "text": "...", "tokens": [..], "prompt_tokens": 3, "seconds": 0.12}
//   {"id": ..., "error": "one sentence"}
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "data/vocabulary.h"
#include "weft_torch/serve/server.h"

namespace weft::cli {

struct ServeRequest {
  nlohmann::json id;  // as it came; null: none
  GenerateRequest ask;
};
// Throws UsageError of one sentence: no JSON, an unknown key, a value that cannot be. `id` is set before it
// throws, if there is one. Whether the model can answer it, ServedModel::check() says.
void parse_request(const std::string& line, const Vocabulary* words, std::int64_t max_tokens,
                   ServeRequest& into);

std::string text_of(std::span<const std::int64_t> tokens, const Vocabulary& words);
std::string answer_line(const ServeRequest& request, std::span<const std::int64_t> tokens, double seconds,
                        const Vocabulary* words);
std::string error_line(const nlohmann::json& id, const std::string& sentence);

// A batch as rank 0 tells it to the others, and back.
std::string batch_text(std::span<const GenerateRequest> batch);
std::vector<GenerateRequest> parse_batch(const std::string& text);

}  // namespace weft::cli
