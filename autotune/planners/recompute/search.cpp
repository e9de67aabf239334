// Compiled version of eviction.py and local_moves.py: similar moves with the same exact costs, about 1000 times as
// many.
#include <cmath>

#include "order.hpp"

namespace {

constexpr int kLongestChain = 400;
constexpr int kLongestOrder = 8;
constexpr int kPatience = 3;  // local moves end after 1 / kPatience of their work without gain
constexpr double kGain = 1e-5;
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

class Search : public Order {
 public:
  using Order::Order;

  // Evict until no position exceeds the limit, or no eviction helps; return the number of edits weighed.
  i64 fit(i64 limit, double greed, std::uint64_t perturbation_seed, double perturbation) {
    const i64 begun = work_;
    timeline_.set_limit(limit);
    greed_ = greed;
    perturbation_seed_ = perturbation_seed;
    perturbation_ = perturbation;
    price_ = 0;
    heap_.clear();
    const int longest = kLongestOrder * size() + 64;
    bool filled = false;
    while (peak() > limit && size() < longest) {
      int op, reader;
      if (!next(op, reader)) {
        if (filled) break;
        fill();
        filled = true;
        continue;
      }
      filled = false;
      Price price;
      if (!weigh(reader, best_chain_, {}, price)) break;
      price_ = std::max(0.0, price.seconds / static_cast<double>(-price.area));
      const int first = commit();
      push_touched(first);
    }
    return work_ - begun;
  }

  // Undo recomputations that the limit does not need, the most expensive first. With `nearby`, check only those that
  // the edits since the journal was started may have made needless.
  void undo(i64 limit, bool nearby) {
    timeline_.set_limit(limit);
    bool improved = true;
    while (improved) {
      improved = false;
      List<int> repeated = repeats();
      if (nearby) std::erase_if(repeated, [&](int run) { return !in_span(run); });
      std::stable_sort(repeated.begin(), repeated.end(), [&](int a, int b) { return cost(a) > cost(b); });
      note_kept();
      for (const int run : repeated) {
        if (!timeline_.contains(run) || run == runs_[op_of_[run]][0]) continue;
        if (!fits_longer(run)) continue;
        Price price;
        if (weigh(-1, {}, {run}, price) && price.area <= 0 && price.seconds < 0) {
          commit();
          improved = true;
        }
      }
    }
  }

  // Apply local moves: undo a few recomputations, force a few, move one; then evict down to the limit and undo
  // needless ones. Minimizes bytes over the limit, then seconds. Ends after `work` weighed edits.
  void improve(i64 limit, double greed, std::uint64_t seed, i64 work) {
    Random random{seed};
    timeline_.set_limit(limit);
    i64 area = timeline_.over(0, size()).area;
    double now = seconds();
    const double floor = floor_seconds();
    work_ = 0;
    i64 gained = 0;
    while (work_ < work && work_ - gained < work / kPatience) {
      if (static_cast<int>(op_of_.size()) > 4 * size() + 4096) renumber();
      recording_ = true;
      journal_.clear();
      span_low_ = kNever, span_high_ = -1;
      total_ = now;
      work_ += 1 + size() / 64;
      perturb(random);
      if (peak() > limit) fit(limit, greed * (0.6 + 0.8 * random.unit()), random.next(), 0.5);
      undo(limit, true);
      recording_ = false;
      const i64 left = timeline_.over(0, size()).area;
      if (left < area || (left == area && total_ <= now)) {
        if (left < area || total_ < now * (1 - kGain)) gained = work_;
        area = left;
        now = total_;
      } else {
        revert();
      }
      if (area == 0 && now <= floor) break;
    }
    renumber();
  }

 private:
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

  // -- eviction ----------------------------------------------------------------------------------------------------

  double score_factor(int op) const {
    if (perturbation_ <= 0) return 1.0;
    Random op_random{perturbation_seed_ ^ (static_cast<std::uint64_t>(op) * 0xd1342543de82ef95ULL)};
    return 1.0 - perturbation_ * op_random.unit();
  }

