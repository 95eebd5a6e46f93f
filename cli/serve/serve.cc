// weft serve: a checkpoint of gpt or gpt-moe answers prompts, on several ranks.
//
// Rank 0 has the lines; it tells the others what to compute, and every few seconds that there is nothing, so that a
// rank which is gone is noticed and nobody's wait ends by a deadline.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "data/open.h"
#include "measure/memory.h"
#include "serve/lines.h"
#include "serve/requests.h"
#include "settings.h"
#include "torch_verbs.h"
#include "train/options.h"
#include "verbs.h"
#include "weft/error.h"
#include "weft_torch/serve/server.h"
#include "weft_torch/train/agree.h"
#include "weft_torch/train/trainer.h"

namespace weft::cli {

namespace {

namespace fs = std::filesystem;

constexpr int kIdle = 5000;  // milliseconds between two words of rank 0
constexpr const char* kEnd = "end";

struct ServeCommand {
  std::string checkpoint, socket, profile, save_profile;
  int ranks = 0, batch = 8, threads = 1;
  std::int64_t max_tokens = 32;
  PlacerOptions placer;
};

ServeCommand read(const std::vector<std::string>& arguments) {
  ServeCommand c;
  CLI::App app{"Answer prompts with a model that `weft train` has trained, a line of JSON each.\n",
               "weft serve"};
  app.add_option("--checkpoint", c.checkpoint, "DIR of the run, with its config.toml and checkpoints")
      ->required()
      ->group("Model");
  app.add_option("--ranks", c.ranks, "as threads of this process (default 4); under a launcher: its number")
      ->group("Serving");
  app.add_option("--socket", c.socket, "PATH of a unix socket; default: standard input and output")
      ->group("Serving");
  app.add_option("--batch", c.batch, "requests that are answered together, at most")->group("Serving");
  app.add_option("--max-tokens", c.max_tokens, "of an answer that names no other")->group("Serving");
  app.add_option("--threads", c.threads, "of torch, a rank")->group("Serving");
  app.add_option("--placement", c.placer.placement, "of experts: static, history, lina")->group("Experts");
  app.add_option("--most", c.placer.place.most, "experts of a rank; more where they do not fit")
      ->group("Experts");
  app.add_option("--check", c.placer.check, "of a plan: load, sets")->group("Experts");
  app.add_option("--profile", c.profile, "FILE of expert paths that estimates start with")->group("Experts");
  app.add_option("--save-profile", c.save_profile, "FILE for rank 0's paths, when it ends")->group("Experts");
  app.footer(
      "Examples:\n"
      "  echo '{\"prompt\": \"The \", \"max_tokens\": 16}' | weft serve --checkpoint runs/first\n"
      "  weft serve --checkpoint runs/first --ranks 2 --socket /tmp/weft.sock\n"
      "  weft launch -n 4 -- weft serve --checkpoint runs/first --socket /tmp/weft.sock");
  parse_flags(app, arguments);
  if (find_placement(c.placer.placement).balanced)
    throw UsageError("--placement " + c.placer.placement +
                     " is a limit of serve-bench: a gate decides by itself");
  if (c.placer.place.most < 1)
    throw UsageError("--most must be at least 1, not " + std::to_string(c.placer.place.most));
  if (c.batch < 1) throw UsageError("--batch must be at least 1, not " + std::to_string(c.batch));
  if (c.max_tokens < 1)
    throw UsageError("--max-tokens must be at least 1, not " + std::to_string(c.max_tokens));
  if (c.threads < 1) throw UsageError("--threads must be at least 1, not " + std::to_string(c.threads));
  return c;
}

// What is served, in this process.
struct Service {
  TrainOptions trained;
  std::shared_ptr<const ServedModel> model;
  std::unique_ptr<Vocabulary> words;  // null: the data has none
};

Service open_service(const std::string& checkpoint) {
  fs::path folder = fs::path(checkpoint).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();
  if (folder.filename() == "checkpoints") folder = folder.parent_path();
  std::error_code error;
  if (!fs::exists(folder / "config.toml", error))
    throw UsageError("--checkpoint '" + checkpoint + "': no run of `weft train` is there (no config.toml)");
  Service out;
  out.trained = read_train({"--resume", folder.string()}, Placement{}).options;
  const OpenedData data = open_data(data_options(out.trained));
  out.model = load_served_model((folder / "checkpoints").string(), out.trained.model,
                                model_sizes(out.trained, *data.source));
  if (!data.words.empty())
    out.words = std::make_unique<Vocabulary>(data.words, out.trained.data.vocabulary == "bytes");
  return out;
}

class RankZero {
 public:
  RankZero(const ServeCommand& command, const Service& service)
      : command_(command), service_(service), lines_(command.socket) {}

