// At which of its host's addresses a rank listens: where the other ranks can reach it, and nowhere else.
//
//   rank 0   WEFT_BIND, if it is set; else whatever MASTER_ADDR means on this host. Where that is a name
//            that leads to loopback here and elsewhere to this host (Debian's `127.0.1.1 host`), also every
//            address that the host has
//   others   WEFT_BIND; else the address from which they have reached rank 0. A rank that has reached it
//            over loopback by such a name listens at all addresses of the host, and rank 0 tells each of the
//            others the one by which that one has come
// Only a job with a token listens beyond loopback.
#pragma once

#include <string>
#include <vector>

#include "transports/tcp_socket.h"

namespace weft::tcp {

struct OwnAddress {
  std::string interface;
  Address address;
};

// Of the interfaces that are up, without link-local ones, which mean nothing on another host.
std::vector<OwnAddress> own_addresses();

struct Meeting {
  std::string master;             // MASTER_ADDR as it was given
  std::vector<Address> resolved;  // what it means on this host
  std::string bind;               // an address, an interface's name, or nothing
  bool has_token = false;
};

// What WEFT_BIND means here; nothing where it is not set. Throws UsageError.
std::vector<Address> bound_addresses(const std::string& bind, const std::vector<OwnAddress>& own);
// Throw UsageError, which says what this host has.
std::vector<Address> addresses_of_rank_0(const Meeting& meeting, const std::vector<OwnAddress>& own);
// The first is the one that rank 0 is told. `from`: this rank's end of its connection to rank 0.
std::vector<Address> addresses_of_others(const Meeting& meeting, const std::vector<OwnAddress>& own,
                                         const Address& from);

}  // namespace weft::tcp
