// A replay allocator behind c10's CPU allocator: it records the allocations of one training step, made in a heap that
// wastes nothing, and gives each one its planned slot in the next. The plan is a hint: an allocation takes its slot only
// where the size matches and nothing lives there, else it goes to the system's allocator and is counted as a miss.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "heap.hpp"
#include "poison.hpp"
#include "ranges.hpp"

namespace {

struct Event {
  int64_t size;
  int64_t born;
  int64_t died;  // -1: outlives the step
};

struct Slot {
  int64_t offset;  // -1: not in the arena
  int64_t size;
};

struct Arena {
  char* base = nullptr;
  int64_t bytes = 0;
  std::vector<Slot> slots;
  std::map<int64_t, int64_t> live;  // offset -> end
  bool resting = false;             // its pages go back to the system as soon as nothing lives there
  int64_t live_bytes = 0;
  int64_t most = -1;                // that the step's own may take while nothing of the user's own is away; -1: all there is
  int64_t away = 0;                 // bytes of the user's own
  int64_t outside = 0;              // bytes that this step allocated and that found no place here
  int64_t reached = 0, top = 0;     // what the step's own took beyond `away`: at most in this step, and in it or the one before
  Ranges resident;                  // pages that take memory; kept only while there is a limit
  int64_t misses = 0;
  int64_t hits = 0;
};

struct Pages {
  int64_t begin, end;
};

// All that a range touches.
Pages pages(int64_t begin, int64_t end) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  return {begin / page * page, (end + page - 1) / page * page};
}

// Looking for pages takes time: a little more than must goes, and only so many slots ahead are spared.
constexpr int64_t kSpare = int64_t{1} << 20;
constexpr size_t kAhead = 512;

void give_back(Arena& arena, Pages gone) {
  madvise(arena.base + gone.begin, gone.end - gone.begin, MADV_DONTNEED);
  poison(arena.base + gone.begin, std::min(gone.end, arena.bytes) - gone.begin);
  arena.resident.cut(gone.begin, gone.end);
}

void give_all_back(Arena& arena) {
  if (arena.base != nullptr && arena.live.empty()) give_back(arena, pages(0, arena.bytes));
}

// Give pages back on which nothing lives until no more is left than the step takes anyway at its fullest, kernels' scratch
// included; as far as there are others not those that slots from `next` on, and the next step's, need soon.
void keep_to_limit(Arena& arena, size_t next) {
  if (arena.most < 0) return;
  arena.reached = std::max({arena.reached, arena.most, arena.live_bytes + arena.outside - arena.away});
  arena.top = std::max(arena.top, arena.reached);
  const int64_t over = arena.resident.bytes() + arena.outside - arena.top - arena.away;
  const int64_t page = pages(0, 1).end;
  if (over <= 0 || arena.resident.bytes() - arena.live_bytes < page) return;
  const int64_t wanted = over + kSpare;
  Ranges idle = arena.resident;
  const auto cut = [&idle](Pages used) { idle.cut(used.begin, used.end); };
  for (const auto& [begin, end] : arena.live) cut(pages(begin, end));
  for (size_t i = 0; i < std::min(kAhead, arena.slots.size()); ++i) {
    const Slot slot = arena.slots[(next + i) % arena.slots.size()];
    if (slot.offset < 0) continue;
    const Pages used = pages(slot.offset, slot.offset + slot.size);
    if (idle.bytes() - idle.covered(used.begin, used.end) < wanted) break;
    cut(used);
  }
  int64_t left = wanted;
  for (const auto& [begin, end] : idle) {
    const Pages gone = pages(begin, std::min(end, begin + left));
    give_back(arena, gone);
    if ((left -= gone.end - gone.begin) <= 0) break;
  }
}

enum class Mode { kOff, kRecord, kReplay, kKeep };

std::mutex mutex;
c10::Allocator* original = nullptr;
std::vector<Arena*> arenas;  // never shrinks: a tensor may outlive its arena's user
std::atomic<int> arena_count{0};

Heap heap;  // of the steps that are recorded; its mappings are of the user's own that come back, too
std::vector<Event> events;
std::unordered_map<void*, size_t> recording;
std::atomic<bool> is_recording{false};
int64_t moment = 0;

