#include "measure/outline_file.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "weft/error.h"

namespace weft {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kLongestFile = std::size_t{1} << 26;

// One object of the file. Every key must be taken, and be there.
class Reader {
 public:
  // `where` for errors: the file and the place in it.
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) refuse("must be an object");
  }
  std::string text(const char* key) {
    const Json& value = at(key);
    if (!value.is_string()) refuse(std::string(key) + " must be a text");
    return value.get<std::string>();
  }
  double number(const char* key) {
    const Json& value = at(key);
    if (!value.is_number()) refuse(std::string(key) + " must be a number");
    return value.get<double>();
  }
  bool has(const char* key) const { return object_.contains(key); }
  // False where it is not there.
  bool yes(const char* key) {
    if (!object_.contains(key)) return false;
    const Json& value = at(key);
    if (!value.is_boolean()) refuse(std::string(key) + " must be true or false");
    return value.get<bool>();
  }
  std::int64_t whole(const char* key, std::int64_t most = std::numeric_limits<std::int64_t>::max()) {
    const Json& value = at(key);
    // (What does not fit 63 bits is read as unsigned or as floating point.)
    const bool fits =
        value.is_number_integer() &&
        (!value.is_number_unsigned() || value.get<std::uint64_t>() <= static_cast<std::uint64_t>(most));
    if (!fits || value.get<std::int64_t>() < 0 || value.get<std::int64_t>() > most)
      refuse(std::string(key) + " must be a whole number of 0 to " + std::to_string(most));
    return value.get<std::int64_t>();
  }
  std::vector<double> numbers(const char* key) {
    const Json& value = at(key);
    const auto is_number = [](const Json& element) { return element.is_number(); };
    if (!value.is_array() || !std::all_of(value.begin(), value.end(), is_number))
      refuse(std::string(key) + " must be a list of numbers");
    return value.get<std::vector<double>>();
  }
  template <class F>
  void each(const char* key, F&& f) {
    const Json& value = at(key);
    if (!value.is_array()) refuse(std::string(key) + " must be a list");
    for (std::size_t i = 0; i < value.size(); ++i) {
      Reader element(value[i], where_ + ": " + key + "[" + std::to_string(i) + "]");
      f(element);
      element.end();
    }
  }
  void end() const {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(taken_.begin(), taken_.end(), key) == taken_.end())
        refuse("has an unknown key '" + key + "'");
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const { throw UsageError(where_ + ": " + what); }
  const Json& at(const char* key) {
    taken_.emplace_back(key);
    const auto found = object_.find(key);
    if (found == object_.end()) refuse(std::string(key) + " is missing");
    return *found;
  }

  const Json& object_;
  std::string where_;
  std::vector<std::string_view> taken_;
};

constexpr std::array<const char*, 4> kParts{"block", "gate", "shared", "experts"};

OutlineTensor::Of part_named(const std::string& name, const std::string& where) {
  const auto found = std::ranges::find(kParts, name);
  if (found == kParts.end())
    throw UsageError(where + ": a tensor is of a block, gate, shared or experts, not of '" + name + "'");
  return static_cast<OutlineTensor::Of>(found - kParts.begin());
}

template <class Layer, class F>
void for_each_seconds(Layer& e, F&& f) {
  f("gate_forward_seconds", e.gate_forward_seconds);
  f("gate_backward_seconds", e.gate_backward_seconds);
  f("shared_forward_seconds", e.shared_forward_seconds);
  f("shared_backward_seconds", e.shared_backward_seconds);
  f("row_forward_seconds", e.row_forward_seconds);
  f("row_backward_seconds", e.row_backward_seconds);
  f("expert_forward_seconds", e.expert_forward_seconds);
  f("expert_backward_seconds", e.expert_backward_seconds);
  f("merge_forward_seconds", e.merge_forward_seconds);
  f("merge_backward_seconds", e.merge_backward_seconds);
}

