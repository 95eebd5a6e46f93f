// Packing of an operation's identity into an MPI tag. Needs no MPI.
#include "transports/mpi_tag.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>

namespace weft {
namespace {

constexpr int kOpenMpi = std::numeric_limits<int>::max();

TEST(MpiTag, UsesEveryWholeBitOfTheBound) {
  for (int bits = kFewestTagBits; bits <= 31; ++bits) {
    const int bound = static_cast<int>((std::uint32_t{1} << bits) - 1);
    const MpiTagLayout layout = mpi_tag_layout(bound);
    EXPECT_EQ(layout.bits(), bits);
    EXPECT_GE(layout.slot_bits, 8);
    EXPECT_GE(layout.step_bits, 1);
    EXPECT_GE(layout.hop_bits, 10);
    const Identity last{.slot = ~std::uint32_t{0}, .hop = (std::uint32_t{1} << layout.hop_bits) - 1};
    EXPECT_EQ(mpi_tag(layout, last), bound);
    EXPECT_TRUE(bits == 31 || mpi_tag_layout(bound + 1) == layout);
  }
}

TEST(MpiTag, RefusesABoundThatIsTooSmall) {
  EXPECT_THROW(mpi_tag_layout(32767), UsageError);  // all that the standard promises
  EXPECT_THROW(mpi_tag_layout((1 << kFewestTagBits) - 2), UsageError);
  EXPECT_THROW(mpi_tag_layout(0), UsageError);
  EXPECT_THROW(mpi_tag_layout(-1), UsageError);
}

TEST(MpiTag, KeepsWhatDoesNotWrapApart) {
  const MpiTagLayout layout = mpi_tag_layout((1 << kFewestTagBits) - 1);
  std::set<int> tags;
  std::size_t packed = 0;
  for (const std::uint32_t named : {0u, kUnnamed}) {
    for (std::uint32_t slot = 0; slot < 256; slot += 5) {
      for (std::uint32_t step = 0; step < (named != 0 ? 1u : 2u); ++step) {
        for (std::uint32_t hop = 0; hop < 1024; hop += 31) {
          const int tag = mpi_tag(layout, {.slot = named | slot, .step = step, .hop = hop});
          EXPECT_GE(tag, 0);
          tags.insert(tag);
          ++packed;
        }
      }
    }
  }
  EXPECT_EQ(tags.size(), packed);
}

TEST(MpiTag, WrapsStepsAndUnnamedCalls) {
  const MpiTagLayout layout = mpi_tag_layout(kOpenMpi);
  const Identity id{.slot = 17, .step = 2, .hop = 5};
  Identity later = id;
  later.step += std::uint32_t{1} << layout.step_bits;
  EXPECT_EQ(mpi_tag(layout, id), mpi_tag(layout, later));
  later.step += 1;
  EXPECT_NE(mpi_tag(layout, id), mpi_tag(layout, later));  // the control: a neighbouring step is another tag

  const Identity call{.slot = kUnnamed | 3, .hop = 5};
  Identity next = call;
  next.slot += std::uint32_t{1} << (layout.slot_bits + layout.step_bits);
  EXPECT_EQ(mpi_tag(layout, call), mpi_tag(layout, next));
  next.slot += 1;
  EXPECT_NE(mpi_tag(layout, call), mpi_tag(layout, next));
}

TEST(MpiTag, RefusesRowsAndHopsThatDoNotFit) {
  const MpiTagLayout layout = mpi_tag_layout(kOpenMpi);
  const std::uint32_t rows = std::uint32_t{1} << layout.slot_bits;
  const std::uint32_t hops = std::uint32_t{1} << layout.hop_bits;
  EXPECT_NO_THROW(mpi_tag(layout, {.slot = rows - 1, .hop = hops - 1}));
  EXPECT_THROW(mpi_tag(layout, {.slot = rows}), UsageError);
  EXPECT_THROW(mpi_tag(layout, {.hop = hops}), UsageError);
  EXPECT_THROW(mpi_tag(layout, {.slot = kUnnamed, .hop = hops}), UsageError);
  try {
    mpi_tag(layout, {.slot = 70000});
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(), "plan row 70000 does not fit an MPI tag: this MPI leaves 12 bits for it");
  }
}

}  // namespace
}  // namespace weft
