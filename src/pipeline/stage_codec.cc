#include "pipeline/stage_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/whole.h"
#include "wire/bfloat16.h"
#include "wire/codec.h"

namespace weft {

namespace {

LowRankOptions low_rank_options(const BackwardOptions& options) {
  return {.rank = options.columns, .min_compression = 1, .seed = options.seed};
}

WholeShape whole_shape(const MessageForm& form, std::int64_t tokens) {
  return {.rows = tokens, .columns = form.width, .bits = form.options.bits};
}

// As it is carried; REQUIRES: rounded already, where it is.
void carry(const MessageForm& form, std::span<const float> values, std::span<std::byte> into) {
  if (form.rounds)
    wire::narrow(values, {reinterpret_cast<bfloat16*>(into.data()), values.size()});
  else if (!values.empty())
    std::memcpy(into.data(), values.data(), values.size_bytes());
}

std::vector<float> carried(const MessageForm& form, std::span<const std::byte> bytes) {
  std::vector<float> out(bytes.size() / (form.rounds ? sizeof(bfloat16) : sizeof(float)));
  if (form.rounds)
    wire::widen({reinterpret_cast<const bfloat16*>(bytes.data()), out.size()}, out);
  else if (!out.empty())
    std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

}  // namespace

int MessageForm::columns(std::int64_t tokens) const {
  if (options.columns == 0 || tokens == 0) return 0;
  return low_rank_of(tokens, tokens * width, low_rank_options(options));
}

bool MessageForm::is_whole(std::int64_t tokens) const {
  if (options.bits == 0 || tokens == 0) return false;
  return whole_bytes(whole_shape(*this, tokens)) < tokens * width * (rounds ? 2 : 4);
}

std::int64_t MessageForm::bytes(std::int64_t tokens) const {
  if (is_whole(tokens)) return whole_bytes(whole_shape(*this, tokens));
  const int r = columns(tokens);
  return (r == 0 ? tokens * width : r * (tokens + width)) * (rounds ? 2 : 4);
}

void StageCodec::encode(std::span<const float> gradient, std::span<std::byte> coded) {
  const auto tokens = static_cast<std::int64_t>(gradient.size()) / form_.width;
  std::vector<float>& error = working_.error;
  const bool keeps = form_.options.lazy_error;
  if (!keeps) error.clear();  // of a run before, that kept it
  if (keeps && error.size() < gradient.size()) error.resize(gradient.size());
  const std::span<float> left = keeps ? std::span(error).first(gradient.size()) : std::span<float>{};
  if (form_.is_whole(tokens))
    encode_whole(gradient, left, coded);
  else if (form_.columns(tokens) > 0)
    encode_factors(gradient, left, coded);
  else
    encode_plain(gradient, left, coded);
}

// (Where nothing was left behind a negative zero stays one.)
void StageCodec::encode_plain(std::span<const float> gradient, std::span<float> left,
                              std::span<std::byte> coded) const {
  std::vector<float> values(gradient.begin(), gradient.end());
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i] != 0) values[i] += left[i];
  }
  std::vector<float> lost(values.size());
  const bool finite = std::ranges::all_of(values, [](float value) { return std::isfinite(value); });
  if (form_.rounds) wire::round_to_bfloat16(values, lost);
  if (finite) std::ranges::copy(left.empty() ? std::span<float>{} : std::span(lost), left.begin());
  carry(form_, values, coded);
}

void StageCodec::encode_factors(std::span<const float> gradient, std::span<float> left,
                                std::span<std::byte> coded) {
  const auto count = static_cast<std::int64_t>(gradient.size());
  WarmFactor factor{.columns = std::move(working_.factor), .staged = {}};
  LowRank low_rank(low_rank_options(form_.options));
  low_rank.add(name_, count / form_.width, count, &factor);
  std::vector<float> matrix(gradient.size()), sum(gradient.size());
  low_rank.begin(gradient, left, matrix, working_.messages++);
  bool finite = low_rank.project(matrix);
  if (finite && form_.rounds) {
    std::vector<float> lost;
    wire::round_to_bfloat16(low_rank.first(), lost);
    wire::round_to_bfloat16(low_rank.second(), lost);
  }
  finite = finite && low_rank.finish(matrix, sum, 1);
  factor.commit();
  working_.factor = std::move(factor.columns);
  if (!finite) {
    const std::size_t values = coded.size() / (form_.rounds ? sizeof(bfloat16) : sizeof(float));
    carry(form_, std::vector<float>(values, std::numeric_limits<float>::quiet_NaN()), coded);
    return;
  }
  const std::size_t first = low_rank.first().size() * (form_.rounds ? sizeof(bfloat16) : sizeof(float));
  carry(form_, low_rank.first(), coded.first(first));
  carry(form_, low_rank.second(), coded.subspan(first));
  std::ranges::copy(left.empty() ? std::span<float>{} : std::span(matrix), left.begin());
}

