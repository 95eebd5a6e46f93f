#include "workload/job_strategies.h"

#include <algorithm>

#include "data_parallel/formula.h"
#include "data_parallel/schemes.h"
#include "embedding/ways.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr const char* kDenseTables = "tables";  // owner of the state of tables that are all-reduced

// Parameters by whose they are.
struct Parted {
  std::vector<int> scheme, dense, hybrid;
};
Parted parted(const ModelShape& shape, const TablesOptions& options) {
  Parted out;
  const TableWay::Kind kind = find_table_way(options.way).kind;
  for (std::size_t p = 0; p < shape.parameters.size(); ++p) {
    const TableWay::Kind whose = shape.parameters[p].table ? kind : TableWay::Kind::scheme;
    std::vector<int>& with = whose == TableWay::Kind::hybrid  ? out.hybrid
                             : whose == TableWay::Kind::dense ? out.dense
                                                              : out.scheme;
    with.push_back(static_cast<int>(p));
  }
  return out;
}

std::vector<ParameterInfo> infos_of(const ModelShape& model, const std::vector<int>& parameters) {
  std::vector<ParameterInfo> out;
  for (const int p : parameters) {
    const ParameterShape& shape = model.parameters[static_cast<std::size_t>(p)];
    out.push_back({.name = shape.name,
                   .count = shape.count(),
                   .use = model.block_of(p),
                   .rows = shape.rows(),
                   .tied = shape.tied});
  }
  return out;
}

}  // namespace

std::vector<ParameterInfo> under_scheme(const ModelShape& shape, const TablesOptions& options) {
  return infos_of(shape, parted(shape, options).scheme);
}

std::int64_t elements_of_rank(const ModelShape& shape, const TablesOptions& options, int ranks) {
  const TableWay& way = find_table_way(options.way);
  const bool cut =
      way.kind == TableWay::Kind::hybrid && way.cut != TableCut::none && way.cut != TableCut::pushed;
  const int holders = !cut                        ? 1
                      : way.cut == TableCut::rows ? hybrid_options(way, options, ranks).owners
                                                  : ranks;
  std::int64_t sum = 0;
  for (const ParameterShape& p : shape.parameters)
    sum += p.table ? (p.count() + holders - 1) / holders : p.count();
  return sum;
}

std::vector<bool> held_tables(const ModelShape& shape, const TablesOptions& options) {
  std::vector<bool> out(shape.parameters.size());
  for (const int p : parted(shape, options).hybrid) out[static_cast<std::size_t>(p)] = true;
  return out;
}

JobStrategies::JobStrategies(Engine& engine, const Comm& world, const ModelShape& shape,
                             const JobOptions& options)
    : all_(std::make_unique<Strategies>(engine, world, shape, options.step)),
      places_(shape.parameters.size()) {
  check_tables(options.tables);
  const Parted parts = parted(shape, options.tables);
  if (parts.scheme.empty()) throw UsageError("the model has nothing but tables");
  DataParallelOptions parallel = options.parallel;
  parallel.dtype = options.dtype;
  parallel_ = &add_parallel(engine, parts.scheme, parallel);
  if (!parts.dense.empty()) {
    parallel.name = kDenseTables;
    parallel.scheme.name = lossless_scheme().name;
    parallel.scheme.all_reduce = find_table_way(options.tables.way).all_reduce;
    dense_tables_ = &add_parallel(engine, parts.dense, parallel);
  }
  if (!parts.hybrid.empty()) add_hybrid(engine, parts.hybrid, options);
  all_->install();
}

DataParallel& JobStrategies::add_parallel(Engine& engine, const std::vector<int>& parameters,
                                          DataParallelOptions options) {
  options.divisor = 0;
  options.first_slot = all_->next_slot(all_->world());
  DataParallel& out = all_->add(std::make_unique<DataParallel>(
      engine, all_->world(), infos_of(all_->shape(), parameters), options, &all_->state()));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    places_[static_cast<std::size_t>(parameters[i])] = {&out, nullptr, static_cast<int>(i)};
  return out;
}

void JobStrategies::add_hybrid(Engine& engine, const std::vector<int>& parameters,
                               const JobOptions& options) {
  std::vector<TableInfo> infos;
  for (const int p : parameters) {
    const ParameterShape& shape = all_->shape().parameters[static_cast<std::size_t>(p)];
    infos.push_back({.name = shape.name,
                     .rows = shape.rows(),
                     .columns = shape.count() / shape.rows(),
                     .use = all_->shape().block_of(p),
                     .rows_per_step = shape.rows_per_step});
  }
  HybridOptions hybrid =
      hybrid_options(find_table_way(options.tables.way), options.tables, all_->world().size());
  hybrid.dtype = options.dtype;
  hybrid.optimizer = options.optimizer;
  hybrid.lookahead = options.step.lookahead;
  const StepOptions& step = options.step;
  hybrid.updates_wait = step.clip_norm > 0 || step.skip_not_finite || !step.updates_wait.empty();
  hybrid.first_slot = all_->next_slot(all_->world());
  hybrid_ = &all_->add(std::make_unique<HybridEmbedding>(engine, all_->world(), infos, hybrid));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    places_[static_cast<std::size_t>(parameters[i])] = {nullptr, &hybrid_->table(static_cast<int>(i)),
                                                        static_cast<int>(i)};
}

std::vector<std::string> JobStrategies::owners() const {
  std::vector<std::string> out{std::string(parallel_->name())};
  if (dense_tables_ != nullptr) out.emplace_back(dense_tables_->name());
  return out;
}

void JobStrategies::set_lr(double lr) {
  if (hybrid_ != nullptr) hybrid_->set_lr(lr);
}

void JobStrategies::add_optimizer_rows(std::vector<LiveRow>& rows, const Peers& peers) {
  if (hybrid_ == nullptr) return;
  for (LiveRow& row : hybrid_->optimizer_rows(peers)) {
    const auto same =
        std::ranges::find_if(rows, [&](const LiveRow& other) { return other.row.key == row.row.key; });
    if (same == rows.end()) {
      rows.push_back(std::move(row));
      continue;
    }
    same->write = [dense = same->write, tables = row.write](std::span<const std::byte> values) {
      dense(values);
      tables(values);
    };
  }
}

std::uint64_t JobStrategies::take_sent_bytes() {
  std::uint64_t out = parallel_->sent_bytes();
  if (dense_tables_ != nullptr) out += dense_tables_->sent_bytes();
  if (hybrid_ == nullptr) return out;
  const std::uint64_t sent = hybrid_->sent_bytes();
  out += sent - sent_before_;
  sent_before_ = sent;
  return out;
}

std::int64_t JobStrategies::formula_bytes(const LinkCost& link, std::size_t micro_op_bytes) const {
  const int size = all_->world().size();
  std::int64_t out = weft::formula_bytes(*parallel_, size, link, micro_op_bytes);
  if (dense_tables_ != nullptr) out += weft::formula_bytes(*dense_tables_, size, link, micro_op_bytes);
  if (hybrid_ != nullptr) out += hybrid_->formula_bytes(link);
  return out;
}

double JobStrategies::computed_seconds() const {
  double sum = 0;
  for (const DataParallel* parallel : {parallel_, dense_tables_}) {
    if (parallel == nullptr) continue;
    for (int b = 0; b < parallel->plan().num_buckets(); ++b) sum += parallel->computed_seconds(b);
  }
  return sum;
}

}  // namespace weft
