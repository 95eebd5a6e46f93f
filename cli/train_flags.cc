#include "train_flags.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

#include "base/names.h"
#include "base/units.h"
#include "collectives/registry.h"
#include "config_text.h"
#include "data_parallel/schemes.h"
#include "experts/packing.h"
#include "experts/policies.h"
#include "stage_flags.h"
#include "transports/link_model.h"
#include "transports/link_spec.h"
#include "weft/error.h"
#include "world/calibrate.h"
#include "world/mesh.h"

namespace weft::cli {

std::string list_of(const std::vector<std::string_view>& names) {
  std::string list;
  for (const std::string_view name : names) list += (list.empty() ? "" : ", ") + std::string(name);
  return list;
}

namespace {

std::uint64_t parse_seed(const std::string& text) {
  std::uint64_t seed = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, seed);
  if (text.empty() || error != std::errc() || rest != end)
    throw UsageError("--seed must be a whole number from 0 to 2^64 - 1, not '" + text + "'");
  return seed;
}

}  // namespace

void add_model_flags(Settings& s, TrainFlags& t) {
  s.group("Model");
  s.add("model", t.options.model, list_of(model_names()) + " (default gpt)");
  s.add("preset", t.preset,
        "its sizes: " + list_of(model_presets()) + " (for plans and simulations; not gpt)");
  s.add("vocabulary", t.vocabulary, "words at most; the model gets as many as the data has");
  s.add("context", t.context, "tokens of the longest sequence");
  s.add("width", t.width, "of embeddings and layers");
  s.add("hidden", t.hidden, "lm: width of the LSTMs; 0: as wide as the tables");
  s.add("projection", t.projection, "lm: columns that an LSTM's output is projected to; 0: none");
  s.add("layers", t.layers, "number of layers");
  s.add("heads", t.heads, "of the attention (not lm, gnmt)");
  s.add("dropout", t.dropout, "0 to below 1");
  s.add("untied", t.untied, "gpt, gpt-moe: the head has a matrix of its own, not the embedding's table");
  s.add("samples", t.samples, "lm: negative samples of the softmax; 0: the full softmax");
  add_expert_flags(s, t);
}

void add_mesh_flag(Settings& s, TrainFlags& t) {
  s.add("mesh", t.mesh,
        "axes of the ranks, e.g. dp=4 (default: all along dp), with experts dp=8,ep=4, with stages "
        "dp=2,pp=4, with "
        "matrices that ranks cut dp=2,pp=2,tp=2");
}

namespace {

int parse_slices(const std::string& text) {
  if (text == kAuto) return kAutoSlices;
  int slices = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, slices);
  if (error != std::errc{} || rest != end || slices == kAutoSlices)
    throw UsageError("expert-slices must be a whole number of 1 or more, or auto, not '" + text + "'");
  return slices;
}

}  // namespace

