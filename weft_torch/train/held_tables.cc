#include "weft_torch/train/held_tables.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "weft/error.h"

namespace weft {

namespace {

constexpr std::int64_t kChunk = 1 << 14;  // rows at a time

template <class T>
std::span<T> span_of(const torch::Tensor& tensor) {
  return {tensor.data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

// Rows [first, first + count) of a parameter, all columns, in double precision.
torch::Tensor values_of(const Parameter& parameter, std::int64_t columns, std::int64_t first,
                        std::int64_t count) {
  if (parameter.tensor.size(0) > 0)
    return parameter.tensor.detach().slice(0, first, first + count).cpu().to(torch::kFloat64).contiguous();
  const torch::Tensor out = torch::empty({count, columns}, torch::kFloat32);
  parameter.initial(first * columns, span_of<float>(out));
  return out.to(torch::kFloat64);
}

// The columns of a row that this rank holds.
template <class T>
void keep(const HybridTable& table, int rank, std::int32_t row, const double* values, Dense held) {
  const BlockRange mine = table.columns(rank);
  T* const to = reinterpret_cast<T*>(held.data) + std::int64_t{table.layout().place(row)} * mine.count;
  for (std::int64_t c = 0; c < mine.count; ++c) to[c] = static_cast<T>(values[mine.first + c]);
}

}  // namespace

void bring_back(const Parameter& parameter, const ParameterShape& shape) {
  const torch::Tensor values = torch::empty(shape.dims, torch::kFloat32);
  parameter.initial(0, span_of<float>(values));
  const torch::NoGradGuard no_grad;
  torch::Tensor(parameter.tensor).set_data(values.to(parameter.tensor.options().requires_grad(false)));
}

HeldTables::HeldTables(Model& model, JobStrategies& job) : model_(model), job_(job) {
  const ModelShape& trained = job.all().shape();
  for (std::size_t p = 0; p < trained.parameters.size(); ++p) {
    HybridTable* const table = job.place(static_cast<int>(p)).table;
    if (table == nullptr) continue;
    const auto found = std::ranges::find(model.parameters(), trained.parameters[p].name, &Parameter::name);
    Held held;
    held.in_model = static_cast<int>(found - model.parameters().begin());
    held.place = static_cast<int>(p);
    held.table = table;
    held.ready = trained.ready_after(static_cast<int>(p), 1);
    take_over(*found, held);
    held_.push_back(std::move(held));
  }
}

void HeldTables::take_over(const Parameter& parameter, Held& held) const {
  const HybridTable& table = *held.table;
  const TableInfo& info = table.info();
  const int rank = job_.data_ranks().rank();
  const Dense values = held.table->values();
  const bool wide = values.dtype == DType::float64;
  for (std::int64_t first = 0; first < info.rows; first += kChunk) {
    const std::int64_t count = std::min(kChunk, info.rows - first);
    const torch::Tensor chunk = values_of(parameter, info.columns, first, count);
    const double* from = chunk.data_ptr<double>();
    for (std::int64_t r = 0; r < count; ++r, from += info.columns) {
      const auto row = static_cast<std::int32_t>(first + r);
      if (!table.layout().holds(row, rank)) continue;
      wide ? keep<double>(table, rank, row, from, values) : keep<float>(table, rank, row, from, values);
    }
  }
  held.like = torch::empty({0}, parameter.tensor.options().requires_grad(false));
  const torch::NoGradGuard no_grad;
  torch::Tensor(parameter.tensor).set_data(torch::empty({0, info.columns}, held.like.options()));
}

const HeldTables::Held* HeldTables::find(std::string_view name) const {
  const auto found =
      std::ranges::find_if(held_, [&](const Held& held) { return held.table->info().name == name; });
  return found == held_.end() ? nullptr : &*found;
}

const HeldTables::Held* HeldTables::find(int in_model) const {
  const auto found = std::ranges::find(held_, in_model, &Held::in_model);
  return found == held_.end() ? nullptr : &*found;
}

bool HeldTables::holds(std::string_view name) const { return find(name) != nullptr; }

std::vector<BatchInfo::Lookup> HeldTables::lookups(std::span<const Batch> batches,
                                                   const StepContext& context) {
  std::vector<std::vector<torch::Tensor>> ids(held_.size());
  for (const Batch& batch : batches) {
    if (held_.empty() || sequences(batch) == 0) continue;
    for (const TableIds& lookup : model_.lookups(batch, context)) {
      const auto held = std::ranges::find(held_, lookup.parameter, &Held::in_model);
      if (held != held_.end())
        ids[static_cast<std::size_t>(held - held_.begin())].push_back(lookup.ids.cpu().contiguous());
    }
  }
  asked_.clear();
  std::vector<BatchInfo::Lookup> out;
  for (std::size_t h = 0; h < held_.size(); ++h) {
    asked_.push_back(ids[h].empty() ? torch::empty({0}, torch::kInt64) : torch::cat(ids[h]));
    out.push_back({.table = held_[h].table->info().name, .ids = span_of<std::int64_t>(asked_.back())});
  }
  return out;
}

torch::Tensor HeldTables::rows(int parameter, const torch::Tensor& ids) const {
  const Held* const held = find(parameter);
  if (held == nullptr) return {};
  const torch::Tensor wanted = ids.flatten().cpu();
  torch::Tensor places = torch::searchsorted(held->ids, wanted);
  if (held->ids.size(0) > 0) places.clamp_max_(held->ids.size(0) - 1);
  const bool there =
      wanted.size(0) == 0 || (held->ids.size(0) > 0 && held->ids.index_select(0, places).equal(wanted));
  if (!there) {
    throw UsageError("table '" + held->table->info().name +
                     "': the model reads rows that were not announced: its batch is not the one that was");
  }
  return torch::embedding(held->rows, places.view(ids.sizes()).to(held->rows.device()));
}

void HeldTables::before_forward(const Piece& piece) {
  if (piece.micro_batch != 0) return;
  for (Held& held : held_) {
    if (held.ready.block != piece.block || held.ready.part != piece.part) continue;
    const std::span<const std::int32_t> ids = held.table->ids();
    held.ids = torch::empty({static_cast<std::int64_t>(ids.size())}, torch::kInt64);
    std::ranges::copy(ids, held.ids.data_ptr<std::int64_t>());
    const Dense values = held.table->rows();
    const torch::Tensor host = torch::from_blob(values.data, {held.ids.size(0), held.table->info().columns},
                                                torch::TensorOptions(held.like.scalar_type()));
    held.rows = host.to(held.like.device()).set_requires_grad(true);
  }
}

void HeldTables::after_backward(const Piece& piece) {
  for (Held& held : held_) {
    if (held.ready.block != piece.block || held.ready.part != piece.part) continue;
    const torch::Tensor gradient = std::exchange(held.rows, {}).grad();
    if (!gradient.defined()) continue;  // no token read it: zeros, by and by
    held.gradient = gradient.cpu().contiguous();
    if (held.gradient.scalar_type() == torch::kFloat64)
      job_.all().gradient_ready(held.place, std::span<const double>(span_of<double>(held.gradient)));
    else
      job_.all().gradient_ready(held.place, std::span<const float>(span_of<float>(held.gradient)));
  }
}

// `ids` and `out` are in host memory.
void HeldTables::look_up(const Held& held, const torch::Tensor& ids, const torch::Tensor& out) {
  const std::span<const std::int64_t> asked = span_of<std::int64_t>(ids);
  const Dense into =
      out.scalar_type() == torch::kFloat64 ? Dense(span_of<double>(out)) : Dense(span_of<float>(out));
  held.table->look_up(asked, into).wait();
}

torch::Tensor HeldTables::Outside::rows(int parameter, const torch::Tensor& ids) const {
  const Held* const held = tables_.find(parameter);
  if (held == nullptr) return {};
  const torch::Tensor wanted = ids.flatten().cpu().contiguous();
  const torch::Tensor out =
      torch::empty({wanted.size(0), held->table->info().columns}, held->like.options().device(torch::kCPU));
  look_up(*held, wanted, out);
  std::vector<std::int64_t> sizes = ids.sizes().vec();
  sizes.push_back(held->table->info().columns);
  return out.view(sizes).to(held->like.device());
}

torch::Tensor HeldTables::Outside::block(int parameter, std::int64_t first, std::int64_t count) const {
  return rows(parameter, torch::arange(first, first + count, torch::kInt64));
}

torch::Tensor HeldTables::whole(std::string_view name) {
  const Held& held = *find(name);
  const TableInfo& info = held.table->info();
  torch::Tensor out = torch::empty({info.rows, info.columns}, held.like.options().device(torch::kCPU));
  for (std::int64_t first = 0; first < info.rows; first += kChunk) {
    const std::int64_t count = std::min(kChunk, info.rows - first);
    look_up(held, torch::arange(first, first + count, torch::kInt64), out.slice(0, first, first + count));
  }
  return out.to(held.like.device());
}

}  // namespace weft
