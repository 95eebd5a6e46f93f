// What a program sees of weft is handles: of the scheduler's, the matching's and the executor's insides there are
// names at most. Whoever includes headers of src/ sees them, which is the control.
#include <type_traits>

#include "weft/sparse.h"
#include "weft/transport.h"
#include "weft/weft.h"

namespace weft {
namespace {

struct FromOutside;
struct FromInside;
// `From` tells the two places apart: what a template has said once, it says for the whole file.
template <class T, class From, class = void>
inline constexpr bool kIsShown = false;
template <class T, class From>
inline constexpr bool kIsShown<T, From, std::void_t<decltype(sizeof(T))>> = true;

template <class From>
inline constexpr bool kNothingInsideIsShown =
    !kIsShown<Engine::Core, From> && !kIsShown<Ticket::Awaiter::Record, From> &&
    !kIsShown<detail::Submission, From> && !kIsShown<Comm::Group, From> && !kIsShown<Endpoint, From> &&
    !kIsShown<Operation, From> && !kIsShown<Wait, From> && !kIsShown<Executor, From> &&
    !kIsShown<SendRecord, From> && !kIsShown<RecvRecord, From> && !kIsShown<TransferRecord, From>;
template <class From>
inline constexpr bool kEverythingInsideIsShown =
    kIsShown<Engine::Core, From> && kIsShown<Ticket::Awaiter::Record, From> &&
    kIsShown<detail::Submission, From> && kIsShown<Comm::Group, From> && kIsShown<Endpoint, From> &&
    kIsShown<Operation, From> && kIsShown<Wait, From> && kIsShown<Executor, From> &&
    kIsShown<SendRecord, From> && kIsShown<RecvRecord, From> && kIsShown<TransferRecord, From>;

static_assert(kNothingInsideIsShown<FromOutside>);

}  // namespace
}  // namespace weft

#include "engine/submission.h"
#include "transports/records.h"

namespace weft {
namespace {

static_assert(kEverythingInsideIsShown<FromInside>);

}  // namespace
}  // namespace weft
