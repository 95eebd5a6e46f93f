#include "measure/comparison.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <thread>
#include <utility>

#include "data_parallel/schemes.h"
#include "experts/packing.h"
#include "measure/page.h"
#include "measure/table.h"
#include "planner/messages.h"
#include "workload/elements.h"
#include "workload/job_strategies.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string new_session() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(since).count()) + "-" +
         std::to_string(getpid());
}

Recorded recorded_of(const EmulatedRun& run, const Outline& outline, const Mesh& mesh,
                     std::span<const std::int64_t> pauses) {
  Recorded out;
  out.steps = job_of(rank_steps(run), pauses);
  out.tokens = static_cast<double>(outline.tokens_per_rank) * mesh.dp;
  const EmulatedSteps& first = run.ranks.front();
  const auto gradients_of = [](const EmulatedSteps& rank) {
    return static_cast<double>(rank.formula_bytes) - rank.table_formula_bytes.back();
  };
  out.formula_bytes = gradients_of(first);
  for (const EmulatedSteps& rank : run.ranks) {
    if (mesh.pp > 1) out.formula_bytes = std::max(out.formula_bytes, gradients_of(rank));
  }
  out.parameters = outline.parameters;
  const std::vector<PackingChange>& packings = run.ranks.front().packings;
  if (!packings.empty()) out.packing = packings.back().packing;
  if (outline.experts.empty()) return out;
  const double ranks = static_cast<double>(run.ranks.size());
  for (std::size_t i = 0; i < first.times.size(); ++i) {
    double forward = 0, backward = 0;
    for (const EmulatedSteps& rank : run.ranks) {
      forward += rank.times[i].waited_forward / ranks;
      backward += rank.times[i].waited_backward / ranks;
    }
    out.rows_forward_seconds.push_back(forward);
    out.rows_backward_seconds.push_back(backward);
  }
  return out;
}

// Packing that is chosen on the way is chosen before anything is measured.
std::int64_t warm_up_of(const std::vector<Variant>& variants) {
  std::int64_t out = kWarmUpSteps;
  for (const Variant& variant : variants) {
    const ExpertOptions& experts = variant.options.sizes.experts;
    if (is_auto_packing(experts.packing)) out = std::max(out, steps_to_pack(experts));
  }
  return out;
}

}  // namespace

Comparison::Comparison(ComparisonOptions options, Models models)
    : options_(std::move(options)),
      models_(std::move(models)),
      emulated_(options_.computation.emulated()),
      turns_(plan_turns(warm_up_of(options_.variants), options_.measured_steps, emulated_)),
      progress_(true),
      session_(new_session()),
      model_(options_.variants.front().options.model) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  const int busy = options_.ranks * options_.variants.front().options.threads;
  oversubscribed_ = !emulated_ && cores > 0 && busy > cores;
  folder_ = std::make_unique<ComparisonFolder>(options_.folder, options_.selection, options_.settings);
}

std::vector<std::string> Comparison::wanted() const {
  std::vector<std::string> names;
  for (const Variant& variant : options_.variants) {
    if (options_.bucket_mibs.empty()) names.push_back(variant.name);
    for (const double mib : options_.bucket_mibs) names.push_back(with_buckets(variant.name, mib));
  }
  return names;
}

const Variant& Comparison::variant_of(const std::string& name) const {
  const auto is_it = [&](const Variant& variant) {
    return variant.name == name || std::ranges::any_of(options_.bucket_mibs, [&](double mib) {
             return with_buckets(variant.name, mib) == name;
           });
  };
  return *std::ranges::find_if(options_.variants, is_it);
}

TrainOptions Comparison::options_of(const std::string& name, const NamedLink& link) const {
  const Variant& variant = variant_of(name);
  TrainOptions out = variant.options;
  for (const double mib : options_.bucket_mibs) {
    if (with_buckets(variant.name, mib) == name)
      find_scheme_knob("bucket-mib").set(out.scheme, std::to_string(mib));
  }
  out.steps = turns_.steps();
  if (link.planned) out.planned_link = *link.planned;
  const auto chosen = choices_.find({variant.name, link.name});
  if (chosen != choices_.end()) out.tables = chosen->second.tables;
  const auto messages = messages_.find({variant.name, link.name});
  if (messages != messages_.end()) out.backward.messages = messages->second;
  const auto stages = stages_.find({variant.name, link.name});
  if (stages != stages_.end()) stages->second.apply(out.scheme, out.sizes.stage, out.backward);
  return out;
}

// Without a link (T_inf): as for the first of them, so that the two differ by the link alone.
void Comparison::choose_tables_at(const NamedLink& link) {
  const NamedLink& by = link.link ? link : options_.links.front();
  for (const Variant& variant : options_.variants) {
    if (!variant.chooses_tables) continue;
    const LinkCost cost = by.planned.value_or(variant.options.planned_link);
    choices_[{variant.name, link.name}] =
        choose_tables(outline_, variant.options.tables, optimizer_options(variant.options), options_.ranks,
                      variant.options.seed, cost);
  }
}