void add_expert_flags(Settings& s, TrainFlags& t) {
  s.group("Experts (gpt-moe, bert2gpt2-moe)");
  s.add("experts", t.experts, "of a layer; --mesh dp=8,ep=4 deals them to 4 ranks each");
  s.add("expert-choices", t.expert_choices, "experts of a token: 1 or 2");
  s.add("expert-capacity", t.expert_capacity,
        "places of an expert over an even share of the copies; 0: no token is dropped");
  s.add("experts-every", t.experts_every, "so many layers one has experts in place of its mlp");
  s.add("shared-experts", t.shared_experts, "that every token goes through beside its choices");
  s.add("balance-loss", t.balance_loss, "weight of the loss of uneven choices");
  s.add("z-loss", t.z_loss, "weight of the loss of a gate's large numbers");
  s.add("gate-jitter", t.gate_jitter, "what the gate sees is multiplied by 1 - jitter .. 1 + jitter");
  s.add(
      "expert-slices", [&t](const std::string& text) { t.expert_slices = parse_slices(text); },
      [&t]() -> std::string {
        if (!t.expert_slices) return "";
        return *t.expert_slices == kAutoSlices ? toml_string(kAuto) : std::to_string(*t.expert_slices);
      },
      "in which rows travel while others are computed (policies lina, tutel); auto: by what the plan "
      "predicts");
  s.add("expert-policy", t.expert_policy,
        "how all-to-alls and gradients share the network: " + list_of(expert_policy_names()) +
            " (default lina)");
  std::vector<std::string_view> exchanges{kAuto};
  for (const Algorithm& row : algorithms(Family::all_to_all)) {
    if (row.uneven_bytes != nullptr) exchanges.push_back(row.name);
  }
  s.add("expert-all-to-all", t.expert_all_to_all, "algorithm of their all-to-alls: " + list_of(exchanges));
  s.add("expert-packing", t.expert_packing,
        "a rank holds so many times the experts of its place in the mesh, so that ep is as many times less; "
        "auto: "
        "chosen while the job runs (default 1)");
  s.add("packing-memory", t.packing_memory,
        "of a rank, for experts with gradients and moments, e.g. 512MiB: packing takes no more");
}

void add_data_flags(Settings& s, TrainFlags& t) {
  s.group("Data");
  s.add("data", t.options.data.kind, "auto (default: the installed text), text, megatron, synthetic");
  s.add("text", t.text, "file or folder to train on");
  s.add("megatron", t.megatron, "prefix of a .bin and .idx");
  s.add("tokens", t.options.data.vocabulary, "of a text: words (default), bytes");
  s.add("synthetic-tokens", t.options.data.synthetic_tokens, "how many");
  s.add("global-batch", t.options.global_batch, "sequences of a step, of all ranks together");
  s.add("length", t.options.length, "tokens of a sequence; 0: the context");
  s.add("accumulate", t.options.accumulate, "micro-batches of a step");
  // By its text: CLI11 takes what is below zero, or too large, for another number.
  s.add(
       "seed", [&t](const std::string& text) { t.options.seed = parse_seed(text); },
       [&t] { return std::to_string(t.options.seed); }, "of weights, order of the data, dropout")
      ->type_name("NUMBER")
      ->default_str(std::to_string(t.options.seed));
}

void add_gradient_flags(Settings& s, TrainFlags& t) {
  s.group("Gradients");
  s.add("warmup-steps", t.options.warmup_steps, "over which the density falls from 0.25; 0: none");
  for (const SchemeKnob& knob : scheme_knobs()) {
    SchemeOptions& scheme = t.options.scheme;
    const auto text = [&knob, &scheme] {
      return knob.is_text ? toml_string(knob.text(scheme)) : knob.text(scheme);
    };
    CLI::Option* const option = s.add(
        std::string(knob.name), [&knob, &scheme](const std::string& value) { knob.set(scheme, value); }, text,
        std::string(knob.help));
    if (!knob.is_text) option->type_name("NUMBER")->default_str(knob.text(scheme));
  }
  s.add("find-unused", t.options.find_unused, "leave parameters alone that no rank used in a step");
}

void add_table_flags(Settings& s, TrainFlags& t) {
  s.group("Tables");
  TablesOptions& tables = t.options.tables;
  s.add("tables", tables.way,
        "how embedding tables are exchanged: " + list_of(table_way_names()) +
            "; by table: WAY/TABLE=WAY/...; auto: each by cost");
  add_table_scheduling(s, t);
}

void add_table_scheduling(Settings& s, TrainFlags& t) {
  TablesOptions& tables = t.options.tables;
  s.add("tables-scheduling", tables.scheduling,
        list_of(table_scheduling_names()) + " (default: what the way has)");
  s.add("tables-split-below", tables.split_below, "share of prior rows above which rows are not split");
}

