// Layouts of buffers in one block: a greedy one for a given order, and two searches for one within a capacity.

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
  for (int at = 0; at < problem.count; ++at) {
    const int item = order[at];
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
      floor = std::max(floor, up(other.end, aligned));
    }
    const Bytes offset = best < 0 ? floor : best;
    const Placed mine{offset, offset + size, born, died};
    const auto before = [](const Placed& a, const Placed& b) { return a.offset < b.offset; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), mine, before), mine);
    offsets[item] = offset;
    bytes = std::max(bytes, offset + size);
  }
  return bytes;
}

// Of the first search that draws lots.
constexpr uint64_t kSeed = 0x9E3779B97F4A7C15;

// Searches side by side, a try of each in turn: the row of the earliest try that says more than kSpent, and of those the
// first row, -1 where none does. It does not hang on the number of threads.
template <typename Searches>
int race(Searches& searches, std::vector<Found>& found) {
  const int rows = static_cast<int>(searches.size());
  found.assign(rows, kSpent);
  std::atomic<int64_t> earliest{std::numeric_limits<int64_t>::max()};  // try * rows + row
  const int threads = std::min<int>(rows, std::max(1u, std::thread::hardware_concurrency()));
  const auto work_on = [&](int thread) {
    for (int64_t turn = 0;; ++turn) {
      bool going = false;
      for (int mine = thread; mine < rows; mine += threads) {
        const int64_t number = turn * rows + mine;
        if (found[mine] != kSpent || searches[mine].spent() || number > earliest) continue;
        going = true;
        found[mine] = searches[mine].next();
        if (found[mine] == kSpent) continue;
        int64_t known = earliest;
        while (number < known && !earliest.compare_exchange_weak(known, number)) {
        }
      }
      if (!going) return;
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

// Each buffer in turn into the narrowest (`tight`) or the lowest gap that holds it; the bytes that all of them take.
int64_t layout_place(int count, const int64_t* size, const int64_t* born, const int64_t* died, const int64_t* aligned,
                     const int* order, int tight, int64_t* offsets) {
  return place({count, size, born, died, aligned}, order, tight != 0, offsets);
}

// Searches among canonical layouts, one for each row of `keys` (the higher, the earlier) and its `pull`, each with `trials`
// in its first try and so much work in all: 1 with offsets, 0 where no layout exists, -1 where the work was spent.
int layout_search(int count, const int64_t* size, const int64_t* born, const int64_t* died, const int64_t* aligned,
                  int64_t capacity, int searches, const double* keys, const double* pulls, int64_t trials, int64_t work,
                  int64_t* offsets) {
  const Problem problem{count, size, born, died, aligned};
  std::vector<Restarts> made;
  for (int mine = 0; mine < searches; ++mine)
    made.emplace_back(problem, capacity, keys + static_cast<int64_t>(mine) * count, pulls[mine], trials, work);
  std::vector<Found> found;
  const int mine = race(made, found);
  if (mine < 0) return kSpent;
  if (found[mine] == kSolved) std::copy(made[mine].offsets.begin(), made[mine].offsets.end(), offsets);
  return found[mine];
}

// Searches that take out what is in the way, one for each row of `keys` (the higher, the earlier) and its `power`, each with
// `moves` in its first try and so much work in all: 1 with offsets, -1 where the work was spent, or more than `most` pairs
// live beside each other.
int layout_eject(int count, const int64_t* size, const int64_t* born, const int64_t* died, const int64_t* aligned,
                 int64_t capacity, int searches, const double* keys, const double* powers, int64_t moves, int64_t work,
                 int64_t most, int64_t* offsets) {
  const Problem problem{count, size, born, died, aligned};
  const Beside beside(problem, most);
  if (!beside.known) return kSpent;
  std::vector<Ejection> made;
  for (int mine = 0; mine < searches; ++mine)
    made.emplace_back(problem, capacity, beside, keys + static_cast<int64_t>(mine) * count, powers[mine], kSeed + mine,
                      moves, work);
  std::vector<Found> found;
  const int mine = race(made, found);
  if (mine < 0) return kSpent;
  std::copy(made[mine].offsets.begin(), made[mine].offsets.end(), offsets);
  return kSolved;
}
}
