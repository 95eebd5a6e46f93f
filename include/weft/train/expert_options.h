// Layers of experts in a model (gpt-moe, bert2gpt2-moe): each token goes through a few of many feed-forward networks, which a
// gate chooses. docs/algorithms.md has the rules of choosing and dropping, src/experts/ the exchange.
#pragma once

#include <cstdint>
#include <string>

namespace weft {

inline constexpr int kAutoSlices = 0;

struct ExpertOptions {
  // affects results
  int count = 8;                  // of a layer
  int choices = 2;                // of a token: 1 or 2
  double capacity_factor = 1.25;  // places of an expert over copies that it would get if all got as many;
                                  // 0: none is dropped
  int every = 2;                  // so many layers, the last has experts in place of its mlp; 1: all have
  int shared = 0;                 // experts that every token goes through beside its choices
  double balance_loss = 0.01;     // weight of the loss that rises where some experts are chosen more often
  double z_loss = 0;              // of the squared logarithm of the gate's normaliser
  double jitter = 0;              // in training, what the gate sees is multiplied by 1 - jitter .. 1 + jitter
  int slices = 2;                 // in which a batch's rows travel and are computed (their sums differ by
                                  // rounding); kAutoSlices: chosen before the run (planner/slices.h)
  // affects speed only
  std::string policy = "lina";      // how all-to-alls and gradients share the network: `weft info` lists them
  std::string all_to_all = "auto";  // algorithm of the all-to-alls: `weft info` lists them
  int ranks = 1;                    // that the experts of a layer are dealt to, as many to each
  int rank = 0;                     // which of them this is
  // "auto": from `ranks` on, a job deals them to half or twice as many while it runs (src/experts/packing.h).
  // Else the number that a mesh's ep was divided by to get `ranks`; 1: they stay where the mesh has them.
  std::string packing = "1";
  std::int64_t packing_memory = 0;  // bytes of a rank that experts may take; 0: as many as they need
};

}  // namespace weft
