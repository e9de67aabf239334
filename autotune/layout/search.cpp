// Layouts of buffers in one block: a greedy layout for a given order, and two searches for a layout within a capacity.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "canonical.hpp"
#include "ejection.hpp"
#include "problem.hpp"

namespace {

struct Placed {
  Bytes offset, end;
  int64_t born, died;
};

Bytes place(const Problem& problem, const int* order, bool tight, Bytes* offsets) {
  std::vector<Placed> placed;  // by offset
  placed.reserve(problem.count);
  Bytes bytes = 0;
  for (int index = 0; index < problem.count; ++index) {
    const int item = order[index];
    const Bytes size = problem.size[item], aligned = problem.aligned[item];
    const int64_t born = problem.born[item], died = problem.died[item];
    Bytes floor = 0, best = -1, narrowest = std::numeric_limits<Bytes>::max();
    for (const Placed& other : placed) {
      if (other.born >= died || other.died <= born) continue;
      const Bytes gap = other.offset - floor;
      if (gap >= size && gap < narrowest) {
        best = floor;
        narrowest = gap;
        if (!tight) break;
      }
      floor = std::max(floor, round_up(other.end, aligned));
    }
    const Bytes offset = best < 0 ? floor : best;
    const Placed interval{offset, offset + size, born, died};
    const auto before = [](const Placed& a, const Placed& b) { return a.offset < b.offset; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), interval, before), interval);
    offsets[item] = offset;
    bytes = std::max(bytes, offset + size);
  }
  return bytes;
}

// Seed of the first random search.
constexpr uint64_t kSeed = 0x9E3779B97F4A7C15;

// Run searches in parallel, one attempt of each per turn. Return the row of the earliest attempt that ends with another
// outcome than kOutOfWork, and of those the first row; -1 if none does. The result does not depend on the number of
// threads.
template <typename Searches>
int race(Searches& searches, std::vector<Outcome>& outcomes) {
  const int rows = static_cast<int>(searches.size());
  outcomes.assign(rows, kOutOfWork);
  std::atomic<int64_t> earliest{std::numeric_limits<int64_t>::max()};  // turn * rows + row
  const int threads = std::min<int>(rows, std::max(1u, std::thread::hardware_concurrency()));
  const auto work_on = [&](int thread) {
    for (int64_t turn = 0;; ++turn) {
      bool active = false;
      for (int row = thread; row < rows; row += threads) {
        const int64_t number = turn * rows + row;
        if (outcomes[row] != kOutOfWork || searches[row].out_of_work() || number > earliest) continue;
        active = true;
        outcomes[row] = searches[row].attempt();
        if (outcomes[row] == kOutOfWork) continue;
        int64_t lowest = earliest;
        while (number < lowest && !earliest.compare_exchange_weak(lowest, number)) {
        }
      }
      if (!active) return;
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work_on, thread);
  work_on(0);
  for (std::thread& other : others) other.join();
  return earliest == std::numeric_limits<int64_t>::max() ? -1 : static_cast<int>(earliest % rows);
}

}  // namespace

extern "C" {

// Place each buffer in turn in the narrowest (`tight`) or lowest gap that holds it. Return the bytes of the whole block.
int64_t layout_place(int count, const int64_t* size, const int64_t* born, const int64_t* died, const int64_t* aligned,
                     const int* order, int tight, int64_t* offsets) {
  return place({count, size, born, died, aligned}, order, tight != 0, offsets);
}

// Search among canonical layouts, once for each row of `keys` (higher keys come earlier) and its `pull`. Each search has
// `trials` placements in its first attempt, and `work` in all. Return 1 with offsets, 0 if there is no layout, -1 if the
// work ran out.
int layout_search(int count, const int64_t* size, const int64_t* born, const int64_t* died, const int64_t* aligned,
                  int64_t capacity, int searches, const double* keys, const double* pulls, int64_t trials, int64_t work,
                  int64_t* offsets) {
  const Problem problem{count, size, born, died, aligned};
  std::vector<Restarts> runs;
  for (int row = 0; row < searches; ++row)
    runs.emplace_back(problem, capacity, keys + static_cast<int64_t>(row) * count, pulls[row], trials, work);
  std::vector<Outcome> outcomes;
  const int row = race(runs, outcomes);
  if (row < 0) return kOutOfWork;
  if (outcomes[row] == kSolved) std::copy(runs[row].offsets.begin(), runs[row].offsets.end(), offsets);
  return outcomes[row];
}

// Run the ejection search, once for each row of `keys` (higher keys come earlier) and its `power`. Each search has `moves`
// placements in its first attempt, and `work` in all. Return 1 with offsets, -1 if the work ran out, or if more than
// `max_pairs` pairs of lives overlap.
int layout_eject(int count, const int64_t* size, const int64_t* born, const int64_t* died, const int64_t* aligned,
                 int64_t capacity, int searches, const double* keys, const double* powers, int64_t moves, int64_t work,
                 int64_t max_pairs, int64_t* offsets) {
  const Problem problem{count, size, born, died, aligned};
  const Neighbours neighbours(problem, max_pairs);
  if (!neighbours.complete) return kOutOfWork;
  std::vector<Ejection> runs;
  for (int row = 0; row < searches; ++row)
    runs.emplace_back(problem, capacity, neighbours, keys + static_cast<int64_t>(row) * count, powers[row], kSeed + row,
                      moves, work);
  std::vector<Outcome> outcomes;
  const int row = race(runs, outcomes);
  if (row < 0) return kOutOfWork;
  std::copy(runs[row].offsets.begin(), runs[row].offsets.end(), offsets);
  return kSolved;
}
}