// The same of messages between stages, behind all else that is chosen.
void Comparison::choose_messages_at(const NamedLink& link) {
  const NamedLink& by = link.link ? link : options_.links.front();
  for (const Variant& variant : options_.variants) {
    if (!variant.chooses_messages) continue;
    TrainOptions options = options_of(variant.name, link);
    if (by.planned) options.planned_link = *by.planned;
    const SimulatedCosts costs = measured_costs(options, options_.ranks, outline_);
    const MessagesChoice choice = choose_messages(outline_, emulation_of(options, options_.ranks, outline_),
                                                  simulation_of(options_.ranks, by.link, costs));
    std::fprintf(stderr, "weft: note: %s, %s: backward-messages critical: %s\n", variant.name.c_str(),
                 link.name.c_str(), choice.why.c_str());
    messages_[{variant.name, link.name}] = choice.messages;
  }
}

// Behind the ways of tables, and without a link the same as they.
void Comparison::choose_stages_at(const NamedLink& link) {
  const NamedLink& by = link.link ? link : options_.links.front();
  for (const Variant& variant : options_.variants) {
    if (!variant.chooses_stages) continue;
    TrainOptions options = options_of(variant.name, link);
    if (by.planned) options.planned_link = *by.planned;
    stages_[{variant.name, link.name}] = choose_compressed_stages(
        outline_, emulation_of(options, options_.ranks, outline_),
        simulation_of(options_.ranks, by.link, measured_costs(options, options_.ranks, outline_)),
        variant.chooses_rank);
  }
}

void Comparison::measure() {
  std::vector<NamedLink> links{{.name = kNoLink, .link = std::nullopt, .planned = std::nullopt}};
  for (const NamedLink& link : options_.links) {
    if (link.link) links.push_back(link);
  }
  if (emulated_) {
    outline_ = outline_for(options_.folder, options_.computation.outline, options_.variants.front().options,
                           options_.ranks, models_.measure_outline);
    model_ = outline_.model;
    parameters_ = outline_.parameters;
  } else if (std::ranges::any_of(options_.variants, [](const Variant& v) {
               return v.chooses_tables || v.chooses_stages || v.chooses_messages;
             })) {
    outline_ = models_.measure_outline(options_.variants.front().options, options_.ranks);
  }
  for (const NamedLink& link : links) {
    choose_tables_at(link);
    choose_stages_at(link);
    choose_messages_at(link);
    std::vector<std::string> missing;
    for (const std::string& variant : wanted()) {
      if (!folder_->has(variant, link.name)) missing.push_back(variant);
    }
    if (!missing.empty()) measure(missing, link);
  }
}

void Comparison::save(const std::string& variant, const NamedLink& link, const Recorded& recorded,
                      bool side_by_side) {
  const TrainOptions options = options_of(variant, link);
  const SchemeOptions& scheme = options.scheme;
  Point point = point_of(recorded, turns_.measured);
  point.variant = variant;
  point.scheme = scheme.name;
  point.tables = options.tables.way;
  if (has_experts(options.model)) point.policy = options.sizes.experts.policy;
  if (has_experts(options.model) && point.packing == 0) point.packing = 1;
  const auto chosen = choices_.find({variant_of(variant).name, link.name});
  if (chosen != choices_.end()) point.tables_why = chosen->second.why();
  const auto stages = stages_.find({variant_of(variant).name, link.name});
  if (stages != stages_.end()) point.stages_why = stages->second.why;
  if (find_scheme(scheme.name).selects) point.density = scheme.density;
  point.link = link.name;
  point.compute = options_.computation.compute;
  point.transport = options_.computation.transport;
  point.ranks = options_.ranks;
  point.oversubscribed = oversubscribed_;
  point.occupies_cores = emulated_ && occupies_cores(outline_, options_.ranks);
  point.session = session_;
  point.side_by_side = side_by_side;
  folder_->add(std::move(point));
}

void Comparison::measure(const std::vector<std::string>& variants, const NamedLink& link) {
  const double began = now();
  if (options_.computation.simulated())
    simulate_all(variants, link);
  else
    take_turns(variants, link);
  progress_.clear();
  if (options_.json) return;
  const std::string name = link.name == kNoLink ? "no slow link (T_inf)" : link.name;
  std::printf("%s: %zu %s, %lld steps each, %s\n", name.c_str(), variants.size(),
              variants.size() == 1 ? "variant" : "variants", static_cast<long long>(turns_.steps()),
              seconds_text(now() - began).c_str());
  std::fflush(stdout);
}

