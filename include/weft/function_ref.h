// A reference to something callable: two words, no ownership, no allocation. The callable must outlive every
// call; inside a coroutine that means a named lambda in the frame (a temporary in an await expression is also
// unsafe with g++ 12).
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace weft {

template <class Signature>
class FunctionRef;

template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  FunctionRef() = default;
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F& f)  // NOLINT(google-explicit-constructor): an lvalue callable is a FunctionRef
      : target_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* target, Args... args) -> R {
          return (*static_cast<F*>(target))(std::forward<Args>(args)...);
        }) {}
  FunctionRef(void* target, R (*call)(void*, Args...)) : target_(target), call_(call) {}

  explicit operator bool() const { return call_ != nullptr; }
  R operator()(Args... args) const { return call_(target_, std::forward<Args>(args)...); }

 private:
  void* target_ = nullptr;
  R (*call_)(void*, Args...) = nullptr;
};

}  // namespace weft