Outline from_json(const Json& json, const std::string& where) {
  constexpr std::int64_t kMostInt = std::numeric_limits<int>::max();
  Reader r(json, where);
  Outline out;
  out.model = r.text("model");
  out.source = r.text("source");
  out.flops_per_second = r.number("flops_per_second");
  out.side_by_side = static_cast<int>(r.whole("side_by_side", kMostInt));
  out.parameters = r.whole("parameters");
  out.tokens_per_rank = r.whole("tokens_per_rank");
  if (r.has("width")) out.width = r.whole("width");
  out.other_seconds = r.number("other_seconds");
  r.each("blocks", [&](Reader& b) {
    OutlineBlock& block = out.blocks.emplace_back();
    block.name = b.text("name");
    block.forward_seconds = b.number("forward_seconds");
    block.backward_seconds = b.number("backward_seconds");
    block.update_seconds = b.number("update_seconds");
    if (b.has("cuts")) block.cuts = b.numbers("cuts");
  });
  r.each("tensors", [&](Reader& t) {
    OutlineTensor& tensor = out.tensors.emplace_back();
    tensor.name = t.text("name");
    tensor.length = t.whole("length");
    tensor.rows = t.whole("rows");
    tensor.columns = t.whole("columns");
    tensor.block = static_cast<int>(t.whole("block", kMostInt));
    tensor.ready = t.number("ready");
    tensor.tied = t.yes("tied");
    if (t.has("of")) tensor.of = part_named(t.text("of"), where);
    if (t.has("cut")) tensor.cut = static_cast<int>(t.whole("cut", 1));
  });
  r.each("tables", [&](Reader& t) {
    OutlineTable& table = out.tables.emplace_back();
    table.name = t.text("name");
    table.rows = t.whole("rows");
    table.width = t.whole("width");
    table.rows_per_step = t.number("rows_per_step");
    table.lookups_per_step = t.whole("lookups_per_step");
    table.shared_per_step = t.whole("shared_per_step");
    table.zipf = t.number("zipf");
    table.dense_forward_seconds = t.number("dense_forward_seconds");
    table.dense_backward_seconds = t.number("dense_backward_seconds");
    table.dense_update_seconds = t.number("dense_update_seconds");
  });
  if (r.has("experts")) {
    r.each("experts", [&](Reader& e) {
      OutlineExperts& layer = out.experts.emplace_back();
      layer.name = e.text("name");
      layer.block = static_cast<int>(e.whole("block", kMostInt));
      layer.width = e.whole("width");
      layer.experts = static_cast<int>(e.whole("experts", kMostInt));
      layer.choices = static_cast<int>(e.whole("choices", kMostInt));
      layer.capacity_factor = e.number("capacity_factor");
      for_each_seconds(layer, [&](const char* key, double& seconds) { seconds = e.number(key); });
    });
  }
  r.end();
  return out;
}

}  // namespace

std::string outline_json(const Outline& outline) {
  Json json = {{"model", outline.model},
               {"source", outline.source},
               {"flops_per_second", outline.flops_per_second},
               {"side_by_side", outline.side_by_side},
               {"parameters", outline.parameters},
               {"tokens_per_rank", outline.tokens_per_rank},
               {"width", outline.width},
               {"other_seconds", outline.other_seconds},
               {"blocks", Json::array()},
               {"tensors", Json::array()},
               {"tables", Json::array()}};
  for (const OutlineBlock& block : outline.blocks) {
    json["blocks"].push_back({{"name", block.name},
                              {"forward_seconds", block.forward_seconds},
                              {"backward_seconds", block.backward_seconds},
                              {"update_seconds", block.update_seconds}});
    if (!block.cuts.empty()) json["blocks"].back()["cuts"] = block.cuts;
  }
  for (const OutlineTensor& tensor : outline.tensors) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"length", tensor.length},
                               {"rows", tensor.rows},
                               {"columns", tensor.columns},
                               {"block", tensor.block},
                               {"ready", tensor.ready},
                               {"tied", tensor.tied}});
    if (tensor.of != OutlineTensor::Of::block)
      json["tensors"].back()["of"] = kParts[static_cast<std::size_t>(tensor.of)];
    if (tensor.cut >= 0) json["tensors"].back()["cut"] = tensor.cut;
  }
  for (const OutlineExperts& layer : outline.experts) {
    Json row = {{"name", layer.name},       {"block", layer.block},
                {"width", layer.width},     {"experts", layer.experts},
                {"choices", layer.choices}, {"capacity_factor", layer.capacity_factor}};
    for_each_seconds(layer, [&](const char* key, double seconds) { row[key] = seconds; });
    json["experts"].push_back(std::move(row));
  }
  for (const OutlineTable& table : outline.tables) {
    json["tables"].push_back({{"name", table.name},
                              {"rows", table.rows},
                              {"width", table.width},
                              {"rows_per_step", table.rows_per_step},
                              {"lookups_per_step", table.lookups_per_step},
                              {"shared_per_step", table.shared_per_step},
                              {"zipf", table.zipf},
                              {"dense_forward_seconds", table.dense_forward_seconds},
                              {"dense_backward_seconds", table.dense_backward_seconds},
                              {"dense_update_seconds", table.dense_update_seconds}});
  }
  return json.dump(1) + "\n";
}

Outline read_outline(const std::filesystem::path& file) {
  const std::string where = "outline '" + file.string() + "'";
  std::ifstream in(file, std::ios::binary);
  std::error_code error;
  const bool plain = std::filesystem::is_regular_file(file, error);
  if (!in || !plain) throw UsageError(where + " cannot be read");
  std::string text(std::istreambuf_iterator<char>(in), {});
  if (text.size() > kLongestFile) throw UsageError(where + " is too long to be one");
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) throw UsageError(where + " is not JSON");
  const Outline outline = from_json(json, where);
  check(outline, where);
  return outline;
}

void write_outline(const std::filesystem::path& file, const Outline& outline) {
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out << outline_json(outline);
  if (!out.flush()) throw Error("outline '" + file.string() + "' cannot be written");
}

}  // namespace weft