std::unordered_multimap<size_t, void*> kept;        // by bytes, of what was freed while memory is kept
std::unordered_map<void*, size_t> handed_out;       // with the bytes asked for, what was allocated then, `kept` included
std::atomic<bool> is_keeping{false}, any_kept{false};

// only the thread that runs the step is replayed: data loaders and autograd threads stay outside
thread_local Mode mode = Mode::kOff;
thread_local Arena* current = nullptr;
thread_local size_t position = 0;

Arena* owner(void* data) {
  const int count = arena_count.load(std::memory_order_acquire);
  for (int i = 0; i < count; ++i) {
    Arena* arena = arenas[i];
    if (data >= arena->base && data < arena->base + arena->bytes) return arena;
  }
  return nullptr;
}

// Whether it is kept for a later request; what outlived the keeping goes.
bool keep(void* data) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = handed_out.find(data);
  if (found == handed_out.end()) return false;
  if (is_keeping) {
    kept.emplace(found->second, data);
    return true;
  }
  handed_out.erase(found);
  any_kept = !handed_out.empty();
  return false;
}

void release(void* data) {
  if (data == nullptr) return;
  if (Arena* arena = owner(data)) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto slot = arena->live.find(static_cast<char*>(data) - arena->base);
    if (slot == arena->live.end()) return stop("freed twice", data);
    poison(data, slot->second - slot->first);
    arena->live_bytes -= slot->second - slot->first;
    arena->live.erase(slot);
    if (arena->resting) give_all_back(*arena);
    return;
  }
  if (any_kept.load(std::memory_order_relaxed) && keep(data)) return;
  if (is_recording.load(std::memory_order_relaxed)) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = recording.find(data);
    if (found != recording.end()) {
      events[found->second].died = moment++;
      recording.erase(found);
    }
  }
  if (heap.may_own(data)) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (heap.release(data)) return;
  }
  original->raw_deallocate(data);
}

bool is_free(const Arena& arena, int64_t offset, int64_t size) {
  const auto next = arena.live.lower_bound(offset);
  if (next != arena.live.end() && next->first < offset + size) return false;
  return next == arena.live.begin() || std::prev(next)->second <= offset;
}

void* from_slot(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const size_t index = position++;
  if (index < current->slots.size()) {
    const Slot slot = current->slots[index];
    if (slot.size == static_cast<int64_t>(bytes)) {
      if (slot.offset < 0) {  // planned to stay outside
        current->outside += slot.size;
        keep_to_limit(*current, position);
        return nullptr;
      }
      if (is_free(*current, slot.offset, slot.size)) {
        current->live.emplace(slot.offset, slot.offset + slot.size);
        current->live_bytes += slot.size;
        ++current->hits;
        if (current->most >= 0) {
          const Pages used = pages(slot.offset, slot.offset + slot.size);
          current->resident.add(used.begin, used.end);
          keep_to_limit(*current, position);
        }
        unpoison(current->base + slot.offset, slot.size);
        return current->base + slot.offset;
      }
    }
  }
  ++current->misses;
  current->outside += static_cast<int64_t>(bytes);
  keep_to_limit(*current, position);
  return nullptr;
}

void* from_kept(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = kept.find(bytes);
  void* data = found != kept.end() ? found->second : original->raw_allocate(bytes);
  if (found != kept.end()) {
    kept.erase(found);
  } else {
    handed_out[data] = bytes;
    any_kept = true;
  }
  return data;
}

void* from_heap(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  return heap.take(static_cast<int64_t>(bytes));
}

void record(void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  recording[data] = events.size();
  events.push_back({static_cast<int64_t>(bytes), moment++, -1});
}

class Replay final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0 && mode == Mode::kReplay) data = from_slot(bytes);
    if (bytes > 0 && mode == Mode::kRecord) data = from_heap(bytes);
    if (bytes > 0 && mode == Mode::kKeep) data = from_kept(bytes);
    if (data == nullptr) data = original->raw_allocate(bytes);
    if (bytes > 0 && mode == Mode::kRecord) record(data, bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

Replay replay;

}  // namespace