  double score(int op, i64 gain, double seconds) const {
    if (gain <= 0) return 0.0;
    const double worth = std::exp(greed_ * std::log(static_cast<double>(gain)));
    return score_factor(op) * worth / std::max(seconds, graph_->smallest);
  }

  // Upper bound of the score, from the op's own results alone.
  double bound(int op, int reader) {
    const int position = timeline_.position(reader);
    if (!may_run_before(op, position)) return 0.0;
    i64 gain = 0;
    for (const int value : graph_->makes[op]) {
      int begin;
      if (is_live(value, position, begin) && begin < position) {
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
    double& pushed = newest(candidate.op, candidate.reader);
    if (pushed == candidate.score) return;
    pushed = candidate.score;
    heap_.push_back(candidate);
    std::push_heap(heap_.begin(), heap_.end());
  }

  // Score with which a candidate was pushed last.
  double& newest(int op, int reader) {
    const auto& sources = graph_->sources[op_of_[reader]];
    const int index = static_cast<int>(std::find(sources.begin(), sources.end(), op) - sources.begin());
    if (reader >= static_cast<int>(newest_.size())) newest_.resize(reader + 1);
    auto& scores = newest_[reader];
    if (scores.size() != sources.size()) scores.assign(sources.size(), 0.0);
    return scores[index];
  }

  void fill() {
    heap_.clear();
    for (auto& scores : newest_) scores.clear();
    work_ += size() / 16;
    timeline_.each([&](int run, i64) {
      for (const int op : graph_->sources[op_of_[run]]) consider(op, run);
    });
  }

  void push_touched(int first) {
    for (int run = first; run < static_cast<int>(op_of_.size()); ++run)
      if (timeline_.contains(run))
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
      if (!timeline_.contains(top.reader) || newest(top.op, top.reader) != top.score) continue;
      newest(top.op, top.reader) = 0.0;
      const double exact = best_way(top.op, top.reader);
      if (exact <= 0) continue;
      if (heap_.empty() || exact >= heap_.front().score * 0.999) {
        op = top.op;
        reader = top.reader;
        return true;
      }
      push({exact, true, top.op, top.reader});
    }
    return false;
  }

  // Store the best chain to recompute an op just before a reader in `best_chain_` and return its score; 0 for no gain.
  double best_way(int op, int reader) {
    const int position = timeline_.position(reader);
    if (!may_run_before(op, position)) return 0.0;
    double best = 0.0;
    List<List<int>> tried;
    for (const double price : {price_, 0.0, kInfinite}) {
      if (!follow(op, position, price)) continue;
      if (std::find(tried.begin(), tried.end(), candidate_chain_) != tried.end()) continue;
      tried.push_back(candidate_chain_);
      Price edit;
      if (!weigh(reader, candidate_chain_, {}, edit) || edit.area >= 0) continue;
      const double worth = score(op, -edit.area, edit.seconds);
      if (worth > best) {
        best = worth;
        best_chain_ = candidate_chain_;
      }
    }
    return best;
  }

  // Store the ops to run, in order, to recompute an op at a position in `candidate_chain_`. A missing input is kept
  // live longer if that costs nothing over the limit, or at `price` less than its own op. Otherwise it is recomputed
  // too.
  bool follow(int op, int position, double price) {
    candidate_chain_.clear();
    chain_length_ = 0;
    if (visited_.empty()) visited_.assign(graph_->ops(), 0);
    ++stamp_;
    const bool complete = extend(op, position, price);
    if (!complete) work_ += chain_length_ / 8;  // count the abandoned chain as if it had been weighed
    return complete;
  }

  bool extend(int op, int position, double price) {
    visited_[op] = stamp_;
    if (++chain_length_ > kLongestChain) return false;
    for (const int value : graph_->reads[op]) {
      const int source = graph_->maker[value];
      if (visited_[source] == stamp_) continue;
      int begin;
      if (is_live(value, position, begin) || !may_run_before(source, position)) continue;
      if (price == 0 || !graph_->nbytes[value]) continue;
      const bool dearer =
          price == kInfinite
              ? timeline_.reaches(begin, position, graph_->nbytes[value])
              : static_cast<double>(timeline_.area_change(begin, position, graph_->nbytes[value])) * price >
                    graph_->seconds[source];
      if (dearer && !extend(source, position, price)) return false;
    }
    candidate_chain_.push_back(op);
    return true;
  }

  // Note, per run, the last earlier run that is its op's first: undoing recomputations never removes it.
  void note_kept() {
    kept_before_.resize(op_of_.size());
    int kept = -1;
    timeline_.each([&](int run, i64) {
      kept_before_[run] = kept;
      if (run == runs_[op_of_[run]][0]) kept = run;
    });
  }

  // Return false only if keeping the results of a run would exceed the limit: a cheap necessary condition.
  bool fits_longer(int run) {
    const int position = timeline_.position(run);
    const int kept = kept_before_[run];
    const int start = kept < 0 ? 0 : timeline_.position(kept) + 1;  // later runs may be removed together with this one
    for (const int value : graph_->makes[op_of_[run]]) {
      int begin, unused;
      is_live(value, position, begin);
      if (begin < start && is_live(value, position + 1, unused) &&
          timeline_.highest(begin, start) + graph_->nbytes[value] > timeline_.limit())
        return false;
    }
    return true;
  }

  // -- local moves -------------------------------------------------------------------------------------------------

  void perturb(Random& random) {
    const List<int> repeated = repeats_in_order();
    const int kind = repeated.empty() ? 5 + random.below(3) : random.below(8);
    if (kind < 4) {
      undo_some(repeated, random);
    } else if (kind < 5) {
      move(repeated, random);
    } else if (kind < 6) {
      share(random);
    } else {
      force(random);
    }
  }

  bool in_span(int run) const {
    const int position = timeline_.position(run);
    if (position < span_low_ - 64) return false;
    for (const int value : graph_->makes[op_of_[run]]) {
      int begin;
      is_live(value, position, begin);
      if (begin <= span_high_ + 64) return true;
    }
    return false;
  }

  void remove_repeat(int run) {
    if (!timeline_.contains(run) || run == runs_[op_of_[run]][0]) return;
    Price price;
    if (weigh(-1, {}, {run}, price)) commit();
  }

  void undo_some(const List<int>& repeated, Random& random) {
    const int count = std::min(static_cast<int>(repeated.size()), 1 << random.below(5));
    if (random.below(2)) {
      const int start = random.below(static_cast<int>(repeated.size()) - count + 1);
      for (int i = 0; i < count; ++i) remove_repeat(repeated[start + i]);
    } else {
      for (int i = 0; i < count; ++i) remove_repeat(repeated[random.below(static_cast<int>(repeated.size()))]);
    }
  }

  // Force recomputation of a kept result, so that another result can be kept instead.
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
      const int position = timeline_.position(reader);
      if (!may_run_before(op, position)) continue;
      bool idle = false;
      for (const int value : graph_->makes[op]) {
        int begin;
        idle = idle || (is_live(value, position, begin) && begin < position - 2);
      }
      if (!idle) continue;
      const double price = random.below(2) ? kInfinite : 0.0;
      Price edit;
      if (follow(op, position, price) && weigh(reader, candidate_chain_, {}, edit)) {
        commit();
        ++i;
      }
    }
  }