void add_optimizer_flags(Settings& s, TrainFlags& t) {
  s.group("Optimizer");
  s.add("optimizer", t.optimizer, "adamw (default), adam, sgd, adagrad");
  s.add("optimizer-from", t.options.optimizer_from, "weft (default), torch: whose code it is");
  s.add("lr", t.lr, "learning rate (default: torch's)");
  s.add("momentum", t.momentum, "sgd");
  s.add("nesterov", t.nesterov, "sgd: Nesterov's momentum");
  s.add("beta1", t.beta1, "adam, adamw: of the mean of gradients (default: torch's, 0.9)");
  s.add("beta2", t.beta2, "adam, adamw: of the mean of their squares (default: torch's, 0.999)");
  s.add("weight-decay", t.weight_decay, "(default: torch's)");
  s.add("lr-schedule", t.options.lr_schedule, "constant (default), cosine");
  s.add("lr-warmup", t.options.lr_warmup, "steps over which the learning rate rises");
  s.add("lr-final", t.options.lr_final, "cosine: share of it that is left at the end");
  s.add("clip-norm", t.options.clip_norm,
        "of the averaged gradient; 0: none. Updates then wait for all of it");
  s.add("clip-local", t.options.clip_local,
        "clip each rank's gradient before the sum instead, its share to clip-norm / sqrt(ranks)");
  s.add("skip-not-finite", t.options.skip_not_finite, "leave such steps out instead of ending the run");
}

void add_computation_flags(Settings& s, Computation& c) {
  s.add("compute", c.compute, "real (default); emulated: timers by an outline in place of a model");
  s.add("outline", c.outline, "emulated: file of `weft outline`; measured first where none is given");
  s.add("transport", c.transport, "threads (default); sim: emulated computation in virtual time");
  s.add("byte-scale", c.byte_scale, "sim: every element stands for so many, for jobs larger than memory");
}

void add_node_flags(Settings& s, NetworkFlags& n) {
  s.add("nodes", n.nodes, "the ranks share so many nodes, and a node's ranks its port; 0: each is one");
  s.add("scale-up", n.scale_up, "RATE inside a node, or 10x: ten times --link's");
}

void check_computation(const Computation& c, const TrainOptions& options) {
  constexpr std::array<std::string_view, 2> kCompute{"real", "emulated"}, kTransport{"threads", "sim"};
  const auto require = [](std::string_view kind, const auto& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end())
      throw UsageError(unknown_name(kind, name, names));
  };
  require("computation", kCompute, c.compute);
  require("transport", kTransport, c.transport);
  if (c.byte_scale < 1 || (c.byte_scale > 1 && !c.simulated()))
    throw UsageError("--byte-scale is at least 1, and of --transport sim");
  if (c.simulated() && !c.emulated())
    throw UsageError("--transport sim has virtual time, and no model computes in it: --compute emulated");
  if (!c.emulated() && !c.outline.empty())
    throw UsageError("--outline is what emulated computation goes by: --compute emulated");
  if (c.emulated() && options.warmup_steps > 0)
    throw UsageError("--warmup-steps changes the density from step to step, emulated computation has one");
  if (c.emulated() && options.recompute)
    throw UsageError("--recompute: where computation is emulated nothing is computed again");
}

