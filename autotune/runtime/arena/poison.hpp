// Memory that is free and that nobody may touch. In a build for tests (-DAUTOTUNE_POISON) it holds a pattern that is no
// number in any float type, is looked at before it is handed out again, and under AddressSanitizer is poisoned meanwhile.
// In every other build none of this does anything.

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

// Nobody's from now on; its pages may be the system's, or hold anything.
inline void poison(void* data, int64_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);  // memset is watched too
  std::memset(data, kFree, bytes);
  ASAN_POISON_MEMORY_REGION(data, bytes);
}

// Somebody's again, untouched since it was poisoned.
inline void unpoison(void* data, int64_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  auto* begin = static_cast<unsigned char*>(data);
  auto* end = begin + bytes;
  auto* touched = std::find_if(begin, end, [](unsigned char byte) { return byte != kFree; });
  if (touched != end) stop("written after it was freed", touched);
}

// Memory new from the system, where something poisoned may have lain before.
inline void forget(void* data, int64_t bytes) { ASAN_UNPOISON_MEMORY_REGION(data, bytes); }

#else

inline void stop(const char*, const void*) {}
inline void poison(void*, int64_t) {}
inline void unpoison(void*, int64_t) {}
inline void forget(void*, int64_t) {}

#endif
