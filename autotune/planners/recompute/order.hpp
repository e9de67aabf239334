// Edit an order of runs: weigh and apply added or removed recomputations. The Python version is editable_order.py.
#pragma once

#include <deque>

#include "timeline.hpp"

struct Graph {
  List<i64> nbytes, scratch, op_bytes;
  List<double> seconds;
  List<int> maker;  // -1 for an input of the step
  List<char> repeatable, output;
  List<List<int>> reads, makes, sources, later_writers;
  i64 resident = 0;
  double smallest = 0;
  int ops() const { return static_cast<int>(seconds.size()); }
};

struct Price {
  i64 area;
  double seconds;
};

class Order {
 public:
  Order(const Graph* graph, const int* order, int size) : graph_(graph) { start(order, size); }

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

  // Weigh an edit: insert `chain` before `anchor` (-1: no chain), remove `removed` and all runs then unread. Return
  // false if a needed run would be removed. `commit` applies the edit that was weighed last.
  bool weigh(int anchor, const List<int>& chain, const List<int>& removed, Price& price) {
    work_ += 1 + static_cast<i64>(chain.size()) / 8;
    discard_edit();
    anchor_ = anchor;
    chain_ = chain;
    position_ = anchor >= 0 ? timeline_.position(anchor) : timeline_.size();
    removed_.clear();
    if (!gather(removed)) return false;
    price = sum_up();
    return true;
  }

