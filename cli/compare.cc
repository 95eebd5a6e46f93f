// weft compare: the same training under several schemes. Every link, and none at all (T_inf), is one group of
// worlds that take turns (compare_turns.h); what the folder has already is not measured again.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <deque>
#include <map>
#include <thread>

#include "compare_folder.h"
#include "compare_options.h"
#include "compare_page.h"
#include "compare_point.h"
#include "compare_run.h"
#include "compare_table.h"
#include "data/open.h"
#include "emulated.h"
#include "memory.h"
#include "text.h"
#include "torch_verbs.h"
#include "verbs.h"
#include "weft_torch/train/trainer.h"
#include "world/placement.h"

namespace weft::cli {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string new_session() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(since).count()) + "-" +
         std::to_string(getpid());
}

class Comparison {
 public:
  explicit Comparison(const CompareCommand& command)
      : command_(command),
        emulated_(command.computation.emulated()),
        turns_(plan_turns(kWarmUpSteps, command.measured_steps, emulated_)),
        progress_(true),
        session_(new_session()) {
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    oversubscribed_ = !emulated_ && cores > 0 && command.ranks * command.options.threads > cores;
    prepare();
    folder_ = std::make_unique<CompareFolder>(command);
  }

  void measure() {
    std::vector<NamedLink> links{{.name = kNoLink, .spec = std::nullopt}};
    for (const NamedLink& link : command_.links) {
      if (link.spec) links.push_back(link);
    }
    if (emulated_) {
      outline_ = outline_for(command_.folder, command_.computation.outline, command_.options, command_.ranks);
      command_.options.model = outline_.model;
    }
    for (const NamedLink& link : links) {
      std::vector<std::string> missing;
      for (const std::string& scheme : wanted()) {
        if (!folder_->has(scheme, link.name)) missing.push_back(scheme);
      }
      if (!missing.empty()) measure(missing, link);
    }
  }

  void show() {
    std::vector<std::string> links;
    links.reserve(command_.links.size());
    for (const NamedLink& link : command_.links) links.push_back(link.name);
    std::deque<std::vector<Point>> chosen;  // what rows point at
    std::vector<Row> rows;
    if (command_.bucket_mibs.empty()) rows = rows_of(folder_->points(), command_.schemes, links);
    for (const std::string& link : links) {
      if (command_.bucket_mibs.empty()) break;
      chosen.push_back(fastest_variants(folder_->points(), command_.schemes, link));
      const std::vector<Row> more = rows_of(chosen.back(), command_.schemes, {link});
      rows.insert(rows.end(), more.begin(), more.end());
    }
    const std::filesystem::path page = write_page(command_, rows);
    if (command_.json) {
      for (const Row& row : rows) std::printf("%s\n", to_json(row).dump().c_str());
      return;
    }
    for (const std::vector<Row>& link : by_link(rows)) {
      std::printf("\n%s\n%s", headline(command_, *link.front().point).c_str(),
                  table_text(cells_of(link)).c_str());
    }
    std::printf("\n");
    for (const std::string& note : notes_on(rows)) std::printf("note: %s\n", note.c_str());
    std::printf("page: %s\n", page.string().c_str());
    for (const std::vector<Row>& link : by_link(rows))
      std::printf("%s\n", sentence_on(command_, link).c_str());
  }

 private:
  std::vector<std::string> wanted() const {
    if (command_.bucket_mibs.empty()) return command_.schemes;
    std::vector<std::string> names;
    for (const std::string& scheme : command_.schemes) {
      for (const double size : command_.bucket_mibs)
        names.push_back(name_of({.scheme = scheme, .bucket_mib = size}));
    }
    return names;
  }

  // Before the folder is made: what cannot be read leaves nothing behind.
  void prepare() {
    if (emulated_) return;
    OpenedData opened = open_data(data_options(command_.options));
    if (!opened.note.empty()) std::fprintf(stderr, "weft: note: %s\n", opened.note.c_str());
    source_ = std::move(opened.source);
  }

  void save(const std::string& scheme, const NamedLink& link, const Recorded& recorded) {
    Point point = point_of(recorded, turns_.measured);
    point.scheme = scheme;
    point.link = link.name;
    point.compute = command_.computation.compute;
    point.transport = command_.computation.transport;
    point.ranks = command_.ranks;
    point.oversubscribed = oversubscribed_;
    point.occupies_cores = emulated_ && occupies_cores(outline_, command_.ranks);
    point.session = session_;
    folder_->add(std::move(point));
  }

  void measure(const std::vector<std::string>& schemes, const NamedLink& link) {
    const double began = now();
    if (command_.computation.simulated()) {
      for (const std::string& scheme : schemes) {
        progress_.show(link.name + ": " + scheme);
        const TrainOptions options = options_of(command_, scheme, turns_);
        if (!costs_.contains(scheme)) costs_[scheme] = measured_costs(options, command_.ranks, outline_);
        save(scheme, link, simulate_scheme(options, command_.ranks, link, outline_, costs_[scheme]));
      }
    } else {
      take_turns(link, schemes);
    }
    progress_.clear();
    if (command_.json) return;
    const std::string name = link.name == kNoLink ? "no slow link (T_inf)" : link.name;
    std::printf("%s: %zu %s, %lld steps each, %s\n", name.c_str(), schemes.size(),
                schemes.size() == 1 ? "scheme" : "schemes", static_cast<long long>(turns_.steps()),
                seconds_text(now() - began).c_str());
    std::fflush(stdout);
  }

  void take_turns(const NamedLink& link, const std::vector<std::string>& schemes) {
    const double available = available_memory();
    std::int64_t parameters = outline_.parameters;
    const Work work = emulated_ ? emulate_work(command_, link, turns_, outline_)
                                : train_work(command_, link, turns_, source_, parameters);
    const double copies = emulated_ ? kCopiesOfEmulation : kCopiesOfTraining;
    const auto check = [&] { check_memory(schemes.size(), command_.ranks, parameters, copies, available); };
    if (emulated_) check();  // (a model tells its size when it is made)
    Listener listener;
    listener.first_opened = check;
    listener.turn = [&](const Round& round) {
      progress_.show(link.name + ": round " + std::to_string(round.number + 1) + " of " +
                     std::to_string(round.rounds) + ", " + round.scheme);
    };
    listener.done = [&](const std::string& scheme, const Recorded& recorded) {
      save(scheme, link, recorded);
    };
    cli::take_turns(schemes, command_.ranks, turns_, work, listener);
  }

  CompareCommand command_;
  const bool emulated_;
  const Turns turns_;
  Progress progress_;
  const std::string session_;
  bool oversubscribed_ = false;
  std::shared_ptr<const DataSource> source_;
  Outline outline_;
  std::map<std::string, SimulatedCosts> costs_;  // of a scheme, in virtual time
  std::unique_ptr<CompareFolder> folder_;
};

}  // namespace

int compare(const std::vector<std::string>& arguments) {
  const CompareCommand command = read_compare(arguments, detect_placement());
  set_torch_threads(command.options.threads);
  if (command.computation.emulated())
    check_named_outline(command.computation.outline, arguments, command.options.model, command.ranks);
  Comparison comparison(command);
  comparison.measure();
  comparison.show();
  return kOk;
}

}  // namespace weft::cli
