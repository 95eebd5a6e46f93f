#include "transports/tcp_addresses.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <memory>

#include "weft/error.h"

namespace weft::tcp {

namespace {

bool holds(const std::vector<Address>& list, const Address& address) {
  return std::find(list.begin(), list.end(), address) != list.end();
}

bool is_own(const Address& address, const std::vector<OwnAddress>& own) {
  return address.is_loopback() ||
         std::any_of(own.begin(), own.end(), [&](const OwnAddress& o) { return o.address == address; });
}

// Whoever writes this means one host.
bool says_loopback(const std::string& name) {
  std::error_code not_a_number;
  const Address address = asio::ip::make_address(name, not_a_number);
  if (!not_a_number) return address.is_loopback();
  return name.rfind("localhost", 0) == 0 || name.rfind("ip6-l", 0) == 0;
}

std::string text_of(const std::vector<OwnAddress>& own) {
  std::string text;
  for (const OwnAddress& o : own) {
    text += (text.empty() ? "" : ", ") + o.address.to_string() + " (" + o.interface + ")";
  }
  return text.empty() ? "none" : text;
}

void require_own(const Address& bound, const std::vector<OwnAddress>& own) {
  if (is_own(bound, own)) return;
  throw UsageError("WEFT_BIND: this host has no address " + bound.to_string() + "; it has " + text_of(own));
}

void add_what_others_reach(std::vector<Address>& to, const std::vector<OwnAddress>& own) {
  for (const OwnAddress& o : own) {
    if (!o.address.is_loopback() && !holds(to, o.address)) to.push_back(o.address);
  }
}

}  // namespace

std::vector<OwnAddress> own_addresses() {
  ifaddrs* head = nullptr;
  std::vector<OwnAddress> own;
  if (::getifaddrs(&head) != 0) return own;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(head, &::freeifaddrs);
  for (const ifaddrs* at = head; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_flags & IFF_UP) == 0) continue;
    if (at->ifa_addr->sa_family == AF_INET) {
      const auto& v4 = *reinterpret_cast<const sockaddr_in*>(at->ifa_addr);
      own.push_back({at->ifa_name, asio::ip::address_v4(ntohl(v4.sin_addr.s_addr))});
    } else if (at->ifa_addr->sa_family == AF_INET6) {
      const auto& v6 = *reinterpret_cast<const sockaddr_in6*>(at->ifa_addr);
      asio::ip::address_v6::bytes_type bytes;
      std::copy_n(std::begin(v6.sin6_addr.s6_addr), bytes.size(), bytes.begin());
      const asio::ip::address_v6 address(bytes);
      if (!address.is_link_local()) own.push_back({at->ifa_name, address});
    }
  }
  return own;
}

std::vector<Address> bound_addresses(const std::string& bind, const std::vector<OwnAddress>& own) {
  if (bind.empty()) return {};
  std::error_code not_a_number;
  const Address address = asio::ip::make_address(bind, not_a_number);
  if (!not_a_number && address.is_unspecified())
    throw UsageError("weft does not listen on all addresses: name the one to bind to");
  if (!not_a_number) return {address};
  std::vector<Address> found;
  for (const OwnAddress& o : own) {
    if (o.interface == bind) found.push_back(o.address);
  }
  if (found.empty()) {
    throw UsageError("WEFT_BIND '" + bind +
                     "' is no address and no interface of this host that is up; it has " + text_of(own));
  }
  return found;
}

std::vector<Address> addresses_of_rank_0(const Meeting& meeting, const std::vector<OwnAddress>& own) {
  std::vector<Address> at = bound_addresses(meeting.bind, own);
  for (const Address& address : at) require_own(address, own);
  const bool bound = !at.empty();
  bool leads_out = bound;
  std::string foreign;
  for (const Address& address : meeting.resolved) {
    if (!is_own(address, own)) foreign += (foreign.empty() ? "" : ", ") + address.to_string();
    // Ranks of this host may come over loopback, whatever is bound for the others.
    const bool wanted = is_own(address, own) && (!bound || address.is_loopback());
    if (wanted && !holds(at, address)) at.push_back(address);
    leads_out = leads_out || !address.is_loopback();
  }
  if (at.empty()) {
    throw UsageError(
        "this host has no address " + foreign + ", where MASTER_ADDR " + meeting.master +
        " leads to; it has " + text_of(own) +
        ". Rank 0 must run where MASTER_ADDR points to; where that leads here by other means, set "
        "WEFT_BIND to an address or interface of this host");
  }
  if (!leads_out && meeting.has_token && !says_loopback(meeting.master)) add_what_others_reach(at, own);
  return at;
}

std::vector<Address> addresses_of_others(const Meeting& meeting, const std::vector<OwnAddress>& own,
                                         const Address& from) {
  std::vector<Address> bound = bound_addresses(meeting.bind, own);
  if (!bound.empty()) {  // rank 0 is told one: of the kind by which this rank and rank 0 have met
    const auto same_kind =
        std::find_if(bound.begin(), bound.end(), [&](const Address& a) { return a.is_v4() == from.is_v4(); });
    const Address one = same_kind != bound.end() ? *same_kind : bound.front();
    require_own(one, own);
    return {one};
  }
  std::vector<Address> at{from};
  if (from.is_loopback() && meeting.has_token && !says_loopback(meeting.master))
    add_what_others_reach(at, own);
  return at;
}

}  // namespace weft::tcp
