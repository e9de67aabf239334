// Runs in order with the bytes at each, in blocks of a few hundred runs. A block stores its maximum, its minimum and
// its sum over the limit, so an edit touches single positions at its ends and whole blocks in between.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

using i64 = std::int64_t;
template <class T>
using List = std::vector<T>;

constexpr int kBlock = 256;
constexpr int kNever = std::numeric_limits<int>::max();

struct Over {
  i64 area, places;
};

// Runs in order, each with the live bytes while it runs.
class Timeline {
 public:
  int size() const { return size_; }
  i64 limit() const { return limit_; }
  bool contains(int run) const { return block_of_[run] >= 0; }
  int position(int run) const { return blocks_[block_of_[run]].start + index_of_[run]; }

  void start(const List<i64>& bytes) {
    size_ = static_cast<int>(bytes.size());
    blocks_.clear();
    block_of_.resize(size_);
    index_of_.resize(size_);
    for (int begin = 0; begin < size_ || begin == 0; begin += kBlock) {
      Block block;
      block.start = begin;
      for (int run = begin; run < std::min(size_, begin + kBlock); ++run) {
        block.runs.push_back(run);
        block.bytes.push_back(bytes[run]);
      }
      blocks_.push_back(std::move(block));
      number(static_cast<int>(blocks_.size()) - 1);
    }
  }

  void set_limit(i64 limit) {
    limit_ = limit;
    for (auto& block : blocks_) block.stale = true;
  }

  int run_at(int position) const {
    const Block& block = blocks_[find(position)];
    return block.runs[position - block.start];
  }

  i64 bytes_at(int position) const {
    const Block& block = blocks_[find(position)];
    return block.bytes[position - block.start] + block.add;
  }

  i64 peak() {
    i64 high = std::numeric_limits<i64>::min();
    for (auto& block : blocks_)
      if (!block.runs.empty()) high = std::max(high, fresh(block).high);
    return high;
  }

  i64 highest(int begin, int end) {
    i64 high = std::numeric_limits<i64>::min();
    pieces(begin, end, [&](Block& block, int low, int top) {
      if (top - low == static_cast<int>(block.runs.size())) {
        high = std::max(high, fresh(block).high);
      } else {
        i64 inner = std::numeric_limits<i64>::min();
        for (int i = low; i < top; ++i) inner = std::max(inner, block.bytes[i]);
        high = std::max(high, inner + block.add);
      }
    });
    return high;
  }

  // Bytes over the limit, summed over positions, and how many positions are over it.
  Over over(int begin, int end) {
    Over sum{0, 0};
    pieces(begin, end, [&](Block& block, int low, int top) {
      fresh(block);
      if (block.high <= limit_) return;
      if (top - low == static_cast<int>(block.runs.size())) {
        sum.area += block.area;
        sum.places += block.places;
      } else {
        const i64 room = limit_ - block.add;
        for (int i = low; i < top; ++i) {
          sum.area += std::max<i64>(0, block.bytes[i] - room);
          sum.places += block.bytes[i] > room;
        }
      }
    });
    return sum;
  }

  // True if any position would exceed the limit after adding `amount` to all; checks the last positions first.
  bool reaches(int begin, int end, i64 amount) {
    if (begin >= end) return false;
    for (int which = find(end - 1); which >= 0 && blocks_[which].start + size_of(which) > begin; --which) {
      Block& block = blocks_[which];
      if (block.runs.empty() || fresh(block).high + amount <= limit_) continue;
      const int low = std::max(0, begin - block.start), top = std::min(size_of(which), end - block.start);
      if (top - low == size_of(which)) return true;
      const i64 room = limit_ - block.add - amount;
      for (int i = top; i-- > low;)
        if (block.bytes[i] > room) return true;
    }
    return false;
  }

  // Change of the bytes over the limit after adding `amount` to every position.
  i64 area_change(int begin, int end, i64 amount) {
    i64 change = 0;
    pieces(begin, end, [&](Block& block, int low, int top) {
      fresh(block);
      if (block.high + std::max<i64>(amount, 0) <= limit_) return;
      if (block.low + std::min<i64>(amount, 0) >= limit_) {
        change += amount * (top - low);
        return;
      }
      const i64 room = limit_ - block.add;
      for (int i = low; i < top; ++i)
        change += std::max<i64>(0, block.bytes[i] + amount - room) - std::max<i64>(0, block.bytes[i] - room);
    });
    return change;
  }

