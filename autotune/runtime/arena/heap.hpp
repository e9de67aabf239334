// A heap that holds no more memory than its live blocks, for steps without a layout. It is first fit by address, in
// address space that is reserved once, and returns every unused page to the system at once. Holes cost addresses, not
// memory. glibc's heap, with its mappings of whole pages, needs up to 10 % more for an LSTM's many tensors of 49 KB.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <unordered_map>

#include "poison.hpp"

// Not thread-safe, except for `may_own`.
class Heap {
 public:
  // Return uninitialized bytes aligned for torch; nullptr if there are none, and for less than a page, which would keep a
  // whole page resident.
  void* allocate(int64_t bytes) {
    if (bytes < page_) return nullptr;
    if (bytes > kLargest) return map(bytes);
    if (!reserve()) return nullptr;
    const int64_t size = up(bytes, kAlignment);
    // whole pages are page-aligned, so that no neighbouring hole shares a page with them
    const int64_t alignment = size % page_ == 0 ? page_ : kAlignment;
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      const auto [first, end] = *hole;
      const int64_t begin = up(first, alignment);
      if (end - begin < size) continue;
      holes_.erase(hole);
      add_hole(first, begin);
      add_hole(begin + size, end);
      return hand_out(begin, size, bytes);
    }
    const int64_t begin = up(top_, alignment);
    if (begin + size > writable_ && !grow(begin + size)) return nullptr;
    add_hole(top_, begin);
    top_ = begin + size;
    return hand_out(begin, size, bytes);
  }

  // Return a mapping of whole pages, or nullptr.
  void* map(int64_t requested) {
    const int64_t bytes = up(requested, page_);
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
    forget(data, bytes);
    mapped_.emplace(data, bytes);
    mapped_count_.fetch_add(1, std::memory_order_relaxed);
    return data;
  }

  // Free a block; return false if it is not from this heap.
  bool release(void* data) {
    if (!in_region(data)) return unmap(data);
    free_block(data);
    return true;
  }

  bool may_own(const void* data) const { return in_region(data) || mapped_count_.load(std::memory_order_relaxed) > 0; }

 private:
  static constexpr int64_t kAlignment = 64, kGrain = int64_t{1} << 20, kSpare = int64_t{4} << 20;
  static constexpr int64_t kLargest = int64_t{1} << 20;  // a larger block gets a mapping of its own, which wastes little
  static constexpr int64_t kReserved = int64_t{64} << 30;

  static int64_t up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }
  static int64_t down(int64_t number, int64_t to) { return number / to * to; }

  bool unmap(void* data) {
    const auto mapping = mapped_.find(data);
    if (mapping == mapped_.end()) return false;
    munmap(data, mapping->second);
    mapped_.erase(mapping);
    mapped_count_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }

  void free_block(void* data) {
    const int64_t from = static_cast<char*>(data) - base_.load();
    const auto block = sizes_.find(from);
    if (block == sizes_.end()) return stop("freed twice", data);
    int64_t begin = from, end = from + block->second;
    const int64_t to = end;
    sizes_.erase(block);
    const auto next = holes_.lower_bound(begin);
    if (next != holes_.end() && next->first == end) {
      end = next->second;
      holes_.erase(next);
    }
    const auto before = holes_.lower_bound(begin);
    if (before != holes_.begin() && std::prev(before)->second == begin) {
      begin = std::prev(before)->first;
      holes_.erase(std::prev(before));
    }
    if (end == top_) {
      top_ = begin;
      end = up(end, page_);  // no block is live beyond the top
    } else {
      holes_.emplace(begin, end);
    }
    const int64_t first = std::max(down(from, page_), up(begin, page_));
    const int64_t last = std::min(up(to, page_), down(end, page_));
    if (first < last) madvise(base_.load() + first, last - first, MADV_DONTNEED);
    poison(base_.load() + std::min(first, from), std::max(last, to) - std::min(first, from));
    if (writable_ - up(top_, kGrain) > kSpare) shrink();
  }

  bool in_region(const void* data) const {
    const char* base = base_.load(std::memory_order_relaxed);
    return base != nullptr && data >= base && data < base + kReserved;
  }

  void add_hole(int64_t begin, int64_t end) {
    if (begin < end) holes_.emplace(begin, end);
  }

  void* hand_out(int64_t begin, int64_t size, int64_t bytes) {
    sizes_.emplace(begin, size);
    unpoison(base_.load() + begin, bytes);
    return base_.load() + begin;
  }

  bool reserve() {
    if (base_.load() != nullptr || refused_) return !refused_;
    void* base = mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    refused_ = base == MAP_FAILED;
    if (refused_) return false;
    madvise(base, kReserved, MADV_NOHUGEPAGE);  // one small tensor would be charged a huge page
    base_.store(static_cast<char*>(base));
    return true;
  }

  // Only writable pages count towards a limit on data (RLIMIT_DATA); reserved addresses do not.
  bool grow(int64_t to) {
    const int64_t end = up(to, kGrain);
    if (end > kReserved || mprotect(base_.load() + writable_, end - writable_, PROT_READ | PROT_WRITE) != 0) return false;
    poison(base_.load() + writable_, end - writable_);
    writable_ = end;
    return true;
  }

  void shrink() {
    const int64_t end = up(top_, kGrain);
    if (mprotect(base_.load() + end, writable_ - end, PROT_NONE) == 0) writable_ = end;
  }

  std::atomic<char*> base_{nullptr};
  const int64_t page_ = sysconf(_SC_PAGESIZE);
  bool refused_ = false;
  int64_t top_ = 0, writable_ = 0;
  std::map<int64_t, int64_t> holes_;  // begin -> end, never adjacent
  std::unordered_map<void*, int64_t> mapped_;
  std::atomic<int64_t> mapped_count_{0};
  std::unordered_map<int64_t, int64_t> sizes_;  // begin -> bytes of live blocks
};