void StageCodec::encode_whole(std::span<const float> gradient, std::span<float> left,
                              std::span<std::byte> coded) const {
  std::vector<float> matrix(gradient.begin(), gradient.end());
  for (std::size_t i = 0; i < left.size(); ++i) matrix[i] += left[i];
  const auto tokens = static_cast<std::int64_t>(gradient.size()) / form_.width;
  const bool finite = to_whole(whole_shape(form_, tokens), matrix, coded);
  if (finite) std::ranges::copy(left.empty() ? std::span<float>{} : std::span(matrix), left.begin());
}

void StageCodec::decode(const MessageForm& form, std::span<const std::byte> coded,
                        std::span<float> gradient) {
  const auto tokens = static_cast<std::int64_t>(gradient.size()) / form.width;
  if (form.is_whole(tokens)) {
    from_whole(whole_shape(form, tokens), coded, gradient);
    return;
  }
  const std::vector<float> values = carried(form, coded);
  const int columns = form.columns(tokens);
  if (columns == 0) {
    std::ranges::copy(values, gradient.begin());
    return;
  }
  const auto p = std::span(values).first(static_cast<std::size_t>(columns * tokens));
  std::vector<float> unused(gradient.size());
  reconstruct({tokens, form.width, columns}, p, std::span(values).subspan(p.size()), 1, gradient, unused);
}

// (A pass that rounds to whole numbers is priced as one that rounds to bfloat16, and back.)
double StageCodec::encode_seconds(const KernelCosts& kernels, std::int64_t tokens) const {
  const auto elements = static_cast<double>(tokens * form_.width);
  if (form_.is_whole(tokens)) return (8 * kernels.copy_byte + kernels.round_element) * elements;
  const double carried = static_cast<double>(form_.bytes(tokens)) / (form_.rounds ? 2 : 4);
  const double rounding = form_.rounds ? (kernels.round_element + kernels.narrow_element) * carried : 0;
  if (form_.columns(tokens) == 0) return 8 * kernels.copy_byte * elements + rounding;
  WarmFactor none;
  LowRank low_rank(low_rank_options(form_.options));
  low_rank.add(name_, tokens, tokens * form_.width, &none);
  return low_rank.begin_seconds(kernels, form_.options.lazy_error) + low_rank.project_seconds(kernels) +
         low_rank.finish_seconds(kernels) + rounding;
}

double StageCodec::decode_seconds(const KernelCosts& kernels, const MessageForm& form, std::int64_t tokens) {
  const std::int64_t elements = tokens * form.width;
  if (form.is_whole(tokens)) return kernels.widen_element * static_cast<double>(elements);
  const int columns = form.columns(tokens);
  const double carried = static_cast<double>(form.bytes(tokens)) / (form.rounds ? 2 : 4);
  const double widening = form.rounds ? kernels.widen_element * carried : 0;
  if (columns == 0) return 4 * kernels.copy_byte * static_cast<double>(elements) + widening;
  return widening + kernels.reconstruct.of(elements, static_cast<double>(elements) * columns);
}

void StageCodec::set_scale(double scale) {
  if (scale == working_.scale || !(scale > 0)) return;
  if (working_.scale > 0) {
    const auto by = static_cast<float>(scale / working_.scale);
    for (float& value : working_.error) value *= by;
  }
  working_.scale = scale;
}

bool StageCodec::fit(std::int64_t tokens, std::int64_t most) {
  const std::vector<float>& error = committed_.error;
  const auto rows = static_cast<std::int64_t>(error.size()) / form_.width;
  if (rows >= tokens && (most == 0 || rows <= most)) return false;
  const bool any = std::ranges::any_of(error, [](float value) { return value != 0; });
  working_.error.clear();
  committed_.error.clear();
  return any;
}

}  // namespace weft