// In virtual time nobody takes turns.
void Comparison::simulate_all(const std::vector<std::string>& variants, const NamedLink& link) {
  for (const std::string& variant : variants) {
    progress_.show(link.name + ": " + variant);
    const TrainOptions options = options_of(variant, link);
    if (!costs_.contains(variant)) costs_[variant] = measured_costs(options, options_.ranks, outline_);
    SimulationOptions simulation = simulation_of(options_.ranks, link.link, costs_[variant]);
    simulation.byte_scale = options_.computation.byte_scale;
    const EmulatedRun run = simulate(options, outline_, simulation);
    save(variant, link, recorded_of(run, outline_, mesh_of(options.sizes, options_.ranks), {}), true);
  }
}

RunVariant Comparison::work_at(const NamedLink& link) {
  if (!emulated_) {
    return [&](const std::string& variant, Lane& lane) {
      const Training training{.options = options_of(variant, link),
                              .ranks = options_.ranks,
                              .run = run_options(link.link, options_of(variant, link).sizes.experts),
                              .turns = &turns_,
                              .known = [&](std::int64_t parameters) { parameters_ = parameters; }};
      return models_.train(training, lane);
    };
  }
  return [&](const std::string& variant, Lane& lane) {
    EmulationOptions options = emulation_of(options_of(variant, link), options_.ranks, outline_);
    options.before_step = [&](std::int64_t step) { lane.before_step(step); };
    options.settles_after = [&](std::int64_t step) { return turns_.ends_behind(step); };
    const EmulatedRun run =
        emulate_ranks(options_.ranks, link.link, outline_, options, [&] { lane.close(); });
    return recorded_of(run, outline_, options.mesh, turns_.ends);
  };
}

MemoryNeed Comparison::need_of(const std::string& variant, const NamedLink& link) const {
  const TrainOptions options = options_of(variant, link);
  const ModelShape shape = emulated_ ? shape_of(outline_) : model_shape(options.model, options.sizes);
  const RankElements elements =
      emulated_ ? elements_of_ranks(outline_, emulation_of(options, options_.ranks, outline_), options_.ranks)
                : elements_of_ranks(options.model, options.sizes, options.tables, options_.ranks);
  // The model has as many words as the data.
  const double scale = static_cast<double>(parameters_) / static_cast<double>(shape.num_elements()) /
                       options_.computation.byte_scale;
  const auto scaled = [&](std::int64_t count) {
    return static_cast<std::int64_t>(scale * static_cast<double>(count));
  };
  return {.ranks = options_.ranks,
          .parameters = scaled(elements.dense),
          .held = scaled(elements.held),
          .copies = emulated_ ? kCopiesOfEmulation : kCopiesOfTraining};
}

void Comparison::take_turns(const std::vector<std::string>& variants, const NamedLink& link) {
  const double available = options_.free_bytes.value_or(available_memory());
  Listener listener;
  listener.all_fit = [&] {
    double together = 0;
    for (const std::string& variant : variants) {
      const MemoryNeed need = need_of(variant, link);
      check_memory(need, available);
      together += need.bytes();
    }
    return together <= available;
  };
  listener.turn = [&](const Round& round) {
    progress_.show(link.name + ": round " + std::to_string(round.number + 1) + " of " +
                   std::to_string(round.rounds) + ", " + round.variant);
  };
  listener.done = [&](const std::string& variant, const Recorded& recorded, bool side_by_side) {
    save(variant, link, recorded, side_by_side);
  };
  const RunVariant work = work_at(link);
  weft::take_turns(variants, options_.ranks, turns_, work, listener);
}

void Comparison::show() {
  RowSelection selection;
  selection.baseline = options_.baseline;
  for (const Variant& variant : options_.variants) selection.variants.push_back(variant.name);
  std::deque<std::vector<Point>> chosen;  // what rows point at
  std::vector<Row> rows;
  for (const NamedLink& link : options_.links) {
    selection.links.push_back(link.name);
    if (options_.bucket_mibs.empty()) continue;
    chosen.push_back(fastest_buckets(folder_->points(), selection.variants, options_.bucket_mibs, link.name));
    RowSelection here = selection;
    here.links = {link.name};
    const std::vector<Row> more = rows_of(chosen.back(), here);
    rows.insert(rows.end(), more.begin(), more.end());
  }
  if (options_.bucket_mibs.empty()) rows = rows_of(folder_->points(), selection);
  const std::filesystem::path page = write_page(
      {.folder = options_.folder, .model = model_, .settings = options_.selection + options_.settings}, rows);
  if (options_.json) {
    for (const Row& row : rows) std::printf("%s\n", to_json(row).dump().c_str());
    return;
  }
  for (const std::vector<Row>& link : by_link(rows)) {
    std::printf("\n%s\n%s", headline(model_, *link.front().point).c_str(),
                table_text(cells_of(link)).c_str());
  }
  std::printf("\n");
  for (const std::string& note : notes_on(rows)) std::printf("note: %s\n", note.c_str());
  std::printf("page: %s\n", page.string().c_str());
  for (const std::vector<Row>& link : by_link(rows)) std::printf("%s\n", sentence_on(link).c_str());
}

}  // namespace weft
