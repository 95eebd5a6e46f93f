// Lanes of a comparison: what the ranks of a run that failed are told.
#include "measure/turns.h"

#include <gtest/gtest.h>

#include <thread>

#include "weft/error.h"

namespace weft {
namespace {

std::string told(Lane& lane) {
  try {
    lane.before_step(0);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Lane, RanksFailWithWhatClosedIt) {
  Lane lane(2);
  std::string waiting;
  std::thread other([&] { waiting = told(lane); });
  try {
    throw Error("the first");
  } catch (const Error&) {
    lane.close();
  }
  lane.close();  // without a cause, later: it changes nothing
  other.join();
  EXPECT_EQ(waiting, "the first");
  EXPECT_EQ(told(lane), "the first");
  Lane ended(1);  // control: nobody failed
  ended.close();
  EXPECT_EQ(told(ended), "the comparison was ended before step 0");
}

}  // namespace
}  // namespace weft
