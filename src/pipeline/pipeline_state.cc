// What messages between stages leave behind: rows of it, its scale, and what of another run's nobody takes.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "pipeline/pipeline.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr const char* kError = "error";  // kind of a row

std::string dropped(const std::string& why) {
  return "what compressed gradients between stages had left behind is dropped: " + why;
}

}  // namespace

// The step before has been committed by now.
void Pipeline::set_scale(double scale) {
  drop_misfits();
  for (auto& [chunk, codec] : codecs_) codec->set_scale(scale);
}

// All links have the same micro-batches, so that one rank's line is said for all.
void Pipeline::drop_misfits() {
  const int micro_batches = static_cast<int>(batches_.size());
  bool any = false;
  for (auto& [chunk, codec] : codecs_) {
    std::int64_t most = 0;
    for (int m = 0; m < micro_batches; ++m) {
      if (is_compressed(chunk, m, micro_batches))
        most = std::max(most, shares_of(batches_[static_cast<std::size_t>(m)]->tokens).count(share()));
    }
    any = codec->fit(most, shares_of(options_.tokens).count(share())) || any;
  }
  const int last = options_.stage.stages * options_.stage.chunks - 1;
  if (any && codecs_.contains(last) && options_.peers.rank == 0)
    engine_.log_line(dropped("its messages had another number of tokens"));
}

std::string Pipeline::left_out(const StateSource& source, const Pipeline* here) {
  for (const StateSource::Saved& saved : source.rows()) {
    const StateRow& row = saved.row;
    if (row.key.owner != PipelineOptions{}.name || row.key.kind != kError || row.shard.num_elements() == 1)
      continue;
    if (here == nullptr || !here->options_.backward.compresses())
      return dropped("no gradient between stages is compressed here");
    const int ranks = here->options_.peers.size;
    if (row.key.name.ends_with("(" + here->layout_ + ")") && row.peers.size == ranks) continue;
    const std::string layout = row.key.name.substr(row.key.name.find_last_of('(') + 1);
    const auto over = [](int n) { return " over " + std::to_string(n) + (n == 1 ? " rank" : " ranks"); };
    return dropped("it is of stages " + layout.substr(0, layout.size() - 1) + over(row.peers.size) +
                   " each, here " + here->layout_ + over(ranks));
  }
  return {};
}

std::vector<LiveRow> Pipeline::state_rows() {
  std::vector<LiveRow> out;
  for (auto& [chunk, codec] : codecs_) {
    StageCodec* const mine = codec.get();
    // `fits`: what a file may say.
    const auto add = [&](const char* kind, auto values_of, auto set, auto fits) {
      using Values = std::decay_t<decltype(values_of(mine->state()))>;
      using T = typename Values::value_type;
      LiveRow row;
      row.row = {.key = {options_.name, kind, mine->name() + " (" + layout_ + ")"},
                 .dtype = std::is_same_v<T, double> ? DType::float64 : DType::float32,
                 .rule = LayoutRule::restart,
                 .shard = Shard::whole({static_cast<std::int64_t>(values_of(mine->state()).size())}),
                 .peers = options_.peers};
      row.read = [mine, values_of](std::vector<std::byte>& scratch) -> std::span<const std::byte> {
        const Values values = values_of(mine->state());
        const auto bytes = std::as_bytes(std::span(values));
        scratch.assign(bytes.begin(), bytes.end());
        return scratch;
      };
      row.write = [mine, set](std::span<const std::byte> bytes) {
        Values values(bytes.size() / sizeof(T));
        if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
        StageCodec::State state = mine->state();
        set(state, values);
        mine->load(std::move(state));
      };
      row.takes = [key = row.row.key, fits](const Shard&, std::span<const std::byte> bytes) {
        Values values(bytes.size() / sizeof(T));
        if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
        if (bytes.size() % sizeof(T) != 0 || !fits(values))
          throw UsageError(describe(key) + " has " + std::to_string(values.size()) +
                           " values that no link of this width leaves behind");
        return true;
      };
      out.push_back(std::move(row));
    };
    // (A row has at least one value: a zero stands for none.)
    using Floats = std::vector<float>;
    const auto at_least_one = [](const Floats& values) { return values.empty() ? Floats{0.0F} : values; };
    const auto or_none = [](const Floats& values) {
      return values.size() == 1 && values[0] == 0 ? Floats{} : values;
    };
    const auto whole_rows = [or_none, width = static_cast<std::size_t>(width_)](const Floats& values) {
      return or_none(values).size() % width == 0;
    };
    add(
        kError, [at_least_one](const StageCodec::State& s) { return at_least_one(s.error); },
        [or_none](StageCodec::State& s, const Floats& values) { s.error = or_none(values); }, whole_rows);
    add(
        "factor", [at_least_one](const StageCodec::State& s) { return at_least_one(s.factor); },
        [or_none](StageCodec::State& s, const Floats& values) { s.factor = or_none(values); }, whole_rows);
    add(
        "scale",
        [](const StageCodec::State& s) {
          return std::vector<double>{s.scale, static_cast<double>(s.messages)};
        },
        [](StageCodec::State& s, const std::vector<double>& values) {
          s.scale = values.empty() ? 0 : values[0];  // (anew)
          s.messages = values.empty() ? 0 : static_cast<std::uint32_t>(values[1]);
        },
        [](const std::vector<double>& values) {
          constexpr double kMost = std::numeric_limits<std::uint32_t>::max();
          return values.size() == 2 && values[0] >= 0 && values[1] >= 0 && values[1] <= kMost;
        });
  }
  return out;
}

}  // namespace weft
