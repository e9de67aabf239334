// The search of runs.py, evict.py and improve.py, compiled: the same moves with the same exact prices, a thousand times
// as often. Bytes lie in blocks of a few hundred positions with their highest, lowest and sum over the limit, so that a
// change touches single positions at its ends only and whole blocks in between.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

using i64 = std::int64_t;
template <class T>
using List = std::vector<T>;

namespace {

constexpr int kBlock = 256;
constexpr int kNever = std::numeric_limits<int>::max();
constexpr int kLongestChain = 400;
constexpr int kLongestOrder = 8;
constexpr double kInfinite = std::numeric_limits<double>::infinity();

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
};

struct Graph {
  List<i64> nbytes, scratch, own;
  List<double> seconds;
  List<int> maker;  // -1 for an input of the step
  List<char> repeatable, output;
  List<List<int>> reads, makes, sources, spoilers;
  i64 resident = 0;
  double smallest = 0;
  int ops() const { return static_cast<int>(seconds.size()); }
};

struct Over {
  i64 area, places;
};

// Runs in their order, each with the bytes that stand while it runs.
class Timeline {
 public:
  int size() const { return size_; }
  i64 limit() const { return limit_; }
  bool holds(int run) const { return block_of_[run] >= 0; }
  int at(int run) const { return blocks_[block_of_[run]].start + index_of_[run]; }

