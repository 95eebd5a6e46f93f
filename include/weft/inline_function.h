// A callable that owns what it calls, in place: move-only, never allocates. What does not fit does not
// compile.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace weft {

template <class Signature, std::size_t Capacity = 128>
class InlineFunction;

template <class R, class... Args, std::size_t Capacity>
class InlineFunction<R(Args...), Capacity> {
 public:
  InlineFunction() = default;
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, InlineFunction>)
  InlineFunction(F&& f) {  // NOLINT(google-explicit-constructor,bugprone-forwarding-reference-overload): a
                           // callable is one
    using Target = std::decay_t<F>;
    static_assert(sizeof(Target) <= Capacity, "too many captures: capture a pointer to a struct instead");
    static_assert(alignof(Target) <= alignof(std::max_align_t));
    new (storage_) Target(std::forward<F>(f));
    call_ = [](void* target, Args... args) -> R {
      return (*static_cast<Target*>(target))(std::forward<Args>(args)...);
    };
    move_ = [](void* from, void* to) noexcept {
      if (to != nullptr) new (to) Target(std::move(*static_cast<Target*>(from)));
      static_cast<Target*>(from)->~Target();
    };
  }
  InlineFunction(InlineFunction&& other) noexcept { take(other); }
  InlineFunction& operator=(InlineFunction&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~InlineFunction() { reset(); }

  void reset() noexcept {
    if (move_ != nullptr) move_(storage_, nullptr);
    call_ = nullptr;
    move_ = nullptr;
  }
  explicit operator bool() const { return call_ != nullptr; }
  R operator()(Args... args) { return call_(storage_, std::forward<Args>(args)...); }

 private:
  void take(InlineFunction& other) noexcept {
    if (other.move_ == nullptr) return;
    other.move_(other.storage_, storage_);
    call_ = std::exchange(other.call_, nullptr);
    move_ = std::exchange(other.move_, nullptr);
  }
  alignas(std::max_align_t) std::byte storage_[Capacity];
  R (*call_)(void*, Args...) = nullptr;
  void (*move_)(void*, void*) noexcept = nullptr;
};

}  // namespace weft