  // Recompute all results of one value. Each alone would pay for the longer life of that value; together they pay once
  // (Echo, MXNet #18228).
  void share(Random& random) {
    const auto& reads = graph_->reads[op_of_[timeline_.run_at(random.below(size()))]];
    if (reads.empty()) return;
    const List<int> readers = events_[reads[random.below(static_cast<int>(reads.size()))]];
    const int least = 1 << random.below(12);
    int count = 0;
    for (const int run : readers) {
      const int op = op_of_[run];
      if (count == 32) break;
      if (!timeline_.contains(run) || !graph_->repeatable[op]) continue;
      int anchor = -1, longest = least;
      for (const int value : graph_->makes[op]) {
        const List<int>& value_events = events_[value];
        for (std::size_t i = 0; i + 1 < value_events.size(); ++i) {
          const int next = value_events[i + 1], gap = timeline_.position(next) - timeline_.position(value_events[i]);
          if (gap > longest && op_of_[next] != op) longest = gap, anchor = next;
        }
      }
      Price price;
      if (anchor < 0 || !may_run_before(op, timeline_.position(anchor))) continue;
      if (!follow(op, timeline_.position(anchor), 0.0) || !weigh(anchor, candidate_chain_, {}, price)) continue;
      commit();
      ++count;
    }
  }