  void start(const List<i64>& bytes) {
    size_ = static_cast<int>(bytes.size());
    blocks_.clear();
    block_of_.resize(size_);
    index_of_.resize(size_);
    for (int begin = 0; begin < size_ || begin == 0; begin += kBlock) {
      Block block;
      block.start = begin;
      for (int at = begin; at < std::min(size_, begin + kBlock); ++at) {
        block.runs.push_back(at);
        block.bytes.push_back(bytes[at]);
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

  // What the bytes over the limit would change by if `amount` were added to every position.
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
    List<i64> bytes;  // less `add`
    i64 add = 0, high = 0, low = 0, area = 0, places = 0;
    int start = 0;
    bool stale = true;
  };

  int find(int position) const {
    auto after = std::upper_bound(blocks_.begin(), blocks_.end(), position,
                                  [](int wanted, const Block& block) { return wanted < block.start; });
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

  // Highest, lowest and over the limit of a block; `high` and `low` with what was added to the whole.
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
    const bool some = !block.bytes.empty();
    block.high = some ? high + block.add : 0;
    block.low = some ? low + block.add : 0;
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

struct Price {
  i64 area;
  double seconds;
};

class Search {
 public:
  Search(const Graph* graph, const int* order, int size) : graph_(graph) { start(order, size); }

  i64 peak() { return timeline_.size() ? timeline_.peak() : graph_->resident; }
  int size() const { return timeline_.size(); }
  void set_limit(i64 limit) { timeline_.set_limit(limit); }
  int run_at(int position) const { return timeline_.run_at(position); }

  double seconds() const {
    double sum = 0;
    timeline_.each([&](int run, i64) { sum += graph_->seconds[op_of_[run]]; });
    return sum;
  }

  void order(int* ops) const {
    timeline_.each([&](int run, i64) { *ops++ = op_of_[run]; });
  }

  void bytes(i64* out) const {
    timeline_.each([&](int, i64 bytes) { *out++ = bytes; });
  }

  // Weigh a change: run `chain` again just before `anchor` (-1: nothing), take `removed` out and all that nobody reads
  // then. False where a run that is needed would go. `commit` makes the change that was weighed last.
  bool weigh(int anchor, const List<int>& chain, const List<int>& removed, Price& price) {
    ++work_;
    forget_change();
    anchor_ = anchor;
    chain_ = chain;
    position_ = anchor >= 0 ? timeline_.at(anchor) : timeline_.size();
    gone_.clear();
    if (!gather(removed)) return false;
    price = sum_up();
    return true;
  }

  int commit() {
    const int first = static_cast<int>(op_of_.size());
    Step step;
    step.first = first;
    i64 standing = 0;
    for (std::size_t i = 0; i < marks_.size(); ++i) {
      standing += marks_[i].second;
      if (standing && i + 1 < marks_.size()) {
        timeline_.add(marks_[i].first, marks_[i + 1].first, standing);
        touch(marks_[i].first, marks_[i + 1].first);
      }
    }
    for (int i = 0; i < used_; ++i) {
      for (int& event : overlay_[i].events)
        if (event < 0) event = first + ~event;
      events_[overlay_[i].value].swap(overlay_[i].events);
    }
    for (std::size_t i = 0; i < chain_.size(); ++i) {
      const int run = first + static_cast<int>(i);
      op_of_.push_back(chain_[i]);
      timeline_.insert(position_ + static_cast<int>(i), run, local_[i]);
      enlist(run);
      total_ += graph_->seconds[chain_[i]];
    }
    for (const int run : gone_) {
      const int position = timeline_.at(run);
      step.gone.push_back({run, position, timeline_.bytes_at(position)});
      timeline_.erase(run);
      delist(run);
      total_ -= graph_->seconds[op_of_[run]];
    }
    if (recording_) {
      step.marks = marks_;
      for (int i = 0; i < used_; ++i) step.events.emplace_back(overlay_[i].value, overlay_[i].events);
      journal_.push_back(std::move(step));
    }
    return first;
  }

  // Evict until nothing is over the limit, or nothing helps.
  void fit(i64 limit, double greed, std::uint64_t taste_seed, double taste) {
    timeline_.set_limit(limit);
    greed_ = greed;
    taste_seed_ = taste_seed;
    taste_ = taste;
    price_ = 0;
    heap_.clear();
    const int longest = kLongestOrder * size() + 64;
    bool filled = false;
    while (peak() > limit && size() < longest) {
      int op, reader;
      if (!next(op, reader)) {
        if (filled) return;
        fill();
        filled = true;
        continue;
      }
      filled = false;
      Price price;
      if (!weigh(reader, best_chain_, {}, price)) return;
      price_ = std::max(0.0, price.seconds / static_cast<double>(-price.area));
      const int first = commit();
      push_touched(first);
    }
  }

  // Take back what is computed again without need, the dearest first; only what a change since `mark_span` may have
  // made needless if `nearby`.
  void undo(i64 limit, bool nearby) {
    timeline_.set_limit(limit);
    bool again = true;
    while (again) {
      again = false;
      List<int> found = repeats();
      std::stable_sort(found.begin(), found.end(), [&](int a, int b) { return cost(a) > cost(b); });
      for (const int run : found) {
        if (!timeline_.holds(run) || run == runs_[op_of_[run]][0]) continue;
        if (nearby && !in_span(run)) continue;
        if (!fits_longer(run)) continue;
        Price price;
        if (weigh(-1, {}, {run}, price) && price.area <= 0 && price.seconds < 0) {
          commit();
          again = true;
        }
      }
    }
  }

  // Local moves: take back a few, force a few, shift one; then evict what is over the limit and take back what is not
  // needed. First the bytes over the limit count, then the seconds; what got dearer by less than the heat is kept now
  // and then. Ends after `work` changes, with the best order that was seen.
  void improve(i64 limit, double greed, std::uint64_t seed, i64 work, double heat) {
    Random random{seed};
    timeline_.set_limit(limit);
    Standing now{timeline_.over(0, size()).area, seconds()}, best_standing = now;
    List<int> best = copy_order();
    const double floor = floor_seconds();
    work_ = 0;
    while (work_ < work) {
      const double left = 1.0 - static_cast<double>(work_) / static_cast<double>(work);
      if (static_cast<int>(op_of_.size()) > 4 * size() + 4096) {
        const List<int> same = copy_order();
        start(same.data(), static_cast<int>(same.size()));
        timeline_.set_limit(limit);
      }
      recording_ = true;
      journal_.clear();
      span_low_ = kNever, span_high_ = -1;
      total_ = now.seconds;
      work_ += 1 + size() / 64;
      perturb(random);
      if (peak() > limit) fit(limit, greed * (0.6 + 0.8 * random.unit()), random.next(), 0.5);
      undo(limit, true);
      recording_ = false;
      const i64 area = timeline_.over(0, size()).area;
      const double allowed = heat * left * left * (now.seconds - floor) * random.unit();
      const bool kept = area < now.area || (area == now.area && total_ <= now.seconds + allowed);
      if (!kept) {
        revert();
        continue;
      }
      now = {area, total_};
      if (area < best_standing.area || (area == best_standing.area && total_ < best_standing.seconds - 1e-12)) {
        best_standing = now;
        best = copy_order();
      }
      if (area == 0 && best_standing.seconds <= floor) break;
    }
    start(best.data(), static_cast<int>(best.size()));
  }

 private:
  struct Standing {
    i64 area;
    double seconds;
  };
  struct Gone {
    int run, position;
    i64 bytes;
  };
  struct Step {
    int first = 0;
    List<Gone> gone;
    List<std::pair<int, i64>> marks;
    List<std::pair<int, List<int>>> events;
  };
  struct Touched {
    int value = -1;
    List<int> events;
  };
  struct Candidate {
    double score;
    bool exact;
    int op, reader;
    bool operator<(const Candidate& other) const {
      if (score != other.score) return score < other.score;
      if (exact != other.exact) return exact;
      if (op != other.op) return op > other.op;
      return reader > other.reader;
    }
  };

  // -- the order as it is ------------------------------------------------------------------------------------------

  void start(const int* order, int size) {
    op_of_.assign(order, order + size);
    events_.assign(graph_->nbytes.size(), {});
    runs_.assign(graph_->ops(), {});
    slot_.assign(graph_->nbytes.size(), -1);
    seen_.assign(graph_->ops(), 0);
    stamp_ = 0;
    used_ = 0;
    List<i64> bytes(size + 1, 0);
    for (int run = 0; run < size; ++run) {
      const int op = order[run];
      runs_[op].push_back(run);
      for (const int value : graph_->reads[op]) events_[value].push_back(run);
      for (const int value : graph_->makes[op]) events_[value].push_back(run);
    }
    for (std::size_t value = 0; value < events_.size(); ++value)
      versions(static_cast<int>(value), events_[value], [&](int first, int last) {
        bytes[first] += graph_->nbytes[value];
        bytes[last == kNever ? size : last + 1] -= graph_->nbytes[value];
      });
    i64 standing = graph_->resident;
    for (int at = 0; at < size; ++at) {
      standing += bytes[at];
      bytes[at] = standing + graph_->scratch[order[at]];
    }
    bytes.pop_back();
    timeline_.start(bytes);
  }

  List<int> copy_order() const {
    List<int> ops(size());
    order(ops.data());
    return ops;
  }

  int op_at(int event) const { return event < 0 ? chain_[~event] : op_of_[event]; }
  double cost(int run) const { return graph_->seconds[op_of_[run]]; }

  double floor_seconds() const {
    double sum = 0;
    for (const double seconds : graph_->seconds) sum += seconds;
    return sum;
  }

  // First event of a value at or after a position.
  int bisect(const List<int>& events, int position) const {
    if (events.size() < 12) {
      int index = 0;
      while (index < static_cast<int>(events.size()) && timeline_.at(events[index]) < position) ++index;
      return index;
    }
    auto found = std::partition_point(events.begin(), events.end(),
                                      [&](int event) { return timeline_.at(event) < position; });
    return static_cast<int>(found - events.begin());
  }

  // Whether a value stands just before a position, and the position after its last event.
  bool live(int value, int position, int& begin) const {
    const List<int>& own = events_[value];
    const int index = bisect(own, position);
    begin = index ? timeline_.at(own[index - 1]) + 1 : 0;
    if (index == static_cast<int>(own.size())) return graph_->output[value];
    return op_of_[own[index]] != graph_->maker[value];
  }

  bool may_run_before(int op, int position) const {
    if (!graph_->repeatable[op]) return false;
    for (const int writer : graph_->spoilers[op])
      if (position > timeline_.at(runs_[writer][0])) return false;
    return true;
  }

  int latest(int op, int position) const {
    const int index = bisect(runs_[op], position);
    return index ? runs_[op][index - 1] : -1;
  }

  List<int> repeats() const {
    List<int> found;
    for (const auto& own : runs_)
      if (own.size() > 1) found.insert(found.end(), own.begin() + 1, own.end());
    return found;
  }

  List<int> repeats_in_order() const {
    List<int> found = repeats();
    std::sort(found.begin(), found.end(), [&](int a, int b) { return timeline_.at(a) < timeline_.at(b); });
    return found;
  }

  template <class F>
  void versions(int value, const List<int>& events, F&& visit) const {
    int first = kNever, last = kNever;
    for (const int event : events) {
      if (op_at(event) == graph_->maker[value]) {
        if (first != kNever) visit(first, last);
        first = event;
      }
      last = event;
    }
    if (first != kNever) visit(first, graph_->output[value] ? kNever : last);
  }

  void enlist(int run) {
    auto& own = runs_[op_of_[run]];
    own.insert(own.begin() + bisect(own, timeline_.at(run)), run);
  }

  void delist(int run) {
    auto& own = runs_[op_of_[run]];
    own.erase(std::find(own.begin(), own.end(), run));
  }

  // -- what a change would do --------------------------------------------------------------------------------------

  void forget_change() {
    for (int i = 0; i < used_; ++i) slot_[overlay_[i].value] = -1;
    used_ = 0;
  }

  List<int>& mine(int value) {
    if (slot_[value] < 0) {
      if (used_ == static_cast<int>(overlay_.size())) overlay_.emplace_back();
      overlay_[used_].value = value;
      overlay_[used_].events = events_[value];
      slot_[value] = used_++;
    }
    return overlay_[slot_[value]].events;
  }

  const List<int>& seen(int value) const { return slot_[value] < 0 ? events_[value] : overlay_[slot_[value]].events; }

  bool gather(const List<int>& removed) {
    slots_.clear();
    for (int index = 0; index < static_cast<int>(chain_.size()); ++index) {
      const int op = chain_[index];
      for (const auto* list : {&graph_->reads[op], &graph_->makes[op]})
        for (const int value : *list) {
          const bool first = slot_[value] < 0;
          List<int>& own = mine(value);
          const int which = slot_[value];
          if (first) {
            slots_.resize(std::max<std::size_t>(slots_.size(), which + 1), 0);
            slots_[which] = bisect(own, position_);
          }
          own.insert(own.begin() + slots_[which]++, ~index);
        }
    }
    suspects_.clear();
    for (const int op : chain_) {
      const int run = latest(op, position_);
      if (run >= 0) suspects_.emplace_back(op, run);
    }
    List<int>& pending = pending_;
    pending = removed;
    auto among = [](const List<int>& list, int run) { return std::find(list.begin(), list.end(), run) != list.end(); };
    while (!pending.empty() || !suspects_.empty()) {
      if (!pending.empty()) {
        const int run = pending.back();
        pending.pop_back();
        const int op = op_of_[run];
        gone_.push_back(run);
        for (const auto* list : {&graph_->makes[op], &graph_->reads[op]})
          for (const int value : *list) {
            List<int>& own = mine(value);
            int slot = static_cast<int>(std::find(own.begin(), own.end(), run) - own.begin());
            own.erase(own.begin() + slot);
            const int maker = graph_->maker[value];
            if (maker == op || maker < 0) continue;
            while (slot-- > 0)
              if (op_at(own[slot]) == maker) {
                suspects_.emplace_back(maker, own[slot]);
                break;
              }
          }
        continue;
      }
      const auto [op, run] = suspects_.back();
      suspects_.pop_back();
      if (among(gone_, run) || among(pending, run) || !dead(op, run)) continue;
      if (run < 0) return false;  // the chain makes something that nobody reads
      pending.push_back(run);
    }
    for (const int run : gone_) {
      const int op = op_of_[run];
      bool left = among(chain_, op);
      for (const int other : runs_[op]) left = left || !among(gone_, other);
      if (!left) return false;
    }
    for (int i = 0; i < used_; ++i) {
      const auto& own = overlay_[i].events;
      if (!own.empty() && op_at(own[0]) != graph_->maker[overlay_[i].value]) return false;
    }
    return true;
  }

  bool dead(int op, int run) const {
    for (const int value : graph_->makes[op]) {
      const List<int>& own = seen(value);
      auto following = std::find(own.begin(), own.end(), run) + 1;
      if (following == own.end()) {
        if (graph_->output[value]) return false;
      } else if (op_at(*following) != op) {
        return false;
      }
    }
    return true;
  }

  Price sum_up() {
    const int length = static_cast<int>(chain_.size());
    marks_.clear();
    inner_.assign(length + 1, 0);
    auto mark = [&](int first, int last, i64 amount) {
      const int begin = first < 0 ? position_ : timeline_.at(first);
      const int end = last < 0 ? position_ : last == kNever ? timeline_.size() : timeline_.at(last) + 1;
      if (begin < end) {
        marks_.emplace_back(begin, amount);
        marks_.emplace_back(end, -amount);
      }
      if (length) {
        const int enter = first < 0 ? ~first : begin < position_ ? 0 : length;
        const int leave = last < 0 ? ~last + 1 : end > position_ ? length : 0;
        if (enter < leave) {
          inner_[enter] += amount;
          inner_[leave] -= amount;
        }
      }
    };
    for (int i = 0; i < used_; ++i) {
      const int value = overlay_[i].value;
      const i64 bytes = graph_->nbytes[value];
      versions(value, events_[value], [&](int first, int last) { mark(first, last, -bytes); });
      versions(value, overlay_[i].events, [&](int first, int last) { mark(first, last, bytes); });
    }
    merge_marks();
    Price price{0, 0};
    local_.clear();
    if (length) {
      i64 standing = timeline_.bytes_at(position_) - graph_->own[op_of_[anchor_]];
      for (int i = 0; i < length; ++i) {
        standing += inner_[i];
        local_.push_back(standing + graph_->scratch[chain_[i]]);
        price.area += std::max<i64>(0, local_.back() - timeline_.limit());
        price.seconds += graph_->seconds[chain_[i]];
      }
    }
    i64 standing = 0;
    for (std::size_t i = 0; i + 1 < marks_.size(); ++i) {
      standing += marks_[i].second;
      if (standing) price.area += timeline_.area_change(marks_[i].first, marks_[i + 1].first, standing);
    }
    for (const int run : gone_) {
      const int where = timeline_.at(run);
      i64 inside = 0;
      for (const auto& [position, amount] : marks_) inside += position <= where ? amount : 0;
      price.area -= std::max<i64>(0, timeline_.bytes_at(where) + inside - timeline_.limit());
      price.seconds -= cost(run);
    }
    return price;
  }

  void merge_marks() {
    std::sort(marks_.begin(), marks_.end());
    std::size_t kept = 0;
    for (std::size_t i = 0; i < marks_.size();) {
      const int position = marks_[i].first;
      i64 amount = 0;
      for (; i < marks_.size() && marks_[i].first == position; ++i) amount += marks_[i].second;
      if (amount) marks_[kept++] = {position, amount};
    }
    marks_.resize(kept);
  }

  void revert() {
    while (!journal_.empty()) {
      Step& step = journal_.back();
      for (auto gone = step.gone.rbegin(); gone != step.gone.rend(); ++gone) {
        timeline_.insert(gone->position, gone->run, gone->bytes);
        enlist(gone->run);
      }
      for (int run = step.first; run < static_cast<int>(op_of_.size()); ++run) {
        timeline_.erase(run);
        delist(run);
      }
      op_of_.resize(step.first);
      timeline_.forget(step.first);
      for (auto& [value, events] : step.events) events_[value].swap(events);
      i64 standing = 0;
      for (std::size_t i = 0; i + 1 < step.marks.size(); ++i) {
        standing += step.marks[i].second;
        if (standing) timeline_.add(step.marks[i].first, step.marks[i + 1].first, -standing);
      }
      journal_.pop_back();
    }
  }

  // -- eviction ----------------------------------------------------------------------------------------------------

  double taste(int op) const {
    if (taste_ <= 0) return 1.0;
    Random own{taste_seed_ ^ (static_cast<std::uint64_t>(op) * 0xd1342543de82ef95ULL)};
    return 1.0 - taste_ * own.unit();
  }

  double score(int op, i64 gain, double seconds) const {
    if (gain <= 0) return 0.0;
    return taste(op) * std::exp(greed_ * std::log(static_cast<double>(gain))) / std::max(seconds, graph_->smallest);
  }

  // More than the score can be, as far as the op's own results tell.
  double bound(int op, int reader) {
    const int position = timeline_.at(reader);
    if (!may_run_before(op, position)) return 0.0;
    i64 gain = 0;
    for (const int value : graph_->makes[op]) {
      int begin;
      if (live(value, position, begin) && begin < position) {
        const Over over = timeline_.over(begin, position);
        gain += std::min(over.area, over.places * graph_->nbytes[value]);
      }
    }
    return score(op, gain, graph_->seconds[op]);
  }

  void consider(int op, int reader) {
    if (!graph_->repeatable[op]) return;
    const double most = bound(op, reader);
    if (most > 0) push({most, false, op, reader});
  }

  void push(Candidate candidate) {
    double& known = newest(candidate.op, candidate.reader);
    if (known == candidate.score) return;
    known = candidate.score;
    heap_.push_back(candidate);
    std::push_heap(heap_.begin(), heap_.end());
  }

  // The score under which a candidate was pushed last.
  double& newest(int op, int reader) {
    const auto& sources = graph_->sources[op_of_[reader]];
    const int index = static_cast<int>(std::find(sources.begin(), sources.end(), op) - sources.begin());
    if (reader >= static_cast<int>(newest_.size())) newest_.resize(reader + 1);
    auto& own = newest_[reader];
    if (own.size() != sources.size()) own.assign(sources.size(), 0.0);
    return own[index];
  }

  void fill() {
    heap_.clear();
    for (auto& own : newest_) own.clear();
    work_ += size() / 16;
    timeline_.each([&](int run, i64) {
      for (const int op : graph_->sources[op_of_[run]]) consider(op, run);
    });
  }

  void push_touched(int first) {
    for (int run = first; run < static_cast<int>(op_of_.size()); ++run)
      if (timeline_.holds(run))
        for (const int op : graph_->sources[op_of_[run]]) consider(op, run);
    const int used = used_;
    for (int i = 0; i < used; ++i) {
      const int value = overlay_[i].value, maker = graph_->maker[value];
      for (const int run : events_[value]) {
        const int op = op_of_[run];
        if (op != maker) consider(maker, run);
        if (graph_->repeatable[op])
          for (const int other : graph_->makes[op])
            for (const int reader : events_[other])
              if (op_of_[reader] != op) consider(op, reader);
      }
    }
  }

  bool next(int& op, int& reader) {
    while (!heap_.empty()) {
      const Candidate top = heap_.front();
      std::pop_heap(heap_.begin(), heap_.end());
      heap_.pop_back();
      if (!timeline_.holds(top.reader) || newest(top.op, top.reader) != top.score) continue;
      newest(top.op, top.reader) = 0.0;
      // a chain that costs so much that this comes up much later is not followed to its end now
      const double rival = heap_.empty() ? 0.0 : heap_.front().score;
      dearest_ = rival > 0 ? graph_->seconds[top.op] + 4.0 * (top.score / rival) *
                                 std::max(graph_->seconds[top.op], graph_->smallest) : kInfinite;
      cut_ = kInfinite;
      const double exact = best_way(top.op, top.reader);
      if (exact <= 0) {
        const double later = top.score * std::max(graph_->seconds[top.op], graph_->smallest) / cut_;
        if (cut_ < kInfinite && later < 0.5 * top.score) push({later, false, top.op, top.reader});
        continue;
      }
      if (heap_.empty() || exact >= heap_.front().score * 0.999) {
        op = top.op;
        reader = top.reader;
        return true;
      }
      push({exact, true, top.op, top.reader});
    }
    return false;
  }

  // The best way to make an op's results again just before a reader, in `best_chain_`; 0 if it brings nothing.
  double best_way(int op, int reader) {
    const int position = timeline_.at(reader);
    if (!may_run_before(op, position)) return 0.0;
    double best = 0.0;
    List<List<int>> tried;
    for (const double price : {price_, 0.0, kInfinite}) {
      if (!follow(op, position, price)) continue;
      if (std::find(tried.begin(), tried.end(), chain_found_) != tried.end()) continue;
      tried.push_back(chain_found_);
      Price made;
      if (!weigh(reader, chain_found_, {}, made) || made.area >= 0) continue;
      const double worth = score(op, -made.area, made.seconds);
      if (worth > best) {
        best = worth;
        best_chain_ = chain_found_;
      }
    }
    return best;
  }

  // What to run, in order, to have an op's results at a position: missing inputs live longer or are made too. An input
  // lives longer where that costs nothing over the limit, or less at `price` than its own op.
  bool follow(int op, int position, double price) {
    chain_found_.clear();
    chain_length_ = 0;
    chain_seconds_ = 0;
    ++stamp_;
    return need(op, position, price);
  }

  bool need(int op, int position, double price) {
    seen_[op] = stamp_;
    chain_seconds_ += graph_->seconds[op];
    if (chain_seconds_ > dearest_) cut_ = std::min(cut_, chain_seconds_);
    if (++chain_length_ > kLongestChain || chain_seconds_ > dearest_) return false;
    for (const int value : graph_->reads[op]) {
      const int source = graph_->maker[value];
      if (seen_[source] == stamp_) continue;
      int begin;
      if (live(value, position, begin) || !may_run_before(source, position)) continue;
      const i64 longer = timeline_.area_change(begin, position, graph_->nbytes[value]);
      const bool dearer =
          longer && (price == kInfinite || static_cast<double>(longer) * price > graph_->seconds[source]);
      if (dearer && !need(source, position, price)) return false;
    }
    chain_found_.push_back(op);
    return true;
  }

  // Whether what a run makes might as well have been kept; a cheap look that never says no wrongly.
  bool fits_longer(int run) {
    const int position = timeline_.at(run);
    int start = position;
    while (start) {
      const int before = timeline_.run_at(start - 1);
      if (before == runs_[op_of_[before]][0]) break;
      --start;  // what stands here may go with the run
    }
    for (const int value : graph_->makes[op_of_[run]]) {
      int begin, unused;
      live(value, position, begin);
      if (begin < start && live(value, position + 1, unused) &&
          timeline_.highest(begin, start) + graph_->nbytes[value] > timeline_.limit())
        return false;
    }
    return true;
  }

  // -- local moves -------------------------------------------------------------------------------------------------

  void perturb(Random& random) {
    const List<int> found = repeats_in_order();
    const int kind = found.empty() ? 7 : random.below(8);
    if (kind < 4) {
      take_back(found, random);
    } else if (kind < 5) {
      move(found, random);
    } else {
      force(random);
    }
  }

  void touch(int begin, int end) {
    span_low_ = std::min(span_low_, begin);
    span_high_ = std::max(span_high_, end);
  }

  bool in_span(int run) const {
    const int position = timeline_.at(run);
    if (position < span_low_ - 64) return false;
    for (const int value : graph_->makes[op_of_[run]]) {
      int begin;
      live(value, position, begin);
      if (begin <= span_high_ + 64) return true;
    }
    return false;
  }

  void take_out(int run) {
    if (!timeline_.holds(run) || run == runs_[op_of_[run]][0]) return;
    Price price;
    if (weigh(-1, {}, {run}, price)) commit();
  }

  void take_back(const List<int>& found, Random& random) {
    const int count = std::min(static_cast<int>(found.size()), 1 << random.below(5));
    if (random.below(2)) {
      const int start = random.below(static_cast<int>(found.size()) - count + 1);
      for (int i = 0; i < count; ++i) take_out(found[start + i]);
    } else {
      for (int i = 0; i < count; ++i) take_out(found[random.below(static_cast<int>(found.size()))]);
    }
  }

  // Compute something again that is kept: what else is computed again may then be kept instead.
  void force(Random& random) {
    const int count = 1 << random.below(3);
    const int centre = random.below(size());
    for (int i = 0, tries = 0; i < count && tries < 40; ++tries) {
      const int near = centre + random.below(129) - 64;
      if (near < 0 || near >= size()) continue;
      const int reader = timeline_.run_at(near);
      const auto& sources = graph_->sources[op_of_[reader]];
      if (sources.empty()) continue;
      const int op = sources[random.below(static_cast<int>(sources.size()))];
      const int position = timeline_.at(reader);
      if (!may_run_before(op, position)) continue;
      bool idle = false;
      for (const int value : graph_->makes[op]) {
        int begin;
        idle = idle || (live(value, position, begin) && begin < position - 2);
      }
      if (!idle) continue;
      const double price = random.below(2) ? kInfinite : 0.0;
      Price made;
      dearest_ = kInfinite;
      if (follow(op, position, price) && weigh(reader, chain_found_, {}, made)) {
        commit();
        ++i;
      }
    }
  }

  // Run something again at another place: earlier, where its inputs still stand, or later.
  void move(const List<int>& found, Random& random) {
    const int run = found[random.below(static_cast<int>(found.size()))];
    const int position = timeline_.at(run), op = op_of_[run];
    int begin = 0, first = 0;
    for (const int value : graph_->makes[op]) {
      live(value, position, begin);
      first = std::max(first, begin);
    }
    if (first >= position) return;
    const int reach = std::min(position - first, 1 << random.below(9));
    const int target = position - 1 - random.below(reach);
    if (!may_run_before(op, target)) return;
    const int anchor = timeline_.run_at(target);
    Price price;
    dearest_ = kInfinite;
    if (follow(op, target, random.below(2) ? kInfinite : 0.0) && weigh(anchor, chain_found_, {run}, price)) commit();
  }

  const Graph* graph_;
  Timeline timeline_;
  List<int> op_of_;
  List<List<int>> events_, runs_;

  // the change that is weighed
  int anchor_ = -1, position_ = 0, used_ = 0;
  List<int> chain_, gone_, pending_, slot_, slots_;
  List<std::pair<int, int>> suspects_;
  std::deque<Touched> overlay_;
  List<std::pair<int, i64>> marks_;
  List<i64> inner_, local_;

  // eviction
  double greed_ = 1.5, price_ = 0, taste_ = 0;
  std::uint64_t taste_seed_ = 0;
  List<Candidate> heap_;
  List<List<double>> newest_;
  List<int> best_chain_, chain_found_;
  List<i64> seen_;
  i64 stamp_ = 0;
  int chain_length_ = 0;
  double chain_seconds_ = 0, dearest_ = kInfinite, cut_ = kInfinite;  // seconds at which a chain is given up, was

  // local moves
  bool recording_ = false;
  double total_ = 0;
  i64 work_ = 0;
  int span_low_ = 0, span_high_ = 0;
  List<Step> journal_;
};

List<List<int>> lists(const int* starts, const int* items, int count) {
  List<List<int>> made(count);
  for (int i = 0; i < count; ++i) made[i].assign(items + starts[i], items + starts[i + 1]);
  return made;
}

}  // namespace

extern "C" {

void* graph_new(int ops, int values, const i64* nbytes, const i64* scratch, const double* seconds, const int* maker,
                const char* repeatable, const char* output, const int* read_starts, const int* reads,
                const int* make_starts, const int* makes, const int* spoiler_starts, const int* spoilers,
                i64 resident) {
  auto* graph = new Graph;
  graph->nbytes.assign(nbytes, nbytes + values);
  graph->scratch.assign(scratch, scratch + ops);
  graph->seconds.assign(seconds, seconds + ops);
  graph->maker.assign(maker, maker + values);
  graph->repeatable.assign(repeatable, repeatable + ops);
  graph->output.assign(output, output + values);
  graph->reads = lists(read_starts, reads, ops);
  graph->makes = lists(make_starts, makes, ops);
  graph->spoilers = lists(spoiler_starts, spoilers, ops);
  graph->resident = resident;
  double sum = 0;
  for (int op = 0; op < ops; ++op) {
    i64 own = scratch[op];
    for (const int value : graph->makes[op]) own += nbytes[value];
    graph->own.push_back(own);
    sum += seconds[op];
    List<int> sources;
    for (const int value : graph->reads[op])
      if (std::find(sources.begin(), sources.end(), maker[value]) == sources.end()) sources.push_back(maker[value]);
    graph->sources.push_back(std::move(sources));
  }
  graph->smallest = 1e-4 * sum / std::max(1, ops);
  return graph;
}

void graph_free(void* graph) { delete static_cast<Graph*>(graph); }

void* search_new(const void* graph, const int* order, int size) {
  return new Search(static_cast<const Graph*>(graph), order, size);
}
void* search_copy(const void* search) { return new Search(*static_cast<const Search*>(search)); }
void search_free(void* search) { delete static_cast<Search*>(search); }

i64 search_peak(void* search) { return static_cast<Search*>(search)->peak(); }
double search_seconds(const void* search) { return static_cast<const Search*>(search)->seconds(); }
int search_size(const void* search) { return static_cast<const Search*>(search)->size(); }
void search_order(const void* search, int* ops) { static_cast<const Search*>(search)->order(ops); }
void search_bytes(const void* search, i64* bytes) { static_cast<const Search*>(search)->bytes(bytes); }

// Make one change if it is allowed; positions, not runs. Returns whether it was made.
int search_change(void* handle, i64 limit, int anchor, const int* chain, int chain_size, const int* removed,
                  int removed_size, i64* area, double* seconds) {
  auto* search = static_cast<Search*>(handle);
  search->set_limit(limit);
  List<int> gone;
  for (int i = 0; i < removed_size; ++i) gone.push_back(search->run_at(removed[i]));
  Price price;
  if (!search->weigh(anchor < 0 ? -1 : search->run_at(anchor), List<int>(chain, chain + chain_size), gone, price))
    return 0;
  *area = price.area;
  *seconds = price.seconds;
  search->commit();
  return 1;
}

void search_fit(void* search, i64 limit, double greed, std::uint64_t seed, double taste) {
  static_cast<Search*>(search)->fit(limit, greed, seed, taste);
}
void search_undo(void* search, i64 limit) { static_cast<Search*>(search)->undo(limit, false); }
void search_improve(void* search, i64 limit, double greed, std::uint64_t seed, i64 work, double heat) {
  static_cast<Search*>(search)->improve(limit, greed, seed, work, heat);
}
}