  void add(int begin, int end, i64 amount) {
    pieces(begin, end, [&](Block& block, int low, int top) {
      if (top - low == static_cast<int>(block.runs.size())) {
        block.add += amount;
      } else {
        for (int i = low; i < top; ++i) block.bytes[i] += amount;
      }
      block.stale = true;
    });
  }

  void insert(int position, int run, i64 bytes) {
    const int which = find(position);
    Block& block = blocks_[which];
    const int index = position - block.start;
    block.runs.insert(block.runs.begin() + index, run);
    block.bytes.insert(block.bytes.begin() + index, bytes - block.add);
    block.stale = true;
    if (run >= static_cast<int>(block_of_.size())) {
      block_of_.resize(run + 1, -1);
      index_of_.resize(run + 1, -1);
    }
    number(which, index);
    shift(which + 1, 1);
    ++size_;
    if (static_cast<int>(block.runs.size()) >= 2 * kBlock) split(which);
  }

  void erase(int run) {
    const int which = block_of_[run], index = index_of_[run];
    Block& block = blocks_[which];
    block.runs.erase(block.runs.begin() + index);
    block.bytes.erase(block.bytes.begin() + index);
    block.stale = true;
    block_of_[run] = -1;
    number(which, index);
    shift(which + 1, -1);
    --size_;
  }

  void forget(int first_run) {
    block_of_.resize(first_run);
    index_of_.resize(first_run);
  }

  template <class F>
  void each(F&& visit) const {
    for (const auto& block : blocks_)
      for (std::size_t i = 0; i < block.runs.size(); ++i) visit(block.runs[i], block.bytes[i] + block.add);
  }

 private:
  struct Block {
    List<int> runs;
    List<i64> bytes;  // without the block's `add`
    i64 add = 0, high = 0, low = 0, area = 0, places = 0;
    int start = 0;
    bool stale = true;
  };

  int size_of(int which) const { return static_cast<int>(blocks_[which].runs.size()); }

  int find(int position) const {
    auto after = std::upper_bound(blocks_.begin(), blocks_.end(), position,
                                  [](int target, const Block& block) { return target < block.start; });
    return static_cast<int>(after - blocks_.begin()) - 1;
  }

  template <class F>
  void pieces(int begin, int end, F&& visit) {
    if (begin >= end) return;
    for (int which = find(begin); which < static_cast<int>(blocks_.size()) && blocks_[which].start < end; ++which) {
      Block& block = blocks_[which];
      const int low = std::max(0, begin - block.start);
      const int top = std::min(static_cast<int>(block.runs.size()), end - block.start);
      if (low < top) visit(block, low, top);
    }
  }

  // Refresh the maximum, minimum and excess of a block; `high` and `low` include the block's `add`.
  Block& fresh(Block& block) {
    if (!block.stale) return block;
    i64 high = std::numeric_limits<i64>::min(), low = std::numeric_limits<i64>::max(), area = 0, places = 0;
    const i64 room = limit_ - block.add;
    for (const i64 bytes : block.bytes) {
      high = std::max(high, bytes);
      low = std::min(low, bytes);
      area += std::max<i64>(0, bytes - room);
      places += bytes > room;
    }
    const bool filled = !block.bytes.empty();
    block.high = filled ? high + block.add : 0;
    block.low = filled ? low + block.add : 0;
    block.area = area;
    block.places = places;
    block.stale = false;
    return block;
  }

  void number(int which, int from = 0) {
    Block& block = blocks_[which];
    for (int i = from; i < static_cast<int>(block.runs.size()); ++i) {
      block_of_[block.runs[i]] = which;
      index_of_[block.runs[i]] = i;
    }
  }

  void shift(int from, int amount) {
    for (int which = from; which < static_cast<int>(blocks_.size()); ++which) blocks_[which].start += amount;
  }

  void split(int which) {
    Block tail;
    {
      Block& block = blocks_[which];
      tail.runs.assign(block.runs.begin() + kBlock, block.runs.end());
      tail.bytes.assign(block.bytes.begin() + kBlock, block.bytes.end());
      block.runs.resize(kBlock);
      block.bytes.resize(kBlock);
      block.stale = true;
      tail.add = block.add;
      tail.start = block.start + kBlock;
    }
    blocks_.insert(blocks_.begin() + which + 1, std::move(tail));
    for (int i = which + 1; i < static_cast<int>(blocks_.size()); ++i) number(i);
  }

  List<Block> blocks_;
  List<int> block_of_, index_of_;
  int size_ = 0;
  i64 limit_ = 0;
};