extern "C" {

void arena_install() {
  if (original != nullptr) return;
  original = c10::GetCPUAllocator();
  // a data loader may fork while another thread holds the lock; its child allocates too
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  c10::SetCPUAllocator(&replay, 255);
}

// Number of a new arena, or -1 where the memory is not to be had.
int arena_create(int64_t bytes, const int64_t* offsets, const int64_t* sizes, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (arena_count.load() >= 4096) return -1;
  auto* arena = new Arena;
  if (bytes > 0) {
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
      delete arena;
      return -1;
    }
    arena->base = static_cast<char*>(base);
    arena->bytes = bytes;
    poison(base, bytes);
  }
  for (int64_t i = 0; i < count; ++i) arena->slots.push_back({offsets[i], sizes[i]});
  if (arenas.capacity() == 0) arenas.reserve(4096);  // readers walk it without a lock
  arenas.push_back(arena);
  return arena_count.fetch_add(1, std::memory_order_release);
}

// Give the memory back to the system until the next replay; where tensors of the step still live, when the last one dies.
void arena_rest(int id) {
  const std::lock_guard<std::mutex> lock(mutex);
  arenas[id]->resting = true;
  give_all_back(*arenas[id]);
}

// From now on take no more memory than `most` and what is away of the user's own, as far as what lives allows.
void arena_hold(int id, int64_t most, int64_t away) {
  const std::lock_guard<std::mutex> lock(mutex);
  Arena& arena = *arenas[id];
  if (arena.base == nullptr) return;
  if (arena.most < 0) {
    const Pages all = pages(0, arena.bytes);
    madvise(arena.base, all.end, MADV_NOHUGEPAGE);  // a huge page would be charged for one small slot
    arena.resident.add(all.begin, all.end);         // nobody looked until now
  }
  arena.most = most;
  arena.away = away;
  keep_to_limit(arena, current == &arena ? position : 0);
}

// Memory for a storage that has none, from malloc or if it is wide in a mapping of its own; whether it could be had.
bool arena_map(void* storage, int64_t bytes) {
  constexpr int64_t kWide = int64_t{64} << 10;  // what is smaller shares its pages with others, as malloc's
  void* data = nullptr;
  if (bytes >= kWide) {
    const std::lock_guard<std::mutex> lock(mutex);
    if ((data = heap.map(bytes)) != nullptr) madvise(data, bytes, MADV_NOHUGEPAGE);  // a part of one would stay charged
  }
  try {
    if (data == nullptr) data = original->raw_allocate(bytes);
  } catch (const std::exception&) {
    return false;
  }
  auto* taker = static_cast<c10::StorageImpl*>(storage);
  taker->set_data_ptr_noswap({data, data, &release, c10::Device(c10::DeviceType::CPU)});
  taker->set_nbytes(bytes);
  return true;
}

// From now on what this thread allocates and anyone frees serves a later request of as many bytes, its pages in place.
void arena_keep() {
  is_keeping = true;
  mode = Mode::kKeep;
}

void arena_let_go() {
  mode = Mode::kOff;
  const std::lock_guard<std::mutex> lock(mutex);
  is_keeping = false;
  for (const auto& [bytes, data] : kept) {
    handed_out.erase(data);
    original->raw_deallocate(data);
  }
  kept.clear();
  any_kept = !handed_out.empty();
}

void arena_record() {
  const std::lock_guard<std::mutex> lock(mutex);
  events.clear();
  recording.clear();
  moment = 0;
  is_recording = true;
  mode = Mode::kRecord;
}

int64_t arena_recorded(Event* out, int64_t capacity) {
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t count = static_cast<int64_t>(events.size());
  for (int64_t i = 0; i < count && i < capacity; ++i) out[i] = events[i];
  return count;
}

void arena_replay(int id) {
  const std::lock_guard<std::mutex> lock(mutex);
  current = arenas[id];
  current->resting = false;
  current->top = std::max(current->most, current->reached);
  current->reached = current->outside = 0;
  position = 0;
  current->misses = current->hits = 0;
  mode = Mode::kReplay;
}

// Misses of the step that ends; also ends a recording.
int64_t arena_stop() {
  const int64_t missed = mode == Mode::kReplay ? current->misses : 0;
  mode = Mode::kOff;
  current = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  is_recording = false;
  recording.clear();
  return missed;
}

int64_t arena_hits(int id) { return arenas[id]->hits; }

}  // extern "C"
