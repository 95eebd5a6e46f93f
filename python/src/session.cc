#include "session.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <tuple>
#include <utility>

#include "agreed.h"
#include "wait.h"
#include "weft/error.h"
#include "world/open.h"
#include "world/placement.h"

namespace weft::python {

namespace py = pybind11;

namespace {

DType dtype_named(const std::string& name) {
  for (const DType type : {DType::bytes, DType::float32, DType::float64, DType::bfloat16, DType::float16,
                           DType::int32, DType::int64}) {
    if (name_of(type) == name) return type;
  }
  throw UsageError("'" + name + "' is no element type of weft");
}

Reduction reduction_named(const std::string& name) {
  for (const Reduction op : {Reduction::sum, Reduction::min, Reduction::max}) {
    if (name_of(op) == name) return op;
  }
  throw UsageError("'" + name + "' is no reduction: there are sum, min and max");
}

// A token of this process's environment goes before the one that was given: it is the more secret one.
void settle(JoinOptions& options, const Place& given) {
  std::string token;
  std::tie(options.rank, options.size, options.config.address, options.config.port, token) = given;
  if (!options.config.token.set()) options.config.token = Secret(token);
}

std::ofstream open_trace(const std::filesystem::path& folder, int rank) {
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  const std::filesystem::path path = folder / ("trace.rank" + std::to_string(rank) + ".json");
  std::ofstream out(path);
  if (!out) throw UsageError("the trace '" + path.string() + "' cannot be written");
  return out;
}

}  // namespace

Dense dense_of(const Memory& memory) {
  const auto& [address, count, type] = memory;
  if (count < 0) throw UsageError("a vector of " + std::to_string(count) + " elements");
  return {reinterpret_cast<std::byte*>(address), count, dtype_named(type)};
}

std::shared_ptr<Session> Session::join(const std::string& trace, const std::optional<Place>& given) {
  // By the environment alone, so before anything is opened: a wrong one is an error of this call.
  JoinOptions options{.config = Config::from_environment(), .decorate = {}};
  if (given) settle(options, *given);
  const Placement place = placement_of(options);
  std::shared_ptr<Session> session(new Session);
  session->process_ = getpid();
  if (!trace.empty()) {
    session->trace_file_ = open_trace(trace, place.rank);
    session->trace_ = std::make_shared<Trace>();
    options.trace = session->trace_.get();
  }
  if (chosen_transport(options.config, place) == "mpi") {
    const py::gil_scoped_release released;  // the thread that finalises MPI must be the one that began it
    session->world_ = join_world(options);
    return session;
  }
  struct Joined {  // an interrupted call leaves its thread behind, and this with it
    std::shared_ptr<Trace> trace;
    std::unique_ptr<World> world;
  };
  const auto joined = std::make_shared<Joined>(session->trace_, nullptr);
  run_interruptibly([joined, options] { joined->world = join_world(options); });
  session->world_ = std::move(joined->world);
  return session;
}

Session::~Session() {
  if (getpid() != process_) {
    static_cast<void>(world_.release());
    static_cast<void>(new std::vector<Kept>(std::move(kept_)));
    return;
  }
  if (is_open()) close_now();
}

World& Session::world() {
  if (world_ == nullptr) throw UsageError("weft is shut down in this process: call weft.init() first");
  return *world_;
}

std::shared_ptr<Work> Session::submit(const char* name, TrafficClass traffic, py::object keep,
                                      Engine::Make make, bool holds) {
  let_go();
  World& mine = world();
  const SubmitOptions options{.name = name, .traffic = traffic, .holds = holds};
  Ticket ticket = mine.engine().submit(mine.comm(), options, std::move(make));
  return std::make_shared<Work>(shared_from_this(), std::move(ticket), std::move(keep));
}

std::shared_ptr<Work> Session::all_reduce(const Memory& data, const std::string& op, py::object keep) {
  const AllReduceOptions options{.reduction = reduction_named(op)};
  return submit(
      "all_reduce", TrafficClass::gradient, std::move(keep),
      [dense = dense_of(data), options](Comm comm) { return weft::all_reduce(comm, dense, options); });
}

std::shared_ptr<Work> Session::reduce_scatter(const Memory& data, const std::string& op, py::object keep) {
  const ReduceScatterOptions options{.reduction = reduction_named(op)};
  return submit(
      "reduce_scatter", TrafficClass::gradient, std::move(keep),
      [dense = dense_of(data), options](Comm comm) { return weft::reduce_scatter(comm, dense, options); });
}

std::shared_ptr<Work> Session::all_gather(const Memory& data, py::object keep) {
  return submit("all_gather", TrafficClass::gradient, std::move(keep),
                [dense = dense_of(data)](Comm comm) { return weft::all_gather(comm, dense); });
}

std::shared_ptr<Work> Session::broadcast(const Memory& data, int root, py::object keep) {
  const BroadcastOptions options{.root = root};
  return submit(
      "broadcast", TrafficClass::gradient, std::move(keep),
      [dense = dense_of(data), options](Comm comm) { return weft::broadcast(comm, dense, options); });
}

std::shared_ptr<Work> Session::all_to_all(const Memory& send, std::vector<std::int64_t> send_counts,
                                          const Memory& recv, std::vector<std::int64_t> recv_counts,
                                          py::object keep) {
  struct Counts {
    std::vector<std::int64_t> send, recv;
  };
  const auto counts = std::make_shared<Counts>(Counts{std::move(send_counts), std::move(recv_counts)});
  return submit(
      "all_to_all", TrafficClass::blocking, std::move(keep),
      [counts, from = dense_of(send), to = dense_of(recv)](Comm comm) {
        const Parts out{from, counts->send};
        const Parts in{to, counts->recv};
        return weft::all_to_all_v(comm, out, in);
      },
      true);
}

std::shared_ptr<Work> Session::barrier() {
  return submit("barrier", TrafficClass::blocking, py::none(), [](Comm comm) { return weft::barrier(comm); });
}

void Session::agree(const std::vector<std::tuple<std::string, std::string>>& lines, const std::string& fix) {
  World& mine = world();
  const std::uint32_t slot = take_slots(1);
  if (mine.size() == 1) return;
  std::vector<AgreedLine> agreed;
  for (const auto& [what, value] : lines) agreed.push_back({what, value});
  Agreement agreement;
  agreement.start(mine.engine(), mine.comm(), {.name = "what ranks have alike", .slot = slot}, agreed, fix);
  python::wait(mine.engine(), agreement.ticket());
  if (agreement.ticket().error()) std::rethrow_exception(agreement.ticket().error());
  agreement.check();
}

std::uint32_t Session::take_slots(std::uint32_t count) {
  return std::exchange(next_slot_, next_slot_ + count);
}

void Session::keep_until_done(Kept kept) {
  if (is_open()) kept_.push_back(std::move(kept));
}

void Session::let_go() {
  const auto ended = [](const Kept& kept) { return std::ranges::all_of(kept.tickets, &Ticket::done); };
  // Out of the list first: the last reference to an object may run Python that comes back here.
  const auto rest = std::stable_partition(kept_.begin(), kept_.end(), std::not_fn(ended));
  const std::vector<Kept> old(std::make_move_iterator(rest), std::make_move_iterator(kept_.end()));
  kept_.erase(rest, kept_.end());
}

void Session::abandon(const std::string& text) {
  if (is_open()) world_->engine().abandon(std::make_exception_ptr(Error(text)));
}

void Session::close() {
  if (!is_open()) return;
  try {
    python::wait(world_->engine(), world_->engine().settled());
  } catch (const py::error_already_set&) {  // Ctrl-C: what is in flight fails
    abandon("rank " + std::to_string(world_->rank()) + " was interrupted while it left");
    close_now();
    throw;
  }
  close_now();
}

void Session::close_now() {
  for (const std::function<void()>& tell : std::exchange(closers_, {})) tell();
  std::unique_ptr<World> mine = std::move(world_);
  {
    const py::gil_scoped_release released;
    const int rank = mine->rank();
    mine.reset();
    if (trace_) {
      const Trace* const traces[] = {trace_.get()};
      trace_file_ << chrome_trace(traces, rank) << std::flush;
    }
  }
  const std::vector<Kept> old = std::move(kept_);
}

Work::~Work() {
  if (!ticket_.done())
    session_->keep_until_done({.tickets = {ticket_}, .object = nullptr, .objects = {keep_}});
}

void Work::wait() {
  if (session_->is_open()) python::wait(session_->world().engine(), ticket_);
  keep_ = py::none();
  if (ticket_.error()) std::rethrow_exception(ticket_.error());
}

void bind_session(py::module_& module) {
  py::class_<Work, std::shared_ptr<Work>>(module, "Work").def("done", &Work::done).def("wait", &Work::wait);
  py::class_<Session, std::shared_ptr<Session>>(module, "Session")
      .def(py::init(&Session::join), py::arg("trace") = "", py::arg("place") = py::none())
      .def_property_readonly("rank", [](Session& s) { return s.world().rank(); })
      .def_property_readonly("size", [](Session& s) { return s.world().size(); })
      .def_property_readonly("transport", [](Session& s) { return std::string(s.world().transport()); })
      .def_property_readonly("is_open", &Session::is_open)
      .def("all_reduce", &Session::all_reduce)
      .def("reduce_scatter", &Session::reduce_scatter)
      .def("all_gather", &Session::all_gather)
      .def("broadcast", &Session::broadcast)
      .def("all_to_all", &Session::all_to_all)
      .def("barrier", &Session::barrier)
      .def("agree", &Session::agree)
      .def("log_line", [](Session& s, const std::string& text) { s.world().engine().log_line(text); })
      .def("abandon", &Session::abandon)
      .def("close", &Session::close);
}

}  // namespace weft::python