  // What all ranks do next.
  std::string next();
  void answer(const std::vector<std::vector<std::int64_t>>& tokens);
  std::int64_t answered() const { return answered_; }

 private:
  void take(const Lines::Line& line);

  const ServeCommand& command_;
  const Service& service_;
  Lines lines_;
  std::vector<ServeRequest> batch_;
  std::vector<int> clients_;  // of the batch
  std::chrono::steady_clock::time_point began_;
  std::int64_t answered_ = 0;
};

void RankZero::take(const Lines::Line& line) {
  ServeRequest request;
  try {
    if (line.too_long) throw UsageError("a line has at most " + std::to_string(Lines::kMostBytes) + " bytes");
    parse_request(line.text, service_.words.get(), command_.max_tokens, request);
    service_.model->check(request.ask);
  } catch (const UsageError& e) {
    lines_.answer(line.client, error_line(request.id, e.what()));
    return;
  }
  batch_.push_back(std::move(request));
  clients_.push_back(line.client);
}

std::string RankZero::next() {
  batch_.clear();
  clients_.clear();
  for (const Lines::Line& line : lines_.wait(static_cast<std::size_t>(command_.batch), kIdle)) take(line);
  if (batch_.empty() && lines_.ended()) return kEnd;
  began_ = std::chrono::steady_clock::now();
  std::vector<GenerateRequest> asks;
  for (const ServeRequest& request : batch_) asks.push_back(request.ask);
  return batch_text(asks);
}

void RankZero::answer(const std::vector<std::vector<std::int64_t>>& tokens) {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  for (std::size_t i = 0; i < batch_.size(); ++i)
    lines_.answer(clients_[i], answer_line(batch_[i], tokens[i], seconds, service_.words.get()));
  answered_ += static_cast<std::int64_t>(batch_.size());
}

void report(const Service& service, const RankZero& zero, const Server& server) {
  std::fprintf(stderr, "weft: %lld requests answered", static_cast<long long>(zero.answered()));
  if (service.model->has_experts() && server.checks() > 0)
    std::fprintf(stderr, "; of %lld plans of experts %lld were made again",
                 static_cast<long long>(server.checks()), static_cast<long long>(server.replans()));
  std::fprintf(stderr, "\n");
}

void serve_rank(World& world, const ServeCommand& command, const Service& service) {
  ServerOptions options{.placer = command.placer, .profile = nullptr};
  if (!command.profile.empty() && service.model->has_experts())
    options.profile = std::make_shared<Popularity>(Popularity::load(command.profile));
  Server server(world, service.model, options);
  try {
    std::unique_ptr<RankZero> zero;
    from_rank_0(world, [&] {
      zero = std::make_unique<RankZero>(command, service);
      std::fprintf(stderr, "weft: serving %s of step %lld (%lld parameters) on %d ranks, %s\n",
                   service.trained.model.c_str(), static_cast<long long>(service.model->step()),
                   static_cast<long long>(service.model->parameters()), world.size(),
                   command.socket.empty() ? "a line of JSON each" : command.socket.c_str());
      return std::string();
    });
    for (;;) {
      const std::string what = from_rank_0(world, [&] { return zero->next(); });
      if (what == kEnd) break;
      const std::vector<GenerateRequest> batch = parse_batch(what);
      if (batch.empty()) continue;
      const std::vector<std::vector<std::int64_t>> tokens = server.answer(batch);
      if (zero != nullptr) zero->answer(tokens);
    }
    if (zero != nullptr) report(service, *zero, server);
    if (zero != nullptr && !command.save_profile.empty() && server.profile() != nullptr)
      server.profile()->save(command.save_profile);
    world.barrier();  // nobody leaves while others still work
  } catch (...) {
    server.abandon(std::current_exception());
    throw;
  }
}

}  // namespace

int serve(const std::vector<std::string>& arguments) {
  block_signals();
  const ServeCommand command = read(arguments);
  const Placement place = detect_placement();
  set_torch_threads(command.threads);
  const Service service = open_service(command.checkpoint);
  if (place.launcher != Placement::Launcher::none) {
    if (command.ranks != 0 && command.ranks != place.size)
      throw UsageError("--ranks " + std::to_string(command.ranks) + ", but the launcher started " +
                       std::to_string(place.size) + ": leave it out");
    const std::unique_ptr<World> world = join_world(Config::from_environment());
    try {
      serve_rank(*world, command, service);
    } catch (...) {
      world->engine().abandon(std::current_exception());
      throw;
    }
    return kOk;
  }
  const int ranks = command.ranks == 0 ? 4 : command.ranks;
  if (ranks < 1 || ranks > kMostRanks)
    throw UsageError("ranks must be 1 to " + std::to_string(kMostRanks) + ", not " + std::to_string(ranks));
  run_ranks(ranks, [&](World& world) { serve_rank(world, command, service); });
  return kOk;
}

}  // namespace weft::cli
