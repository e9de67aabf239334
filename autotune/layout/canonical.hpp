// Search among canonical layouts, an idea of minimalloc (Moffitt, ASPLOS 2023). Buffers are placed in rising order of
// offset, each as low as the earlier ones allow, and equal offsets by rank. Every layout becomes canonical if its buffers
// drop as far as they can. So if no canonical layout fits, no layout does. A search that takes too long restarts, and
// buffers that did not fit before come first.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "problem.hpp"

// State that a search hands on to its restart.
struct Effort {
  int64_t trials;  // placements of one attempt
  int64_t work;  // work left for all attempts, in steps of about a nanosecond
  std::vector<double> blame;  // per buffer: how often it did not fit
};

class Search {
 public:
  Search(const Problem& problem, Bytes capacity, const std::vector<int>& rank, Effort& effort)
      : problem_(problem), capacity_(capacity), rank_(rank), effort_(effort), trials_(effort.trials),
        offset_(problem.count, 0), placed_(problem.count, false), first_(problem.count), last_(problem.count) {
    number_cliques();
    full_.resize(cliques_);
  }

  Outcome run() {
    std::vector<int> all(problem_.count);
    std::iota(all.begin(), all.end(), 0);
    if (!is_possible(all, 0, -1)) return kInfeasible;
    for (const std::vector<int>& part : components_of(all, -1)) {
      const Outcome outcome = solve(part, 0, -1);
      if (outcome != kSolved) return outcome;
    }
    return kSolved;
  }

  const std::vector<Bytes>& offsets() const { return offset_; }

 private:
  struct Undo {
    int item;
    Bytes offset;
  };

  // Number the cliques. A clique is a maximal set of overlapping lives: births, then the first death after them.
  void number_cliques() {
    std::vector<int> births(problem_.count), deaths(problem_.count);
    std::iota(births.begin(), births.end(), 0);
    deaths = births;
    std::sort(births.begin(), births.end(), [&](int a, int b) { return problem_.born[a] < problem_.born[b]; });
    std::sort(deaths.begin(), deaths.end(), [&](int a, int b) { return problem_.died[a] < problem_.died[b]; });
    size_t born = 0;
    bool grew = false;
    for (const int dies : deaths) {
      for (; born < births.size() && problem_.born[births[born]] < problem_.died[dies]; ++born) {
        first_[births[born]] = cliques_;
        grew = true;
      }
      if (grew) ++cliques_;
      grew = false;
      last_[dies] = cliques_ - 1;
    }
  }

  bool overlap(int a, int b) const { return first_[a] <= last_[b] && first_[b] <= last_[a]; }

  // Split a part without one buffer into components whose lives do not overlap.
  std::vector<std::vector<int>> components_of(const std::vector<int>& part, int without) const {
    std::vector<int> sorted;
    sorted.reserve(part.size());
    for (const int item : part)
      if (item != without) sorted.push_back(item);
    std::sort(sorted.begin(), sorted.end(), [&](int a, int b) {
      return first_[a] != first_[b] ? first_[a] < first_[b] : a < b;
    });
    std::vector<std::vector<int>> components;
    int end = -1;
    for (const int item : sorted) {
      if (first_[item] > end) components.emplace_back();
      components.back().push_back(item);
      end = std::max(end, last_[item]);
    }
    return components;
  }

  // Return true if every clique can still hold its unplaced buffers, each at its lowest possible offset or above.
  bool is_possible(const std::vector<int>& part, Bytes low, int rank) {
    std::vector<std::pair<Bytes, int>> released;
    released.reserve(part.size());
    Bytes lowest = std::numeric_limits<Bytes>::max(), second = lowest;
    int lowest_item = -1;
    for (const int item : part) {
      if (placed_[item]) continue;
      const Bytes top = std::max(offset_[item], low) + problem_.size[item];
      if (top < lowest) {
        second = lowest;
        lowest = top;
        lowest_item = item;
      } else {
        second = std::min(second, top);
      }
    }
    int from = cliques_, to = -1;
    for (const int item : part) {
      if (placed_[item]) continue;
      Bytes release = offset_[item];
      // a buffer whose turn has passed must be lifted by another
      if (release < low || (release == low && rank_[item] < rank)) {
        const Bytes lifted = item == lowest_item ? second : lowest;
        if (lifted == std::numeric_limits<Bytes>::max()) return false;
        release = std::max(low, round_up(lifted, problem_.aligned[item]));
      }
      if (release + problem_.size[item] > capacity_) {
        ++effort_.blame[item];
        return false;
      }
      released.emplace_back(release, item);
      from = std::min(from, first_[item]);
      to = std::max(to, last_[item]);
    }
    std::sort(released.begin(), released.end());
    std::fill(full_.begin() + from, full_.begin() + std::max(from, to + 1), 0);
    for (const auto& [release, item] : released) {
      const Bytes size = problem_.size[item];
      for (int clique = first_[item]; clique <= last_[item]; ++clique)
        full_[clique] = std::max(full_[clique], release) + size;
      effort_.work -= kSteps + last_[item] - first_[item];
    }
    for (int clique = from; clique <= to; ++clique) {
      if (full_[clique] <= capacity_) continue;
      blame(released, clique);
      return false;
    }
    return true;
  }

