// Errors, by what the caller can do about them. docs/errors.md lists every one with its remedy.
//
//   UsageError      fix the call: nothing was sent, the job goes on
//   TransportError  rebuild: a peer is lost, a frame is wrong, the transport is closed
//   TimeoutError    wait longer or rebuild: the deadline of an operation passed
//
// Every message is one sentence that names what is known of rank, peer, operation, step and seconds.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace weft {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class UsageError : public Error {
 public:
  using Error::Error;
};

class TransportError : public Error {
 public:
  enum class Kind {
    peer_lost,  // the peer died, hangs, or left while it was needed
    mismatch,   // the peer runs another operation, length or type than this rank
    corrupt,    // magic, version, epoch, identity, length or checksum of a frame is wrong
    refused,    // a connection could not be made or was not authenticated
    closed,     // this rank's own transport was closed
  };

  TransportError(Kind kind, int peer, const std::string& what) : Error(what), kind_(kind), peer_(peer) {}
  Kind kind() const { return kind_; }
  int peer() const { return peer_; }  // rank in the world, or -1 where no single peer is to blame

 private:
  Kind kind_;
  int peer_;
};

class TimeoutError : public Error {
 public:
  TimeoutError(int peer, double seconds, const std::string& what)
      : Error(what), peer_(peer), seconds_(seconds) {}
  int peer() const { return peer_; }           // who was waited for, or -1
  double seconds() const { return seconds_; }  // how long

 private:
  int peer_;
  double seconds_;
};

}  // namespace weft
