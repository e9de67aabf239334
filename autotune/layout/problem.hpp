// Buffers as the searches see them, and what a search that may be given up can say.

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

inline Bytes up(Bytes number, Bytes to) { return (number + to - 1) / to * to; }

// Of a capacity: no layout is so small; one is found; not found within the effort.
enum Found { kNone = 0, kSolved = 1, kSpent = -1 };