void resolve_model(TrainFlags& t) {
  ModelOptions sizes = model_options(t.options.model, t.preset);
  const auto take = [](auto& typed, auto& value) {
    if (typed) value = *typed;
    typed = value;  // what config.toml says
  };
  take(t.vocabulary, sizes.vocabulary);
  take(t.context, sizes.context);
  take(t.width, sizes.width);
  take(t.hidden, sizes.hidden);
  take(t.projection, sizes.projection);
  take(t.samples, sizes.samples);
  take(t.layers, sizes.layers);
  take(t.heads, sizes.heads);
  take(t.dropout, sizes.dropout);
  sizes.untied = t.untied;
  take(t.experts, sizes.experts.count);
  take(t.expert_choices, sizes.experts.choices);
  take(t.expert_capacity, sizes.experts.capacity_factor);
  take(t.experts_every, sizes.experts.every);
  take(t.shared_experts, sizes.experts.shared);
  take(t.balance_loss, sizes.experts.balance_loss);
  take(t.z_loss, sizes.experts.z_loss);
  take(t.gate_jitter, sizes.experts.jitter);
  sizes.experts.policy = t.expert_policy;
  sizes.experts.all_to_all = t.expert_all_to_all;
  if (!find_expert_policy(t.expert_policy).slices && !t.expert_slices) sizes.experts.slices = 1;
  take(t.expert_slices, sizes.experts.slices);
  sizes.experts.packing = t.expert_packing;
  if (!t.packing_memory.empty())
    sizes.experts.packing_memory = static_cast<std::int64_t>(parse_bytes(t.packing_memory));
  t.options.sizes = sizes;
  t.options.optimizer = default_options(t.optimizer);
  take(t.lr, t.options.optimizer.lr);
  take(t.momentum, t.options.optimizer.momentum);
  t.options.optimizer.nesterov = t.nesterov;
  take(t.beta1, t.options.optimizer.beta1);
  take(t.beta2, t.options.optimizer.beta2);
  take(t.weight_decay, t.options.optimizer.weight_decay);
}

void resolve_data(TrainFlags& t) {
  DataOptions& data = t.options.data;
  if (!t.text.empty() && !t.megatron.empty()) throw UsageError("--text and --megatron are two sets of data");
  const std::string kind = !t.text.empty() ? "text" : !t.megatron.empty() ? "megatron" : data.kind;
  if (data.kind != "auto" && data.kind != kind) {
    throw UsageError("--data " + data.kind + " and --" + kind + " are two sets of data");
  }
  data.kind = kind;
  data.path = !t.text.empty() ? t.text : t.megatron;
}

LinkCost planned_by(const std::string& link, const NetworkFlags& network, int ranks) {
  const LinkSpec plan = parse_link(link);
  LinkCost out{.hop_seconds = std::max(plan.latency_seconds, 1e-9),
               .seconds_per_byte = 1 / plan.bytes_per_second,
               .fold_seconds_per_byte = 0};
  const double inside =
      network.scale_up.empty() ? LinkOptions::kUnlimited : parse_scale_up(network.scale_up, plan);
  set_nodes(out, ranks, static_cast<int>(network.nodes), 0, inside);
  return out;
}

void resolve_plan(TrainFlags& t, const std::string& link, const NetworkFlags& network, int ranks) {
  if (t.plan_link.empty()) t.plan_link = link.empty() ? "1gbit,50us" : link;
  t.options.planned_link = planned_by(t.plan_link, network, ranks);
}

int resolve_ranks(const TrainFlags& t, const Placement& place, bool named, int most) {
  const bool launched = place.launcher != Placement::Launcher::none;
  const std::int64_t ranks = launched ? place.size : t.ranks;
  if (ranks < 1 || ranks > most) {
    throw UsageError("ranks must be 1 to " + std::to_string(most) + ", not " + std::to_string(ranks));
  }
  if (launched && named && t.ranks != place.size) {
    throw UsageError("--ranks " + std::to_string(t.ranks) + ", but the launcher (" +
                     std::string(name_of(place.launcher)) + ") started " + std::to_string(place.size) +
                     "; leave --ranks out");
  }
  return static_cast<int>(ranks);
}

