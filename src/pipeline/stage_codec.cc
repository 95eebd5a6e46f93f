#include "pipeline/stage_codec.h"

#include <algorithm>
#include <limits>

#include "wire/codec.h"

namespace weft {

namespace {

LowRankOptions low_rank_options(const BackwardOptions& options) {
  return {.rank = options.columns, .min_compression = 1, .seed = options.seed};
}

}  // namespace

int factor_columns(const BackwardOptions& options, std::int64_t tokens, std::int64_t width) {
  if (!options.compresses() || tokens == 0) return 0;
  return low_rank_of(tokens, tokens * width, low_rank_options(options));
}

std::int64_t coded_count(const BackwardOptions& options, std::int64_t tokens, std::int64_t width) {
  const int columns = factor_columns(options, tokens, width);
  return columns == 0 ? tokens * width : columns * (tokens + width);
}

void StageCodec::encode(std::span<const float> gradient, std::span<float> coded) {
  const auto tokens = static_cast<std::int64_t>(gradient.size()) / width_;
  std::vector<float>& error = working_.error;
  if (options_.lazy_error && error.size() < gradient.size()) error.resize(gradient.size());
  const std::span<float> left =
      options_.lazy_error ? std::span(error).first(gradient.size()) : std::span<float>{};
  if (factor_columns(options_, tokens, width_) == 0) {
    // (Where nothing was left behind a negative zero stays one.)
    for (std::size_t i = 0; i < gradient.size(); ++i)
      coded[i] = left.empty() || left[i] == 0 ? gradient[i] : gradient[i] + left[i];
    std::ranges::fill(left, 0.0F);
    if (!rounds_) return;
    std::vector<float> lost(coded.size());
    wire::round_to_bfloat16(coded, lost);
    std::ranges::copy(left.empty() ? std::span<float>{} : std::span(lost), left.begin());
    return;
  }
  WarmFactor factor{.columns = std::move(working_.factor), .staged = {}};
  LowRank low_rank(low_rank_options(options_));
  low_rank.add(name_, tokens, static_cast<std::int64_t>(gradient.size()), &factor);
  std::vector<float> matrix(gradient.size()), sum(gradient.size());
  low_rank.begin(gradient, left, matrix, working_.messages++);
  bool finite = low_rank.project(matrix);
  if (finite && rounds_) {
    std::vector<float> lost;
    wire::round_to_bfloat16(low_rank.first(), lost);
    wire::round_to_bfloat16(low_rank.second(), lost);
  }
  finite = finite && low_rank.finish(matrix, sum, 1);
  factor.commit();
  working_.factor = std::move(factor.columns);
  if (!finite) {
    std::ranges::fill(coded, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const auto rest = std::ranges::copy(low_rank.first(), coded.begin()).out;
  std::ranges::copy(low_rank.second(), rest);
  std::ranges::copy(left.empty() ? std::span<float>{} : std::span(matrix), left.begin());
}

void StageCodec::decode(const BackwardOptions& options, std::int64_t width, std::span<const float> coded,
                        std::span<float> gradient) {
  const auto tokens = static_cast<std::int64_t>(gradient.size()) / width;
  const int columns = factor_columns(options, tokens, width);
  if (columns == 0) {
    std::ranges::copy(coded, gradient.begin());
    return;
  }
  const auto p = coded.first(static_cast<std::size_t>(columns * tokens)), q = coded.subspan(p.size());
  std::vector<float> unused(gradient.size());
  reconstruct({tokens, width, columns}, p, q, 1, gradient, unused);
}

double StageCodec::encode_seconds(const KernelCosts& kernels, std::int64_t tokens) const {
  const double rounding =
      rounds_ ? kernels.round_element * static_cast<double>(coded_count(options_, tokens, width_)) : 0;
  if (factor_columns(options_, tokens, width_) == 0)
    return 8 * kernels.copy_byte * static_cast<double>(tokens * width_) + rounding;
  WarmFactor none;
  LowRank low_rank(low_rank_options(options_));
  low_rank.add(name_, tokens, tokens * width_, &none);
  return low_rank.begin_seconds(kernels, options_.lazy_error) + low_rank.project_seconds(kernels) +
         low_rank.finish_seconds(kernels) + rounding;
}

double StageCodec::decode_seconds(const KernelCosts& kernels, const BackwardOptions& options,
                                  std::int64_t tokens, std::int64_t width) {
  const int columns = factor_columns(options, tokens, width);
  const std::int64_t elements = tokens * width;
  if (columns == 0) return 4 * kernels.copy_byte * static_cast<double>(elements);
  return kernels.reconstruct.of(elements, static_cast<double>(elements) * columns);
}

void StageCodec::set_scale(double scale) {
  if (scale == working_.scale || !(scale > 0)) return;
  if (working_.scale > 0) {
    const auto by = static_cast<float>(scale / working_.scale);
    for (float& value : working_.error) value *= by;
  }
  working_.scale = scale;
}

bool StageCodec::fit(std::int64_t tokens) {
  const std::vector<float>& error = committed_.error;
  if (tokens == 0 || static_cast<std::int64_t>(error.size()) == tokens * width_) return false;
  const bool any = std::ranges::any_of(error, [](float value) { return value != 0; });
  working_.error.clear();
  committed_.error.clear();
  return any;
}

}  // namespace weft
