// Ejection search. A buffer that fits nowhere goes where it displaces the least; the displaced buffers are placed next. A
// buffer that was often displaced in vain weighs more (Nagata and Braysy 2009, for vehicle routes).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "problem.hpp"

// Per buffer the buffers with overlapping lives.
class Neighbours {
 public:
  // Empty, and `complete` false, if there are more than `max_pairs` pairs.
  Neighbours(const Problem& problem, int64_t max_pairs) : begin_(problem.count + 1, 0) {
    std::vector<int> order(problem.count);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return problem.born[a] < problem.born[b]; });
    std::vector<std::pair<int, int>> pairs;
    std::vector<int> alive;
    for (const int item : order) {
      std::erase_if(alive, [&](int other) { return problem.died[other] <= problem.born[item]; });
      for (const int other : alive) pairs.emplace_back(item, other);
      if (static_cast<int64_t>(pairs.size()) > max_pairs) return;
      alive.push_back(item);
    }
    for (const auto& [a, b] : pairs) ++begin_[a + 1], ++begin_[b + 1];
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    items_.resize(2 * pairs.size());
    std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
    for (const auto& [a, b] : pairs) {
      items_[next[a]++] = b;
      items_[next[b]++] = a;
    }
    complete = true;
  }

  const int* begin(int item) const { return items_.data() + begin_[item]; }
  const int* end(int item) const { return items_.data() + begin_[item + 1]; }

  bool complete = false;

 private:
  std::vector<int64_t> begin_;
  std::vector<int> items_;
};

// Repeated attempts, each from nothing and with other choices among equals. No buffer may exceed the capacity.
class Ejection {
 public:
  // `first`: keys; higher keys are placed earlier. `power`: exponent of the area that is a buffer's initial weight.
  Ejection(const Problem& problem, Bytes capacity, const Neighbours& neighbours, const double* first, double power,
           uint64_t seed, int64_t moves, int64_t work)
      : offsets(problem.count, kOut), problem_(problem), capacity_(capacity), neighbours_(neighbours), random_(seed),
        moves_(moves), work_(work), order_(problem.count), area_(problem.count), weight_(problem.count) {
    for (int item = 0; item < problem.count; ++item) {
      const double area = static_cast<double>(problem.size[item]) * (problem.died[item] - problem.born[item]);
      order_[item] = item;
      area_[item] = std::pow(std::max(1.0, area), power);
    }
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return first[a] < first[b]; });
  }

  Outcome attempt() {
    if (out_of_work()) return kOutOfWork;
    std::fill(offsets.begin(), offsets.end(), kOut);
    weight_ = area_;
    out_ = order_;
    for (int64_t left = moves_; !out_.empty(); --left) {
      if (left == 0 || work_ < 0) {
        moves_ += moves_ / kGrowth;
        return kOutOfWork;
      }
      const int item = out_.back();
      out_.pop_back();
      put(item);
    }
    return kSolved;
  }

  bool out_of_work() const { return work_ < 0; }

  std::vector<Bytes> offsets;

 private:
  void put(int item) {
    const Bytes size = problem_.size[item], aligned = problem_.aligned[item];
    const Bytes last = (capacity_ - size) / aligned * aligned;
    begins_.clear();
    ends_.clear();
    places_ = {0, last};
    for (const int* other = neighbours_.begin(item); other != neighbours_.end(item); ++other) {
      const Bytes low = offsets[*other];
      if (low == kOut) continue;
      const Bytes high = low + problem_.size[*other];
      begins_.emplace_back(low - size, weight_[*other]);
      ends_.emplace_back(high, weight_[*other]);
      if (round_up(high, aligned) <= last) places_.push_back(round_up(high, aligned));
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
      if (begun == ended) {  // the lowest place with nothing in the way
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
    for (const int* other = neighbours_.begin(item); other != neighbours_.end(item); ++other) {
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
  static constexpr int64_t kSteps = 150;  // cost in nanoseconds of each buffer that overlaps the placed one
  static constexpr int64_t kGrowth = 4;
  static constexpr double kEqual = 1e-9;  // sums of weights depend on the order of addition

  const Problem problem_;
  const Bytes capacity_;
  const Neighbours& neighbours_;
  uint64_t random_;
  int64_t moves_, work_;
  std::vector<int> order_, out_;  // the last buffer is placed next
  std::vector<double> area_, weight_;
  std::vector<std::pair<Bytes, double>> begins_, ends_;
  std::vector<Bytes> places_;
};
