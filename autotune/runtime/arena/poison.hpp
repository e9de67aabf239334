// Checks of free memory. In a build for tests (-DAUTOTUNE_POISON) free memory holds a pattern that is NaN in every float
// type, and the pattern is verified before reuse. Under AddressSanitizer free memory is poisoned too. In every other build
// these functions do nothing.

#pragma once

#include <cstdint>

#ifdef AUTOTUNE_POISON

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

inline constexpr unsigned char kFree = 0xFF;

[[noreturn]] inline void stop(const char* what, const void* where) {
  std::fprintf(stderr, "arena: %s at %p\n", what, where);
  std::abort();
}

// Mark memory as free; its pages may have been returned to the system, or hold anything.
inline void poison(void* data, int64_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);  // memset is checked too
  std::memset(data, kFree, bytes);
  ASAN_POISON_MEMORY_REGION(data, bytes);
}

// Mark memory as used, after checking that nothing wrote to it while it was free.
inline void unpoison(void* data, int64_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  auto* begin = static_cast<unsigned char*>(data);
  auto* end = begin + bytes;
  auto* written = std::find_if(begin, end, [](unsigned char byte) { return byte != kFree; });
  if (written != end) stop("written after it was freed", written);
}

// Mark memory as new from the system, whose addresses may have been poisoned before.
inline void forget(void* data, int64_t bytes) { ASAN_UNPOISON_MEMORY_REGION(data, bytes); }

#else

inline void stop(const char*, const void*) {}
inline void poison(void*, int64_t) {}
inline void unpoison(void*, int64_t) {}
inline void forget(void*, int64_t) {}

#endif
