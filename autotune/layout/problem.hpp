// Layout problem of the searches, and the outcome of a search with limited work.

#pragma once

#include <cstdint>

using Bytes = int64_t;

struct Problem {
  int count;
  const Bytes* size;
  const int64_t* born;
  const int64_t* died;
  const Bytes* aligned;
};

inline Bytes round_up(Bytes number, Bytes multiple) { return (number + multiple - 1) / multiple * multiple; }

// Outcome for a capacity: no layout is so small, a layout was found, or the work ran out.
enum Outcome { kInfeasible = 0, kSolved = 1, kOutOfWork = -1 };