std::optional<EmulatedLink> resolve_network(const std::string& link, const NetworkFlags& network, int ranks) {
  if (link.empty()) {
    if (network.nodes != 0 || !network.scale_up.empty())
      throw UsageError("--nodes and --scale-up are of a slow network between the ranks: --link");
    return std::nullopt;
  }
  if (network.nodes < 0 || network.nodes > ranks) {
    throw UsageError("nodes must be 0 (each rank is one) to the " + std::to_string(ranks) + " ranks, not " +
                     std::to_string(network.nodes));
  }
  if (!network.scale_up.empty() && network.nodes == 0)
    throw UsageError("--scale-up is the network inside --nodes, beside --link");
  const LinkSpec spec = parse_link(link);
  return EmulatedLink{
      .bytes_per_second = spec.bytes_per_second,
      .latency_seconds = spec.latency_seconds,
      .nodes = static_cast<int>(network.nodes),
      .scale_up_bytes_per_second = network.scale_up.empty() ? 0 : parse_scale_up(network.scale_up, spec)};
}

bool take_auto(SchemeOptions& scheme) {
  if (scheme.name != kAuto) return false;
  scheme.name = SchemeOptions{}.name;
  return true;
}

bool take_auto(TablesOptions& tables) {
  if (tables.way != kAuto) return false;
  tables.way = "embrace";  // it has everything that can be said of tables
  check_tables(tables);
  tables.way = TablesOptions{}.way;
  return true;
}

bool take_auto(ExpertOptions& experts) {
  if (experts.slices != kAutoSlices) return false;
  experts.slices = 1;
  return true;
}

bool take_auto(BackwardOptions& backward) {
  if (backward.messages != kCritical) return false;
  backward.messages = BackwardOptions{}.messages;
  if (!backward.compresses())
    throw UsageError(
        "backward-messages critical: nothing goes back as factors or whole numbers (--backward-rank, "
        "--backward-bits)");
  return true;
}

void check_undecided(const TrainOptions& options, bool auto_tables, int ranks) {
  TrainOptions known = options;
  if (auto_tables) known.tables = {};
  check_train(known, ranks);
}

double parse_flops(const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  std::string unit(rest, end);
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const std::string ending : {"flop/s", "flops", "flop"}) {
    if (!unit.ends_with(ending)) continue;
    unit.resize(unit.size() - ending.size());
    break;
  }
  constexpr std::string_view kPrefixes = "kmgtpe";
  const std::size_t power = unit.empty() ? 0 : kPrefixes.find(unit[0]) + 1;
  const bool known = error == std::errc() && unit.size() <= 1 && (unit.empty() || power != 0);
  const double rate = value * std::pow(1000.0, static_cast<double>(power));
  if (!known || !(rate > 0) || !std::isfinite(rate))
    throw UsageError("--flops '" + text + "' is no rate: say 10tflops, 500gflops or 5e12");
  return rate;
}

void resolve_mesh(TrainFlags& t, int ranks) {
  const std::string& text = t.mesh;
  TrainOptions& options = t.options;
  const Mesh mesh = parse_mesh(text, ranks);
  const bool with_experts = has_experts(options.model);
  options.sizes.tensor.ranks = mesh.tp;
  options.sizes.tensor.bf16 = is_bf16("tensor-wire", t.tensor_wire);
  if (options.sizes.tensor.bf16 && mesh.tp == 1)
    throw UsageError("--tensor-wire is of tensor-parallel ranks: --mesh tp=2");
  resolve_stages(t, mesh.pp);
  if (mesh.ep > 1 && !with_experts)
    throw UsageError("--mesh " + text + ": " + options.model +
                     " has no experts that ranks could share; gpt-moe has");
  const std::string& packing = options.sizes.experts.packing;
  if (!with_experts && packing != ExpertOptions{}.packing)
    throw UsageError("--expert-packing " + packing + ": " + options.model + " has no experts; gpt-moe has");
  options.sizes.experts.ranks =
      is_auto_packing(packing) ? mesh.ep : mesh.ep / fixed_packing(packing, mesh.ep);
}

bool names_flag(const std::vector<std::string>& arguments, const std::string& flag) {
  return std::any_of(arguments.begin(), arguments.end(),
                     [&](const std::string& a) { return a == flag || a.starts_with(flag + "="); });
}

}  // namespace weft::cli
