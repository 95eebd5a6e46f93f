#include "train_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "settings.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

constexpr std::int64_t kMostRanks = 256;

// As typed; what is empty has a default that depends on something else.
struct Typed {
  std::string preset = "default", link, plan_link = "1gbit,50us", out, resume;
  bool resume_given = false, trace = false;
  std::int64_t ranks = 4;
  std::string text, megatron;
  std::optional<std::int64_t> vocabulary, context, width, samples;
  std::optional<int> layers, heads;
  std::optional<double> dropout;
  std::string optimizer = "adamw";
  std::optional<double> lr, momentum, weight_decay;
  std::int64_t checkpoint_every = 200, keep_last = 2;
  TrainOptions options;
};

std::string list_of(const std::vector<std::string_view>& names) {
  std::string list;
  for (const std::string_view name : names) list += (list.empty() ? "" : ", ") + std::string(name);
  return list;
}

void add_model(Settings& s, Typed& t) {
  s.group("Model");
  s.add("model", t.options.model, list_of(model_names()) + " (default gpt)");
  s.add("preset", t.preset, "its sizes: " + list_of(model_presets()));
  s.add("vocabulary", t.vocabulary, "words at most; the model gets as many as the data has");
  s.add("context", t.context, "tokens of the longest sequence");
  s.add("width", t.width, "of embeddings and layers");
  s.add("layers", t.layers, "number of layers");
  s.add("heads", t.heads, "gpt: heads of the attention");
  s.add("dropout", t.dropout, "0 to below 1");
  s.add("samples", t.samples, "lm: negative samples of the softmax; 0: the full softmax");
}

void add_data(Settings& s, Typed& t) {
  s.group("Data");
  s.add("data", t.options.data.kind, "auto (default: the installed text), text, megatron, synthetic");
  s.add("text", t.text, "file or folder to train on");
  s.add("megatron", t.megatron, "prefix of a .bin and .idx");
  s.add("tokens", t.options.data.vocabulary, "of a text: words (default), bytes");
  s.add("synthetic-tokens", t.options.data.synthetic_tokens, "how many");
  s.add("global-batch", t.options.global_batch, "sequences of a step, of all ranks together");
  s.add("length", t.options.length, "tokens of a sequence; 0: the context");
  s.add("accumulate", t.options.accumulate, "micro-batches of a step");
  s.add("seed", t.options.seed, "of weights, order of the data, dropout");
}

void add_scheme(Settings& s, Typed& t) {
  s.group("Gradients");
  s.add("scheme", t.options.scheme, list_of(scheme_names()) + " (default spardl)");
  s.add("density", t.options.density, "share of the gradient that sparse schemes send");
  s.add("warmup-steps", t.options.warmup_steps, "over which the density falls from 0.25; 0: none");
  s.add("codec", t.options.codec, "coo, packed (default), packed-bf16");
  s.add("residual", t.options.residual, "gres (default), pres, lres, drop");
  s.add("teams", t.options.teams, "spardl: a divisor of the ranks; 0: by the cost model");
  s.add("bucket-mib", t.options.bucket_mib, "of a bucket, in MiB");
}

void add_optimizer(Settings& s, Typed& t) {
  s.group("Optimizer");
  s.add("steps", t.options.steps, "of the whole run");
  s.add("optimizer", t.optimizer, "adamw (default), adam, sgd, adagrad");
  s.add("lr", t.lr, "learning rate (default: torch's)");
  s.add("momentum", t.momentum, "sgd");
  s.add("weight-decay", t.weight_decay, "(default: torch's)");
  s.add("lr-schedule", t.options.lr_schedule, "constant (default), cosine");
  s.add("lr-warmup", t.options.lr_warmup, "steps over which the learning rate rises");
  s.add("lr-final", t.options.lr_final, "cosine: share of it that is left at the end");
  s.add("clip-norm", t.options.clip_norm,
        "of the averaged gradient; 0: none. Updates then wait for all of it");
  s.add("skip-not-finite", t.options.skip_not_finite, "leave such steps out instead of ending the run");
}

void add_run(CLI::App& app, Settings& s, Typed& t) {
  s.group("Run");
  s.add("ranks", t.ranks, "as threads of this process; under a launcher: its number");
  s.add("link", t.link, "RATE[,LATENCY], e.g. 1gbit,50us: a slow network between threads");
  s.add("plan-link", t.plan_link, "RATE[,LATENCY] by which algorithms are chosen; bits depend on it");
  s.add("threads", t.options.threads, "of torch, a rank");
  s.add("checkpoint-every", t.checkpoint_every, "steps, and after the last one; 0: none");
  s.add("keep-last", t.keep_last, "checkpoints");
  s.add("trace", t.trace, "write trace.json (ui.perfetto.dev)");
  app.add_option("--out", t.out, "folder of the run (default runs/<model>-<scheme>-<UTC time>)")
      ->group("Run");
  app.add_option("--resume", t.resume,
                 "go on from the last checkpoint of that folder (default: of --out, or of the newest run); "
                 "auto: if there is one")
      ->expected(0, 1)
      ->group("Run");
}

// One command line; `settings` and `typed` belong to it.
struct Parser {
  CLI::App app{"Train a language model on several ranks.\n", "weft train"};
  Settings settings{app};
  Typed typed;

