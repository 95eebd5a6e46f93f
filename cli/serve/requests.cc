#include "serve/requests.h"

#include <algorithm>
#include <array>

#include "base/names.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

using Json = nlohmann::json;

constexpr std::array<std::string_view, 7> kKeys{"id",          "prompt", "tokens", "max_tokens",
                                                "temperature", "top_k",  "seed"};

constexpr int kDeepest = 32;

std::int64_t whole(const Json& value, const std::string& key, std::int64_t least, std::int64_t most) {
  // (An unsigned number beyond the signed ones would be read as a negative one.)
  const bool sound =
      value.is_number_integer() &&
      (!value.is_number_unsigned() || value.get<std::uint64_t>() <= static_cast<std::uint64_t>(most)) &&
      value.get<std::int64_t>() >= least && value.get<std::int64_t>() <= most;
  if (!sound)
    throw UsageError(key + " must be a whole number from " + std::to_string(least) + " to " +
                     std::to_string(most));
  return value.get<std::int64_t>();
}

std::vector<std::int64_t> prompt_of(const Json& object, const Vocabulary* words) {
  const bool text = object.contains("prompt"), numbers = object.contains("tokens");
  if (text == numbers) throw UsageError("a request has either a prompt or tokens");
  std::vector<std::int64_t> out;
  if (numbers) {
    if (!object["tokens"].is_array()) throw UsageError("tokens must be an array of numbers");
    for (const Json& token : object["tokens"])
      out.push_back(whole(token, "a token", 0, (std::int64_t{1} << 31) - 1));
    return out;
  }
  if (words == nullptr) throw UsageError("this model's data has no words: send tokens instead of a prompt");
  if (!object["prompt"].is_string()) throw UsageError("prompt must be a text");
  const std::vector<std::int32_t> tokens = words->encode(object["prompt"].get<std::string>());
  out.assign(tokens.begin(), tokens.end());
  return out;
}

}  // namespace

void parse_request(const std::string& line, const Vocabulary* words, std::int64_t max_tokens,
                   ServeRequest& into) {
  // (A copy of something nested without a limit would end the process.)
  bool too_deep = false;
  const auto watch = [&too_deep](int depth, Json::parse_event_t, Json&) {
    too_deep = too_deep || depth > kDeepest;
    return depth <= kDeepest;
  };
  const Json object = Json::parse(line, watch, /*allow_exceptions=*/false);
  if (too_deep) throw UsageError("this line is nested more than " + std::to_string(kDeepest) + " deep");
  if (object.is_discarded()) throw UsageError("this line is not JSON");
  if (!object.is_object()) throw UsageError("a request is a JSON object");
  if (object.contains("id")) into.id = object["id"];
  for (const auto& [key, value] : object.items()) {
    if (std::ranges::find(kKeys, key) == kKeys.end()) throw UsageError(unknown_name("key", key, kKeys));
  }
  GenerateRequest& ask = into.ask;
  ask.tokens = prompt_of(object, words);
  ask.max_tokens = max_tokens;
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  if (object.contains("max_tokens")) ask.max_tokens = whole(object["max_tokens"], "max_tokens", 1, kMost);
  if (object.contains("top_k")) ask.top_k = static_cast<int>(whole(object["top_k"], "top_k", 0, kMost));
  if (object.contains("seed"))
    ask.seed = static_cast<std::uint64_t>(whole(object["seed"], "seed", 0, INT64_MAX));
  if (object.contains("temperature")) {
    if (!object["temperature"].is_number()) throw UsageError("temperature must be a number");
    ask.temperature = object["temperature"].get<double>();
  }
}

// Words stand apart, bytes do not.
std::string text_of(std::span<const std::int64_t> tokens, const Vocabulary& words) {
  std::string out;
  for (const std::int64_t token : tokens) {
    if (!out.empty() && !words.bytes()) out += ' ';
    out += words.words()[static_cast<std::size_t>(token)];
  }
  return out;
}

std::string answer_line(const ServeRequest& request, std::span<const std::int64_t> tokens, double seconds,
                        const Vocabulary* words) {
  nlohmann::ordered_json out;
  if (!request.id.is_null()) out["id"] = request.id;
  if (words != nullptr) out["text"] = text_of(tokens, *words);
  out["tokens"] = std::vector<std::int64_t>(tokens.begin(), tokens.end());
  out["prompt_tokens"] = request.ask.tokens.size();
  out["seconds"] = seconds;
  // Bytes that a model of bytes gives need not be UTF-8.
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string error_line(const Json& id, const std::string& sentence) {
  nlohmann::ordered_json out;
  if (!id.is_null()) out["id"] = id;
  out["error"] = sentence;
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string batch_text(std::span<const GenerateRequest> batch) {
  Json out = Json::array();
  for (const GenerateRequest& ask : batch)
    out.push_back({ask.tokens, ask.max_tokens, ask.temperature, ask.top_k, ask.seed});
  return out.dump();
}

std::vector<GenerateRequest> parse_batch(const std::string& text) {
  std::vector<GenerateRequest> out;
  for (const Json& each : Json::parse(text)) {
    GenerateRequest ask;
    ask.tokens = each.at(0).get<std::vector<std::int64_t>>();
    ask.max_tokens = each.at(1).get<std::int64_t>();
    ask.temperature = each.at(2).get<double>();
    ask.top_k = each.at(3).get<int>();
    ask.seed = each.at(4).get<std::uint64_t>();
    out.push_back(std::move(ask));
  }
  return out;
}

}  // namespace weft::cli
