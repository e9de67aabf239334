// A set of byte addresses, as ranges that do not touch each other.

#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

class Ranges {
 public:
  int64_t bytes() const { return bytes_; }
  auto begin() const { return ends_.begin(); }  // over pairs (begin, end)
  auto end() const { return ends_.end(); }

  int64_t covered(int64_t from, int64_t to) const {
    int64_t bytes = 0;
    for (auto next = first_beyond(from); next != ends_.end() && next->first < to; ++next) {
      bytes += std::min(to, next->second) - std::max(from, next->first);
    }
    return bytes;
  }

  void add(int64_t from, int64_t to) {
    cut(from, to);
    bytes_ += to - from;
    auto next = ends_.lower_bound(from);
    if (next != ends_.end() && next->first == to) {
      to = next->second;
      next = ends_.erase(next);
    }
    if (next != ends_.begin() && std::prev(next)->second == from) {
      std::prev(next)->second = to;
    } else {
      ends_.emplace_hint(next, from, to);
    }
  }

  void cut(int64_t from, int64_t to) {
    for (auto next = first_beyond(from); next != ends_.end() && next->first < to;) {
      const auto [begin, end] = *next;
      next = ends_.erase(next);
      if (begin < from) ends_.emplace(begin, from);
      if (to < end) ends_.emplace(to, end);
      bytes_ -= std::min(to, end) - std::max(from, begin);
    }
  }

 private:
  // Return the first range that ends after `from`.
  std::map<int64_t, int64_t>::const_iterator first_beyond(int64_t from) const {
    auto next = ends_.upper_bound(from);
    if (next != ends_.begin() && std::prev(next)->second > from) --next;
    return next;
  }

  std::map<int64_t, int64_t> ends_;  // begin -> end
  int64_t bytes_ = 0;
};