  int commit() {
    const int first = static_cast<int>(op_of_.size());
    Step step;
    step.first = first;
    i64 live_bytes = 0;
    for (std::size_t i = 0; i < marks_.size(); ++i) {
      live_bytes += marks_[i].second;
      if (live_bytes && i + 1 < marks_.size()) {
        timeline_.add(marks_[i].first, marks_[i + 1].first, live_bytes);
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
    for (const int run : removed_) {
      const int position = timeline_.position(run);
      step.removed.push_back({run, position, timeline_.bytes_at(position)});
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

 protected:
  struct RemovedRun {
    int run, position;
    i64 bytes;
  };
  struct Step {
    int first = 0;
    List<RemovedRun> removed;
    List<std::pair<int, i64>> marks;
    List<std::pair<int, List<int>>> events;
  };
  struct Touched {
    int value = -1;
    List<int> events;
  };
  // -- current state -----------------------------------------------------------------------------------------------

  void start(const int* order, int size) {
    op_of_.assign(order, order + size);
    events_.assign(graph_->nbytes.size(), {});
    runs_.assign(graph_->ops(), {});
    slot_.assign(graph_->nbytes.size(), -1);
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
    i64 live_bytes = graph_->resident;
    for (int at = 0; at < size; ++at) {
      live_bytes += bytes[at];
      bytes[at] = live_bytes + graph_->scratch[order[at]];
    }
    bytes.pop_back();
    timeline_.start(bytes);
  }

  // Renumber runs by position: removed runs leave gaps in the numbers.
  void renumber() {
    List<int> ops(size());
    order(ops.data());
    const i64 limit = timeline_.limit();
    start(ops.data(), size());
    timeline_.set_limit(limit);
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
      while (index < static_cast<int>(events.size()) && timeline_.position(events[index]) < position) ++index;
      return index;
    }
    auto first = std::partition_point(events.begin(), events.end(),
                                      [&](int event) { return timeline_.position(event) < position; });
    return static_cast<int>(first - events.begin());
  }

  // True if a value is live just before a position; `begin` is the position after its last event.
  bool is_live(int value, int position, int& begin) const {
    const List<int>& value_events = events_[value];
    const int index = bisect(value_events, position);
    begin = index ? timeline_.position(value_events[index - 1]) + 1 : 0;
    if (index == static_cast<int>(value_events.size())) return graph_->output[value];
    return op_of_[value_events[index]] != graph_->maker[value];
  }

  bool may_run_before(int op, int position) const {
    if (!graph_->repeatable[op]) return false;
    for (const int writer : graph_->later_writers[op])
      if (position > timeline_.position(runs_[writer][0])) return false;
    return true;
  }

  int latest(int op, int position) const {
    const int index = bisect(runs_[op], position);
    return index ? runs_[op][index - 1] : -1;
  }

  List<int> repeats() const {
    List<int> repeated;
    for (const auto& op_runs : runs_)
      if (op_runs.size() > 1) repeated.insert(repeated.end(), op_runs.begin() + 1, op_runs.end());
    return repeated;
  }

  List<int> repeats_in_order() const {
    List<int> repeated;
    timeline_.each([&](int run, i64) {
      if (runs_[op_of_[run]][0] != run) repeated.push_back(run);
    });
    return repeated;
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
    auto& op_runs = runs_[op_of_[run]];
    op_runs.insert(op_runs.begin() + bisect(op_runs, timeline_.position(run)), run);
  }

  void delist(int run) {
    auto& op_runs = runs_[op_of_[run]];
    op_runs.erase(std::find(op_runs.begin(), op_runs.end(), run));
  }

  // -- weighing an edit --------------------------------------------------------------------------------------------

  void discard_edit() {
    for (int i = 0; i < used_; ++i) slot_[overlay_[i].value] = -1;
    used_ = 0;
  }

  List<int>& edited_events(int value) {
    if (slot_[value] < 0) {
      if (used_ == static_cast<int>(overlay_.size())) overlay_.emplace_back();
      overlay_[used_].value = value;
      overlay_[used_].events = events_[value];
      slot_[value] = used_++;
    }
    return overlay_[slot_[value]].events;
  }

  const List<int>& current_events(int value) const {
    return slot_[value] < 0 ? events_[value] : overlay_[slot_[value]].events;
  }

  bool gather(const List<int>& removed) {
    slots_.clear();
    for (int index = 0; index < static_cast<int>(chain_.size()); ++index) {
      const int op = chain_[index];
      for (const auto* list : {&graph_->reads[op], &graph_->makes[op]})
        for (const int value : *list) {
          const bool first = slot_[value] < 0;
          List<int>& value_events = edited_events(value);
          const int which = slot_[value];
          if (first) {
            slots_.resize(std::max<std::size_t>(slots_.size(), which + 1), 0);
            slots_[which] = bisect(value_events, position_);
          }
          value_events.insert(value_events.begin() + slots_[which]++, ~index);
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
        removed_.push_back(run);
        for (const auto* list : {&graph_->makes[op], &graph_->reads[op]})
          for (const int value : *list) {
            List<int>& value_events = edited_events(value);
            const auto event = std::find(value_events.begin(), value_events.end(), run);
            int slot = static_cast<int>(event - value_events.begin());
            value_events.erase(value_events.begin() + slot);
            const int maker = graph_->maker[value];
            if (maker == op || maker < 0) continue;
            while (slot-- > 0)
              if (op_at(value_events[slot]) == maker) {
                suspects_.emplace_back(maker, value_events[slot]);
                break;
              }
          }
        continue;
      }
      const auto [op, run] = suspects_.back();
      suspects_.pop_back();
      if (among(removed_, run) || among(pending, run) || !is_unread(op, run)) continue;
      if (run < 0) return false;  // nobody reads a result of the chain
      pending.push_back(run);
    }
    for (const int run : removed_) {
      const int op = op_of_[run];
      bool left = among(chain_, op);
      for (const int other : runs_[op]) left = left || !among(removed_, other);
      if (!left) return false;
    }
    for (int i = 0; i < used_; ++i) {
      const auto& value_events = overlay_[i].events;
      if (!value_events.empty() && op_at(value_events[0]) != graph_->maker[overlay_[i].value]) return false;
    }
    return true;
  }

  bool is_unread(int op, int run) const {
    for (const int value : graph_->makes[op]) {
      const List<int>& value_events = current_events(value);
      auto following = std::find(value_events.begin(), value_events.end(), run) + 1;
      if (following == value_events.end()) {
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
      const int begin = first < 0 ? position_ : timeline_.position(first);
      const int end = last < 0 ? position_ : last == kNever ? timeline_.size() : timeline_.position(last) + 1;
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
      i64 live_bytes = timeline_.bytes_at(position_) - graph_->op_bytes[op_of_[anchor_]];
      for (int i = 0; i < length; ++i) {
        live_bytes += inner_[i];
        local_.push_back(live_bytes + graph_->scratch[chain_[i]]);
        price.area += std::max<i64>(0, local_.back() - timeline_.limit());
        price.seconds += graph_->seconds[chain_[i]];
      }
    }
    i64 live_bytes = 0;
    for (std::size_t i = 0; i + 1 < marks_.size(); ++i) {
      live_bytes += marks_[i].second;
      if (live_bytes) price.area += timeline_.area_change(marks_[i].first, marks_[i + 1].first, live_bytes);
    }
    for (const int run : removed_) {
      const int where = timeline_.position(run);
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
      for (auto entry = step.removed.rbegin(); entry != step.removed.rend(); ++entry) {
        timeline_.insert(entry->position, entry->run, entry->bytes);
        enlist(entry->run);
      }
      for (int run = step.first; run < static_cast<int>(op_of_.size()); ++run) {
        timeline_.erase(run);
        delist(run);
      }
      op_of_.resize(step.first);
      timeline_.forget(step.first);
      for (auto& [value, events] : step.events) events_[value].swap(events);
      i64 live_bytes = 0;
      for (std::size_t i = 0; i + 1 < step.marks.size(); ++i) {
        live_bytes += step.marks[i].second;
        if (live_bytes) timeline_.add(step.marks[i].first, step.marks[i + 1].first, -live_bytes);
      }
      journal_.pop_back();
    }
  }

  void touch(int begin, int end) {
    span_low_ = std::min(span_low_, begin);
    span_high_ = std::max(span_high_, end);
  }

  const Graph* graph_;
  Timeline timeline_;
  List<int> op_of_;
  List<List<int>> events_, runs_;

  // edit being weighed
  int anchor_ = -1, position_ = 0, used_ = 0;
  List<int> chain_, removed_, pending_, slot_, slots_;
  List<std::pair<int, int>> suspects_;
  std::deque<Touched> overlay_;
  List<std::pair<int, i64>> marks_;
  List<i64> inner_, local_;

  // edits since the journal was started
  bool recording_ = false;
  double total_ = 0;
  i64 work_ = 0;
  int span_low_ = 0, span_high_ = 0;
  List<Step> journal_;
};