  // Move a recomputation earlier, to a position where its inputs are still live.
  void move(const List<int>& repeated, Random& random) {
    const int run = repeated[random.below(static_cast<int>(repeated.size()))];
    const int position = timeline_.position(run), op = op_of_[run];
    int begin = 0, first = 0;
    for (const int value : graph_->makes[op]) {
      is_live(value, position, begin);
      first = std::max(first, begin);
    }
    if (first >= position) return;
    const int reach = std::min(position - first, 1 << random.below(9));
    const int target = position - 1 - random.below(reach);
    if (!may_run_before(op, target)) return;
    const int anchor = timeline_.run_at(target);
    Price price;
    const double most = random.below(2) ? kInfinite : 0.0;
    if (follow(op, target, most) && weigh(anchor, candidate_chain_, {run}, price)) commit();
  }

  // eviction
  double greed_ = 1.5, price_ = 0, perturbation_ = 0;
  std::uint64_t perturbation_seed_ = 0;
  List<Candidate> heap_;
  List<List<double>> newest_;
  List<int> best_chain_, candidate_chain_;
  List<int> kept_before_;
  List<i64> visited_;
  i64 stamp_ = 0;
  int chain_length_ = 0;
};

List<List<int>> lists(const int* starts, const int* items, int count) {
  List<List<int>> result(count);
  for (int i = 0; i < count; ++i) result[i].assign(items + starts[i], items + starts[i + 1]);
  return result;
}

}  // namespace

extern "C" {

void* graph_new(int ops, int values, const i64* nbytes, const i64* scratch, const double* seconds, const int* maker,
                const char* repeatable, const char* output, const int* read_starts, const int* reads,
                const int* make_starts, const int* makes, const int* later_writer_starts, const int* later_writers,
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
  graph->later_writers = lists(later_writer_starts, later_writers, ops);
  graph->resident = resident;
  double sum = 0;
  for (int op = 0; op < ops; ++op) {
    i64 bytes = scratch[op];
    for (const int value : graph->makes[op]) bytes += nbytes[value];
    graph->op_bytes.push_back(bytes);
    sum += seconds[op];
    List<int> sources;
    for (const int value : graph->reads[op])
      if (std::find(sources.begin(), sources.end(), maker[value]) == sources.end()) sources.push_back(maker[value]);
    graph->sources.push_back(std::move(sources));
  }
  graph->smallest = sum > 0 ? 1e-4 * sum / ops : 1.0;  // if no op takes any time
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

// Apply one edit, given by positions instead of runs. Return 0 if it is refused.
int search_change(void* handle, i64 limit, int anchor, const int* chain, int chain_size, const int* removed,
                  int removed_size, i64* area, double* seconds) {
  auto* search = static_cast<Search*>(handle);
  search->set_limit(limit);
  List<int> runs;
  for (int i = 0; i < removed_size; ++i) runs.push_back(search->run_at(removed[i]));
  Price price;
  if (!search->weigh(anchor < 0 ? -1 : search->run_at(anchor), List<int>(chain, chain + chain_size), runs, price))
    return 0;
  *area = price.area;
  *seconds = price.seconds;
  search->commit();
  return 1;
}

i64 search_fit(void* search, i64 limit, double greed, std::uint64_t seed, double perturbation) {
  return static_cast<Search*>(search)->fit(limit, greed, seed, perturbation);
}
void search_undo(void* search, i64 limit) { static_cast<Search*>(search)->undo(limit, false); }
void search_improve(void* search, i64 limit, double greed, std::uint64_t seed, i64 work) {
  static_cast<Search*>(search)->improve(limit, greed, seed, work);
}
}
