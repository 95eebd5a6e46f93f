// The rank suite where the ranks are processes: the same checks, bit for bit, over tcp and mpi. Run by a
// launcher (tests/launch, mpirun); collectives_test without one runs the suite on threads.
#include <gtest/gtest.h>

#include "ranks/suite.h"
#include "weft/config.h"
#include "world/open.h"

namespace weft::test {
namespace {

// One transport for the whole binary: a job is joined once.
class Processes : public testing::Test {
 public:
  static void SetUpTestSuite() {
    transport_ = open_transport(Config::from_environment(), detect_placement());
    ASSERT_NE(transport_, nullptr) << "needs a launcher";
    rank_ = new TestRank(*transport_);
  }
  static void TearDownTestSuite() {
    delete rank_;
    rank_ = nullptr;
    if (transport_ != nullptr) transport_->close("");
    transport_.reset();
  }

 protected:
  static TestRank& rank() { return *rank_; }

 private:
  static inline std::unique_ptr<Transport> transport_;
  static inline TestRank* rank_ = nullptr;
};

TEST_F(Processes, AllReduceEqualsTheReferenceToTheBit) { run_all_reduce_suite(rank()); }
TEST_F(Processes, ScatterGatherAndBroadcastEqualTheReference) { run_block_suite(rank()); }
TEST_F(Processes, AllToAllEqualsTheReference) { run_all_to_all_suite(rank()); }

}  // namespace
}  // namespace weft::test