  void blame(const std::vector<std::pair<Bytes, int>>& released, int clique) {
    const auto lives = [&](const auto& entry) { return first_[entry.second] <= clique && clique <= last_[entry.second]; };
    const double share = 1.0 / std::count_if(released.begin(), released.end(), lives);
    for (const auto& entry : released)
      if (lives(entry)) effort_.blame[entry.second] += share;
  }

  Outcome solve(const std::vector<int>& part, Bytes low, int rank) {
    if (part.empty()) return kSolved;
    // another buffer fits below the lowest top, so no canonical layout continues above it
    Bytes height = std::numeric_limits<Bytes>::max();
    effort_.work -= kSteps * static_cast<int64_t>(part.size());
    for (const int item : part) height = std::min(height, offset_[item] + problem_.size[item]);
    std::vector<int> next;
    for (const int item : part) {
      const Bytes offset = offset_[item];
      if (offset < low || offset >= height || (offset == low && rank_[item] < rank)) continue;
      next.push_back(item);
    }
    std::sort(next.begin(), next.end(), [&](int a, int b) {
      return offset_[a] != offset_[b] ? offset_[a] < offset_[b] : rank_[a] < rank_[b];
    });
    for (const int item : next) {
      if (--trials_ < 0 || effort_.work < 0) return kOutOfWork;
      const size_t mark = trail_.size();
      const Bytes offset = offset_[item];
      placed_[item] = true;
      Outcome outcome = lift(part, item) && is_possible(part, offset, rank_[item]) ? kSolved : kInfeasible;
      if (outcome == kSolved) {
        for (const std::vector<int>& rest : components_of(part, item)) {
          outcome = solve(rest, offset, rank_[item]);
          if (outcome != kSolved) break;
        }
        if (outcome != kInfeasible) return outcome;
      }
      for (; trail_.size() > mark; trail_.pop_back()) {
        const Undo& undo = trail_.back();
        if (undo.offset < 0) placed_[undo.item] = false;
        else offset_[undo.item] = undo.offset;
      }
      placed_[item] = false;
    }
    return kInfeasible;
  }

  // Raise the buffers beside a placed buffer; return false if one no longer fits.
  bool lift(const std::vector<int>& part, int item) {
    trail_.push_back({item, -1});
    const Bytes top = offset_[item] + problem_.size[item];
    for (const int other : part) {
      if (placed_[other] || !overlap(item, other)) continue;
      const Bytes lifted = round_up(top, problem_.aligned[other]);
      if (lifted <= offset_[other]) continue;
      trail_.push_back({other, offset_[other]});
      offset_[other] = lifted;
      if (lifted + problem_.size[other] > capacity_) {
        ++effort_.blame[other];
        return false;
      }
    }
    return true;
  }

  static constexpr int64_t kSteps = 20;  // cost of a buffer beside its cliques

  const Problem problem_;
  const Bytes capacity_;
  const std::vector<int>& rank_;
  Effort& effort_;
  int64_t trials_;
  std::vector<Bytes> offset_;  // offset of a placed buffer; lowest possible offset of another
  std::vector<char> placed_;
  std::vector<int> first_, last_;  // first and last clique of each buffer
  int cliques_ = 0;
  std::vector<Bytes> full_;
  std::vector<Undo> trail_;
};

// Repeated search; each attempt moves the buffers that did not fit ahead by `pull`.
class Restarts {
 public:
  Restarts(const Problem& problem, Bytes capacity, const double* key, double pull, int64_t trials, int64_t work)
      : problem_(problem), capacity_(capacity), key_(key), pull_(pull),
        effort_{trials, work, std::vector<double>(problem.count, 0.0)}, weight_(problem.count, 0.0) {}

  Outcome attempt() {
    if (effort_.work < 0) return kOutOfWork;
    const double most = std::max(1e-9, *std::max_element(weight_.begin(), weight_.end()));
    std::vector<int> order(problem_.count), rank(problem_.count);
    std::iota(order.begin(), order.end(), 0);
    const auto score = [&](int item) { return key_[item] + pull_ * weight_[item] / most; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return score(a) > score(b); });
    for (int index = 0; index < problem_.count; ++index) rank[order[index]] = index;
    Search search(problem_, capacity_, rank, effort_);
    const Outcome outcome = search.run();
    if (outcome == kSolved) offsets = search.offsets();
    const double all = std::max(1e-9, std::accumulate(effort_.blame.begin(), effort_.blame.end(), 0.0));
    for (int item = 0; item < problem_.count; ++item) {
      weight_[item] = kDecay * weight_[item] + effort_.blame[item] / all;
      effort_.blame[item] = 0;
    }
    effort_.trials += effort_.trials / kGrowth + 1;
    return outcome;
  }

  bool out_of_work() const { return effort_.work < 0; }

  std::vector<Bytes> offsets;

 private:
  static constexpr double kDecay = 0.9;  // share of earlier blame that remains
  static constexpr int64_t kGrowth = 32;  // attempts grow, so that a long search can finish

  const Problem problem_;
  const Bytes capacity_;
  const double* key_;
  const double pull_;
  Effort effort_;
  std::vector<double> weight_;
};
