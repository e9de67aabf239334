// The search that takes out what is in the way: a buffer that fits nowhere is put where it displaces the least, and what it
// displaced is placed next. What was often displaced in vain comes to weigh more (Nagata and Braysy 2009, of routes).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "problem.hpp"

// Per buffer those that live beside it.
class Beside {
 public:
  // Empty, and `known` false, where there are more than `most` pairs.
  Beside(const Problem& problem, int64_t most) : begin_(problem.count + 1, 0) {
    std::vector<int> order(problem.count);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return problem.born[a] < problem.born[b]; });
    std::vector<std::pair<int, int>> pairs;
    std::vector<int> alive;
    for (const int item : order) {
      std::erase_if(alive, [&](int other) { return problem.died[other] <= problem.born[item]; });
      for (const int other : alive) pairs.emplace_back(item, other);
      if (static_cast<int64_t>(pairs.size()) > most) return;
      alive.push_back(item);
    }
    for (const auto& [a, b] : pairs) ++begin_[a + 1], ++begin_[b + 1];
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    items_.resize(2 * pairs.size());
    std::vector<int64_t> at(begin_.begin(), begin_.end() - 1);
    for (const auto& [a, b] : pairs) {
      items_[at[a]++] = b;
      items_[at[b]++] = a;
    }
    known = true;
  }

  const int* begin(int item) const { return items_.data() + begin_[item]; }
  const int* end(int item) const { return items_.data() + begin_[item + 1]; }

  bool known = false;

 private:
  std::vector<int64_t> begin_;
  std::vector<int> items_;
};

// Tries one after the other, each from nothing and with other choices among equals. No buffer is larger than the capacity.
class Ejection {
 public:
  // `first`: the higher, the earlier. `power`: of its area, by which a buffer weighs before it was ever displaced.
  Ejection(const Problem& problem, Bytes capacity, const Beside& beside, const double* first, double power,
           uint64_t seed, int64_t moves, int64_t work)
      : offsets(problem.count, kOut), problem_(problem), capacity_(capacity), beside_(beside), random_(seed),
        moves_(moves), work_(work), order_(problem.count), area_(problem.count), weight_(problem.count) {
    for (int item = 0; item < problem.count; ++item) {
      const double area = static_cast<double>(problem.size[item]) * (problem.died[item] - problem.born[item]);
      order_[item] = item;
      area_[item] = std::pow(std::max(1.0, area), power);
    }
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return first[a] < first[b]; });
  }

  Found next() {
    if (spent()) return kSpent;
    std::fill(offsets.begin(), offsets.end(), kOut);
    weight_ = area_;
    out_ = order_;
    for (int64_t left = moves_; !out_.empty(); --left) {
      if (left == 0 || work_ < 0) {
        moves_ += moves_ / kGrowth;
        return kSpent;
      }
      const int item = out_.back();
      out_.pop_back();
      put(item);
    }
    return kSolved;
  }

  bool spent() const { return work_ < 0; }

  std::vector<Bytes> offsets;

 private:
  void put(int item) {
    const Bytes size = problem_.size[item], aligned = problem_.aligned[item];
    const Bytes last = (capacity_ - size) / aligned * aligned;
    begins_.clear();
    ends_.clear();
    places_ = {0, last};
    for (const int* other = beside_.begin(item); other != beside_.end(item); ++other) {
      const Bytes low = offsets[*other];
      if (low == kOut) continue;
      const Bytes high = low + problem_.size[*other];
      begins_.emplace_back(low - size, weight_[*other]);
      ends_.emplace_back(high, weight_[*other]);
      if (up(high, aligned) <= last) places_.push_back(up(high, aligned));
      if (low > size && low - size < last) places_.push_back((low - size) / aligned * aligned);
    }
    work_ -= kSteps * static_cast<int64_t>(begins_.size() + 1);
    std::sort(begins_.begin(), begins_.end());
    std::sort(ends_.begin(), ends_.end());
    std::sort(places_.begin(), places_.end());
    size_t begun = 0, ended = 0;
    double inside = 0, least = std::numeric_limits<double>::max();
    Bytes best = 0;
    uint64_t equal = 0;
    for (const Bytes place : places_) {
      for (; begun < begins_.size() && begins_[begun].first < place; ++begun) inside += begins_[begun].second;
      for (; ended < ends_.size() && ends_[ended].first <= place; ++ended) inside -= ends_[ended].second;
      if (begun == ended) {  // nothing is in the way: the lowest such place
        offsets[item] = place;
        return;
      }
      if (inside < least * (1 - kEqual)) {
        least = inside;
        best = place;
        equal = 1;
      } else if (inside <= least * (1 + kEqual) && draw() % ++equal == 0) {
        best = place;
      }
    }
    weight_[item] += area_[item];
    for (const int* other = beside_.begin(item); other != beside_.end(item); ++other) {
      const Bytes low = offsets[*other];
      if (low == kOut || low >= best + size || low + problem_.size[*other] <= best) continue;
      offsets[*other] = kOut;
      out_.push_back(*other);
    }
    offsets[item] = best;
  }

  uint64_t draw() {  // xorshift (Marsaglia 2003)
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    return random_ ^= random_ << 17;
  }

  static constexpr Bytes kOut = -1;
  static constexpr int64_t kSteps = 150;  // what a buffer beside the one to be placed costs, in nanoseconds
  static constexpr int64_t kGrowth = 4;
  static constexpr double kEqual = 1e-9;  // sums of weights differ by how they were added

  const Problem problem_;
  const Bytes capacity_;
  const Beside& beside_;
  uint64_t random_;
  int64_t moves_, work_;
  std::vector<int> order_, out_;  // the last is placed next
  std::vector<double> area_, weight_;
  std::vector<std::pair<Bytes, double>> begins_, ends_;
  std::vector<Bytes> places_;
};
