#include "weft/trace.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(Trace, HasItsFirstEventsAndCountsTheOthers) {
  Trace trace(2);
  for (const char* name : {"a", "b", "c", "d", "e"}) trace.add({.name = name});
  ASSERT_EQ(trace.events().size(), 2u);
  EXPECT_EQ(trace.events()[1].name, "b");
  EXPECT_EQ(trace.left_out(), 3u);
  const Trace* traces[] = {&trace};
  const std::string json = chrome_trace(traces, 5);
  EXPECT_NE(json.find("\"left_out\":3}"), std::string::npos);
  EXPECT_NE(json.find("rank 5"), std::string::npos);
  EXPECT_EQ(json.find("rank 0"), std::string::npos);
}

}  // namespace
}  // namespace weft
