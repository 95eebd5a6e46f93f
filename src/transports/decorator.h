// A transport around another: everything goes through. A decorator overrides what it changes.
#pragma once

#include "transports/records.h"

namespace weft {

class Decorator : public Transport {
 public:
  explicit Decorator(Transport& inner) : inner_(inner) {}

  std::string_view name() const override { return inner_.name(); }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  const Clock& clock() const override { return inner_.clock(); }
  void post(SendRecord& send) noexcept override { inner_.post(send); }
  void post(RecvRecord& recv) noexcept override { inner_.post(recv); }
  void cancel(TransferRecord& record) noexcept override { inner_.cancel(record); }
  void give_way(Time until) noexcept override { inner_.give_way(until); }
  bool poll() noexcept override { return inner_.poll(); }
  Time next_event() const override { return inner_.next_event(); }
  void wait(Time until) noexcept override { inner_.wait(until); }
  void wake() noexcept override { inner_.wake(); }
  std::exception_ptr failure() const override { return inner_.failure(); }
  void close(const std::string& reason) noexcept override { inner_.close(reason); }
  TrafficCounters counters() const override { return inner_.counters(); }

 protected:
  Transport& inner_;
};

}  // namespace weft
