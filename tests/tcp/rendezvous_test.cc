// How a job forms, and what each rank is told when it cannot.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "tcp/stranger.h"
#include "transports/tcp_token.h"
#include "weft/config.h"
#include "world/open.h"

namespace weft {
namespace {

using ::testing::AllOf;
using testing::as_rank;
using ::testing::HasSubstr;
using testing::job_options;
using ::testing::Not;
using testing::run_ranks;
using testing::run_ranks_caught;
using testing::Stranger;
using testing::text_of;

template <class E>
std::string thrown(const std::function<void()>& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another kind of error: ") + e.what();
  }
  return "nothing was thrown";
}

std::string new_directory() {
  std::string path = "/tmp/weft-test-XXXXXX";
  EXPECT_NE(::mkdtemp(path.data()), nullptr);
  return path;
}

TEST(TcpRendezvous, RanksMayStartInAnyOrder) {
  const TcpOptions options = job_options(4);
  std::vector<std::thread> ranks;
  for (const int rank : {3, 1, 2, 0}) {
    ranks.emplace_back([&, rank] { EXPECT_EQ(connect_tcp(as_rank(options, rank))->rank(), rank); });
    ::usleep(30'000);
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(TcpRendezvous, ADeadlineMayBeNever) {
  TcpOptions options = job_options(2);
  options.connect_timeout = kNever;
  for (const std::exception_ptr& error : run_ranks_caught(options, [](Transport&, BareRank&) {}))
    EXPECT_EQ(text_of(error), "");
}

TEST(TcpRendezvous, ManyJobsInARowOnOnePort) {
  const TcpOptions options = job_options(3);
  for (int i = 0; i < 20; ++i) run_ranks(options, [](Transport&, BareRank&) {});
}

// More than the listener has places for strangers, all within the same moment: whoever finds no place tries
// again, and the job forms. Descriptors: two a pair of ranks.
TEST(TcpRendezvous, MoreRanksThanPlacesForStrangersComeAtOnce) {
  constexpr int kRanks = 90;
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlim_t needed = rlim_t{kRanks} * kRanks + 1000;
  if (limit.rlim_max < needed) GTEST_SKIP() << "needs " << needed << " open files, has " << limit.rlim_max;
  limit.rlim_cur = std::max(limit.rlim_cur, needed);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  TcpOptions options = job_options(kRanks);
  options.connect_timeout = 60s;
  run_ranks(options, [](Transport&, BareRank&) {});
}

// On a busy host a rank gives a call up before its answer comes, and calls again: it is not refused because
// of the call that it gave up. Rank 2 is played here; rank 1 is called, admits it, and finds that it hung up.
TEST(TcpRendezvous, ACallThatWasGivenUpDoesNotTakeTheRank) {
  TcpOptions options = job_options(3);
  options.token = testing::kToken;
  std::vector<std::thread> ranks;
  for (const int rank : {0, 1})
    ranks.emplace_back([&, rank] { EXPECT_NO_THROW(connect_tcp(as_rank(options, rank))); });
  const Stranger to_0(options.port);
  ASSERT_EQ(greet(to_0, testing::hello_of(options, 2), options.token), tcp::Refusal::none);
  std::array<std::byte, tcp::kNoticeBytes> head{};
  std::vector<std::byte> table(3 * tcp::kPlaceBytes);
  ASSERT_TRUE(to_0.receive(head) && to_0.receive(table));
  const std::uint16_t port = tcp::parse_table(table)[1].port;
  Stranger given_up(port);
  ASSERT_EQ(greet(given_up, testing::hello_of(options, 2, 1), options.token), tcp::Refusal::none);
  // Control: as long as the first call stands, a second one is refused.
  EXPECT_EQ(greet(Stranger(port), testing::hello_of(options, 2, 1), options.token), tcp::Refusal::taken);
  given_up.close();
  const Stranger to_1(port);
  EXPECT_EQ(greet(to_1, testing::hello_of(options, 2, 1), options.token), tcp::Refusal::none);
  EXPECT_TRUE(to_0.send(tcp::encode_notice(tcp::NoticeKind::ready, {})) && to_0.receive(head));
  for (std::thread& rank : ranks) rank.join();
}

// Rank 0's own error says whom it turned away: who looks at its log alone would look for the wrong rank.
TEST(TcpRendezvous, RankZeroSaysWhomItRefused) {
  TcpOptions options = job_options(2);
  options.token = testing::kToken;
  options.connect_timeout = 700ms;
  std::thread other([&] {
    TcpOptions wrong = as_rank(options, 1);
    wrong.token = "another secret of more than 32 characters";
    EXPECT_THROW(connect_tcp(wrong), TransportError);
  });
  EXPECT_THAT(thrown<TimeoutError>([&] { connect_tcp(as_rank(options, 0)); }),
              AllOf(HasSubstr("rank 1 did not come"), HasSubstr("rank 1 was refused: the token differs")));
  other.join();
}

// Several ranks, several reasons; whoever did come is told as well.
TEST(TcpRendezvous, EveryRefusalIsTold) {
  TcpOptions options = job_options(5);
  options.token = testing::kToken;
  options.connect_timeout = 1s;
  const auto refused_by = [&](int rank, auto change) {
    return std::thread([&options, rank, change] {
      TcpOptions wrong = as_rank(options, rank);
      change(wrong);
      EXPECT_THROW(connect_tcp(wrong), TransportError);
    });
  };
  std::vector<std::thread> ranks;
  ranks.push_back(refused_by(1, [](TcpOptions& o) { o.token += "x"; }));
  ranks.push_back(refused_by(2, [](TcpOptions& o) { o.job = "another"; }));
  ranks.push_back(refused_by(3, [](TcpOptions& o) { o.job = "another"; }));
  const auto all = AllOf(HasSubstr("ranks 1, 2, 3 did not come"), HasSubstr("rank 1 was refused: the token"),
                         HasSubstr("ranks 2, 3 were refused: it belongs to another job"));
  ranks.emplace_back(
      [&] { EXPECT_THAT(thrown<TimeoutError>([&] { connect_tcp(as_rank(options, 4)); }), all); });
  EXPECT_THAT(thrown<TimeoutError>([&] { connect_tcp(as_rank(options, 0)); }), all);
  for (std::thread& rank : ranks) rank.join();
}

// One rank that speaks every 30 s and one that waits 1 s for a word would lose each other.
TEST(TcpRendezvous, RanksThatDifferInPatienceAreRefused) {
  TcpOptions options = job_options(2);
  options.connect_timeout = 700ms;
  std::thread first([&] {
    EXPECT_THAT(thrown<TimeoutError>([&] { connect_tcp(as_rank(options, 0)); }),
                HasSubstr("WEFT_DEAD_AFTER"));
  });
  TcpOptions patient = as_rank(options, 1);
  patient.dead_after = 60s;
  EXPECT_THAT(thrown<TransportError>([&] { connect_tcp(patient); }), HasSubstr("WEFT_DEAD_AFTER"));
  TcpOptions quiet = as_rank(options, 1);
  quiet.heartbeat = 400ms;
  EXPECT_THAT(thrown<TransportError>([&] { connect_tcp(quiet); }), HasSubstr("WEFT_HEARTBEAT"));
  first.join();
}

// Rank 1 of another job that a launcher started meets rank 0 of this one at the same host and port.
TEST(TcpRendezvous, AStrangerOfAnotherJobIsRefusedByTheLaunchersName) {
  const auto open = [port = testing::free_port()](const std::string& job, const char* rank) {
    const std::map<std::string, std::string> variables{{"SLURM_PROCID", rank},
                                                       {"SLURM_NTASKS", "2"},
                                                       {"SLURM_JOB_ID", job},
                                                       {"SLURM_STEP_ID", "0"},
                                                       {"MASTER_ADDR", "127.0.0.1"}};
    const Placement place = detect_placement([&](const char* name) -> const char* {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
    Config config;
    config.port = port;
    config.token = Secret(testing::kToken);
    return open_transport(config, place);
  };
  std::thread first([&] { EXPECT_NO_THROW(open("17", "0")); });
  EXPECT_THAT(thrown<TransportError>([&] { open("18", "1"); }), HasSubstr("it belongs to another job"));
  EXPECT_NO_THROW(open("17", "1"));  // control: its own rank 1 comes in
  first.join();
}

TEST(TcpRendezvous, OneRankNeedsNobody) {
  TcpOptions options = job_options(1);
  options.master_addr = "192.0.2.1";  // not even its address is looked at
  EXPECT_EQ(connect_tcp(options)->size(), 1);
}

TEST(TcpRendezvous, MissingRankIsNamedOnAllThatCame) {
  TcpOptions options = job_options(4);
  options.connect_timeout = 700ms;
  std::vector<std::string> errors(4);
  std::vector<std::thread> ranks;
  const Time start = SteadyClock().now();
  for (const int rank : {0, 1, 3}) {
    ranks.emplace_back([&, rank] {
      errors[static_cast<std::size_t>(rank)] =
          thrown<TimeoutError>([&] { connect_tcp(as_rank(options, rank)); });
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_LT(seconds(SteadyClock().now() - start), 1.6);
  for (const std::size_t rank : {0u, 1u, 3u})
    EXPECT_THAT(errors[rank], HasSubstr("rank 2 did not come within 0.7 s"));
}

TEST(TcpRendezvous, MissingRankZeroIsNamed) {
  TcpOptions options = as_rank(job_options(2), 1);
  options.connect_timeout = 300ms;
  EXPECT_THAT(
      thrown<TimeoutError>([&] { connect_tcp(options); }),
      AllOf(HasSubstr("rank 0 did not answer at 127.0.0.1"), HasSubstr("0.3 s"), HasSubstr("refused")));
}

TEST(TcpRendezvous, RankThatLeavesEarlyMayComeBack) {
  TcpOptions options = job_options(3);
  options.token = testing::kToken;
  std::thread first([&] { EXPECT_NO_THROW(connect_tcp(as_rank(options, 0))); });
  {
    const Stranger early(options.port);
    EXPECT_EQ(testing::greet(early, testing::hello_of(options, 2), options.token), tcp::Refusal::none);
  }
  std::thread second([&] { EXPECT_NO_THROW(connect_tcp(as_rank(options, 1))); });
  EXPECT_NO_THROW(connect_tcp(as_rank(options, 2)));
  first.join();
  second.join();
}

TEST(TcpRendezvous, PortInUseSaysWhatToDo) {
  const TcpOptions options = job_options(2);
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(options.port);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  EXPECT_THAT(
      thrown<UsageError>([&] { connect_tcp(as_rank(options, 0)); }),
      AllOf(HasSubstr("port " + std::to_string(options.port)), HasSubstr("in use"), HasSubstr("WEFT_PORT")));
  ::close(fd);
}

TEST(TcpRendezvous, OffLoopbackNeedsAToken) {
  TcpOptions options = as_rank(job_options(2), 1);
  options.master_addr = "192.0.2.1";
  EXPECT_THAT(thrown<UsageError>([&] { connect_tcp(options); }),
              AllOf(HasSubstr("WEFT_TOKEN"), HasSubstr("openssl rand -hex 32")));
  options.token = "too short";
  EXPECT_THAT(thrown<UsageError>([&] { connect_tcp(options); }),
              AllOf(HasSubstr("shorter"), Not(HasSubstr("too short"))));
  options.master_addr = "127.0.0.1";
  options.token.clear();
  options.bind = "192.0.2.7";  // a listener that others could reach
  EXPECT_THAT(thrown<UsageError>([&] { connect_tcp(options); }), HasSubstr("WEFT_TOKEN"));
}

TEST(TcpRendezvous, BadOptionsAreRefused) {
  const auto refused = [](auto change) {
    TcpOptions options = job_options(2);
    change(options);
    return thrown<UsageError>([&] { connect_tcp(options); });
  };
  EXPECT_THAT(refused([](TcpOptions& o) { o.rank = 2; }), HasSubstr("rank 2"));
  EXPECT_THAT(refused([](TcpOptions& o) { o.size = 0; }), HasSubstr("at least one rank"));
  EXPECT_THAT(refused([](TcpOptions& o) { o.port = 0; }), HasSubstr("WEFT_PORT"));
  EXPECT_THAT(refused([](TcpOptions& o) { o.dead_after = o.heartbeat; }), HasSubstr("heartbeat"));
  EXPECT_THAT(refused([](TcpOptions& o) { o.bind = "0.0.0.0"; }), HasSubstr("all addresses"));
  EXPECT_THAT(refused([](TcpOptions& o) { o.bind = "eth99"; }),
              AllOf(HasSubstr("WEFT_BIND 'eth99'"), HasSubstr("127.0.0.1 (lo)")));
  const auto with_token = [](TcpOptions& o) { o.token = testing::kToken; };
  EXPECT_THAT(refused([&](TcpOptions& o) {
                with_token(o);
                o.bind = "192.0.2.7";
              }),
              AllOf(HasSubstr("WEFT_BIND"), HasSubstr("no address 192.0.2.7"), HasSubstr("127.0.0.1 (lo)")));
  EXPECT_THAT(refused([&](TcpOptions& o) {
                with_token(o);
                o.master_addr = "192.0.2.1";
              }),
              AllOf(HasSubstr("no address 192.0.2.1"), HasSubstr("127.0.0.1 (lo)"), HasSubstr("WEFT_BIND")));
  EXPECT_THAT(refused([](TcpOptions& o) { o.master_addr = "no.such.host.invalid"; }),
              HasSubstr("cannot be resolved"));
}

// Local addresses of all sockets that listen at this port, as /proc shows them.
std::vector<std::string> listeners_at(std::uint16_t port) {
  std::vector<std::string> found;
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(file);
    std::string line;
    while (std::getline(table, line)) {
      std::istringstream fields(line);
      std::string number;
      std::string local;
      std::string remote;
      std::string state;
      fields >> number >> local >> remote >> state;
      const std::size_t colon = local.find(':');
      if (state == "0A" && colon != std::string::npos &&
          std::stoul(local.substr(colon + 1), nullptr, 16) == port) {
        found.push_back(local.substr(0, colon));
      }
    }
  }
  return found;
}

TEST(TcpRendezvous, ListensOnLoopbackOnlyAndOnlyWhileTheJobForms) {
  const TcpOptions options = job_options(2);
  std::thread first([&] { connect_tcp(as_rank(options, 0)); });
  {
    const Stranger knock(options.port);
  }  // rank 0 is up
  EXPECT_THAT(listeners_at(options.port), ::testing::ElementsAre("0100007F"));
  connect_tcp(as_rank(options, 1));
  first.join();
  EXPECT_THAT(listeners_at(options.port), ::testing::IsEmpty());
}

TEST(TcpRendezvous, RanksMeetOverIPv6) {
  TcpOptions options = job_options(3);
  options.master_addr = "::1";
  run_ranks(options, [](Transport&, BareRank&) {});
  options.bind = "lo";  // an interface's name: both kinds of addresses
  run_ranks(options, [](Transport&, BareRank&) {});
}

// Without an address that the others reach, rank 0 says so.
TEST(TcpRendezvous, RankZeroOnLoopbackSaysWhoCannotReachIt) {
  TcpOptions options = as_rank(job_options(2), 0);
  options.connect_timeout = 200ms;
  EXPECT_THAT(thrown<TimeoutError>([&] { connect_tcp(options); }),
              AllOf(HasSubstr("rank 0 is at 127.0.0.1:"), HasSubstr("only its own host reaches it"),
                    HasSubstr("WEFT_BIND")));
}

TEST(TcpRendezvous, TokenFileIsPrivateAndGoesAway) {
  TcpOptions options = job_options(2);
  options.token_dir = new_directory();
  const std::string path = tcp::token_path(options.token_dir, tcp::job_hash(options.job), options.port);
  std::thread first([&] { connect_tcp(as_rank(options, 0)); });
  {
    const Stranger knock(options.port);
  }
  struct stat status{};
  const Time deadline = SteadyClock().now() + 5s;  // listening comes before writing
  while (::stat(path.c_str(), &status) != 0 && SteadyClock().now() < deadline) ::usleep(1000);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  EXPECT_EQ(status.st_size, 64);
  connect_tcp(as_rank(options, 1));
  first.join();
  EXPECT_FALSE(std::filesystem::exists(path));
  std::filesystem::remove_all(options.token_dir);
}

TEST(TcpRendezvous, UnsafeTokenFilesAreRefused) {
  TcpOptions options = as_rank(job_options(2), 0);
  options.token_dir = new_directory();
  ASSERT_EQ(::chmod(options.token_dir.c_str(), 0755), 0);
  EXPECT_THAT(thrown<UsageError>([&] { connect_tcp(options); }), HasSubstr("mode 0700"));
  ASSERT_EQ(::chmod(options.token_dir.c_str(), 0700), 0);
  const std::string path = options.token_dir + "/x.token";
  std::ofstream(path) << std::string(64, 'a');
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  EXPECT_THAT(thrown<UsageError>([&] { tcp::read_token(path); }), HasSubstr("mode 0600"));
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(tcp::read_token(path), std::string(64, 'a'));  // control
  const std::string link = options.token_dir + "/link.token";
  ASSERT_EQ(::symlink(path.c_str(), link.c_str()), 0);
  EXPECT_THAT(thrown<UsageError>([&] { tcp::read_token(link); }), HasSubstr("cannot read"));
  std::filesystem::remove_all(options.token_dir);
}

// A file that a killed job has left behind is replaced.
TEST(TcpRendezvous, StaleTokenFileDoesNoHarm) {
  TcpOptions options = job_options(2);
  options.token_dir = new_directory();
  const std::string path = tcp::token_path(options.token_dir, tcp::job_hash(options.job), options.port);
  std::ofstream(path) << std::string(64, 'b');
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  std::thread second([&] { EXPECT_NO_THROW(connect_tcp(as_rank(options, 1))); });
  ::usleep(50'000);
  EXPECT_NO_THROW(connect_tcp(as_rank(options, 0)));
  second.join();
  std::filesystem::remove_all(options.token_dir);
}

}  // namespace
}  // namespace weft
