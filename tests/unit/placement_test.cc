// Which rank a launcher says we are: variables as mpirun, torchrun, srun and `weft launch` set them.
#include "world/placement.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "weft/error.h"

namespace weft {
namespace {

Placement from(const std::map<std::string, std::string>& environment) {
  return detect_placement([&](const char* name) -> const char* {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  });
}

std::string refusal(const std::map<std::string, std::string>& environment) {
  try {
    from(environment);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Placement, NoLauncherIsAWorldOfOne) {
  const Placement p = from({});
  EXPECT_EQ(p.launcher, Placement::Launcher::none);
  EXPECT_EQ(p.rank, 0);
  EXPECT_EQ(p.size, 1);
}

TEST(Placement, Torchrun) {
  const Placement p =
      from({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(p.launcher, Placement::Launcher::plain);
  EXPECT_EQ(p.rank, 2);
  EXPECT_EQ(p.size, 4);
  EXPECT_EQ(p.master_address, "10.0.0.1");
  EXPECT_EQ(p.master_port, 29500);
}

TEST(Placement, OpenMpiInsideSlurmIsOpenMpi) {
  const Placement p = from({{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "3"},
                            {"SLURM_PROCID", "0"},
                            {"SLURM_NTASKS", "1"}});
  EXPECT_EQ(p.launcher, Placement::Launcher::open_mpi);
  EXPECT_EQ(p.rank, 1);
  EXPECT_EQ(p.size, 3);
}

TEST(Placement, PlainSlurmTakesTheFirstHostOfTheList) {
  const auto host = [](const std::string& list) {
    return from({{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_NODELIST", list}}).master_address;
  };
  EXPECT_EQ(host("node7"), "node7");
  EXPECT_EQ(host("node7,node9"), "node7");
  EXPECT_EQ(host("node[03-07,12],gpu1"), "node03");
  EXPECT_EQ(host("node[3,5]"), "node3");
  EXPECT_EQ(host("login,node[3,5]"), "login");
}

// Two starts of anything differ in their job, and the ranks of one do not.
TEST(Placement, TheJobIsTheLaunchersOwn) {
  using Environment = std::map<std::string, std::string>;
  const auto job = [](Environment environment, const Environment& more) {
    environment.insert(more.begin(), more.end());
    return from(environment).job;
  };
  const Environment slurm{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}};
  const Environment plain{{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  const Environment open_mpi{{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  const Environment pmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
  const std::string step_0 = job(slurm, {{"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "0"}});
  EXPECT_NE(step_0, "");
  EXPECT_EQ(step_0, job({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}},
                        {{"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "0"}}));
  EXPECT_NE(step_0, job(slurm, {{"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "1"}}));
  EXPECT_NE(step_0, job(slurm, {{"SLURM_JOB_ID", "18"}, {"SLURM_STEP_ID", "0"}}));
  EXPECT_EQ(job(plain, {{"TORCHELASTIC_RUN_ID", "a"}, {"SLURM_JOB_ID", "17"}}), "TORCHELASTIC_RUN_ID=a");
  // What torchrun says where nobody named the run is no name.
  EXPECT_EQ(job(plain, {{"TORCHELASTIC_RUN_ID", "none"}, {"SLURM_JOB_ID", "17"}}), "SLURM_JOB_ID=17");
  EXPECT_EQ(job(plain, {{"TORCHELASTIC_RUN_ID", "none"}}), "");
  EXPECT_EQ(job(open_mpi, {{"PMIX_NAMESPACE", "123"}}), "PMIX_NAMESPACE=123");
  EXPECT_EQ(job(open_mpi, {{"OMPI_MCA_ess_base_jobid", "123"}}), "OMPI_MCA_ess_base_jobid=123");
  EXPECT_EQ(job(pmi, {{"PMI_JOBID", "17.0"}}), "PMI_JOBID=17.0");
  EXPECT_EQ(job({}, {{"SLURM_JOB_ID", "17"}}), "");  // a process alone in an allocation
}

TEST(Placement, HalfSetOrSenselessValuesAreRefused) {
  EXPECT_EQ(refusal({{"RANK", "1"}}), "RANK is set but WORLD_SIZE is not; a launcher sets both");
  EXPECT_EQ(refusal({{"WORLD_SIZE", "4"}}), "WORLD_SIZE is set but RANK is not; a launcher sets both");
  EXPECT_NE(refusal({{"RANK", "4"}, {"WORLD_SIZE", "4"}}).find("RANK: '4'"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "x"}, {"WORLD_SIZE", "4"}}).find("RANK: 'x'"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}).find("WORLD_SIZE"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "99999"}}).find("MASTER_PORT"),
            std::string::npos);
}

}  // namespace
}  // namespace weft