  Parser() {
    app.set_config("--config", "", "file with these settings (TOML); flags override it")->group("Run");
    app.allow_config_extras(CLI::config_extras_mode::error);
    add_model(settings, typed);
    add_data(settings, typed);
    add_scheme(settings, typed);
    add_optimizer(settings, typed);
    add_run(app, settings, typed);
    app.footer(
        "Examples:\n"
        "  weft train --ranks 4 --link 100mbit,50us --steps 100\n"
        "  weft train --preset tiny --scheme dense --ranks 2 --text book.txt --out runs/first\n"
        "  weft train --resume runs/first --steps 400\n"
        "  weft launch -n 4 --restarts 3 -- weft train --out runs/second --resume auto\n"
        "  mpirun -n 4 weft train --model lm");
  }
  void parse(const std::vector<std::string>& arguments) {
    std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
    try {
      app.parse(reversed);
    } catch (const CLI::CallForHelp&) {
      std::fputs(app.help().c_str(), stdout);
      throw;
    }
    typed.resume_given = app.count("--resume") > 0;
    // (CLI11 writes something of its own for a flag without its optional value.)
    const bool bare = typed.resume.empty() || typed.resume == "true" || typed.resume == "{}";
    if (bare) typed.resume = "-";
  }
};

void resolve_model(Typed& t) {
  ModelOptions sizes = model_options(t.options.model, t.preset);
  const auto take = [](auto& typed, auto& value) {
    if (typed) value = *typed;
    typed = value;  // what config.toml says
  };
  take(t.vocabulary, sizes.vocabulary);
  take(t.context, sizes.context);
  take(t.width, sizes.width);
  take(t.samples, sizes.samples);
  take(t.layers, sizes.layers);
  take(t.heads, sizes.heads);
  take(t.dropout, sizes.dropout);
  t.options.sizes = sizes;
  t.options.optimizer = default_options(t.optimizer);
  take(t.lr, t.options.optimizer.lr);
  take(t.momentum, t.options.optimizer.momentum);
  take(t.weight_decay, t.options.optimizer.weight_decay);
}

void resolve_data(Typed& t) {
  DataOptions& data = t.options.data;
  if (!t.text.empty() && !t.megatron.empty()) throw UsageError("--text and --megatron are two sets of data");
  const std::string kind = !t.text.empty() ? "text" : !t.megatron.empty() ? "megatron" : data.kind;
  if (data.kind != "auto" && data.kind != kind) {
    throw UsageError("--data " + data.kind + " and --" + kind + " are two sets of data");
  }
  data.kind = kind;
  data.path = !t.text.empty() ? t.text : t.megatron;
}

int resolve_ranks(const Typed& t, const Placement& place, bool on_command_line) {
  const bool launched = place.launcher != Placement::Launcher::none;
  const std::int64_t ranks = launched ? place.size : t.ranks;
  if (ranks < 1 || ranks > kMostRanks) {
    throw UsageError("ranks must be 1 to " + std::to_string(kMostRanks) + ", not " + std::to_string(ranks));
  }
  if (launched && on_command_line && t.ranks != place.size) {
    throw UsageError("--ranks " + std::to_string(t.ranks) + ", but the launcher (" +
                     std::string(name_of(place.launcher)) + ") started " + std::to_string(place.size) +
                     "; leave --ranks out");
  }
  return static_cast<int>(ranks);
}

bool names(const std::vector<std::string>& arguments, const std::string& flag) {
  return std::any_of(arguments.begin(), arguments.end(),
                     [&](const std::string& a) { return a == flag || a.starts_with(flag + "="); });
}

TrainCommand checked(Parser& parser, const std::vector<std::string>& arguments, const Placement& place) {
  Typed& t = parser.typed;
  TrainCommand command;
  command.ranks = resolve_ranks(t, place, names(arguments, "--ranks"));
  resolve_model(t);
  resolve_data(t);
  check_train(t.options, command.ranks);
  if (t.checkpoint_every < 0)
    throw UsageError("checkpoint-every must be 0 or more, not " + std::to_string(t.checkpoint_every));
  if (t.keep_last < 1 || t.keep_last > 1'000'000)
    throw UsageError("keep-last must be 1 or more, not " + std::to_string(t.keep_last));
  if (!t.link.empty()) {
    command.link = parse_link(t.link);
    if (place.launcher != Placement::Launcher::none) {
      if (names(arguments, "--link"))
        throw UsageError(
            "--link shapes ranks that are threads of one process; under a launcher see tools/netlab");
      command.link.reset();
    }
  }
  command.options = t.options;
  const LinkSpec plan = parse_link(t.plan_link);
  command.options.planned_link = {.hop_seconds = std::max(plan.latency_seconds, 1e-9),
                                  .seconds_per_byte = 1 / plan.bytes_per_second,
                                  .fold_seconds_per_byte = 0};
  command.run.checkpoint_every = t.checkpoint_every;
  command.run.keep_last = static_cast<int>(t.keep_last);
  command.place = find_place(t.out, t.resume_given, t.resume);
  command.run.resume = command.place.resume;
  command.trace = t.trace;
  t.ranks = command.ranks;
  command.config = parser.settings.toml();
  command.run.config = command.config;
  return command;
}

}  // namespace

TrainCommand read_train(const std::vector<std::string>& arguments, const Placement& place) {
  Parser parser;
  parser.parse(arguments);
  const Typed& t = parser.typed;
  if (t.resume_given && !names(arguments, "--config")) {
    const std::filesystem::path folder = find_place(t.out, true, t.resume).folder;
    std::error_code error;
    if (std::filesystem::exists(folder / "config.toml", error)) {
      std::vector<std::string> more = arguments;
      more.push_back("--config=" + (folder / "config.toml").string());
      Parser again;
      again.parse(more);
      return checked(again, arguments, place);
    }
  }
  return checked(parser, arguments, place);
}

}  // namespace weft::cli
