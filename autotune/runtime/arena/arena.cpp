// A replay allocator behind c10's CPU allocator. It records the allocations of one training step, made in a compact heap,
// and places each one in its planned slot in later steps. The plan is a hint: an allocation uses its slot only if the size
// matches and the slot is free. Otherwise it goes to the system's allocator and counts as a miss.

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
  int64_t died;  // -1: it outlives the step
};

struct Slot {
  int64_t offset;  // -1: not in the arena
  int64_t size;
};

// The memory of one arena, or of several whose steps never run at once.
struct Block {
  char* base = nullptr;
  int64_t bytes = 0;
  std::map<int64_t, int64_t> live;  // offset -> end
  bool released = false;            // its pages return to the system as soon as no slot is live
  int64_t live_bytes = 0;
  Ranges resident;                  // resident pages; tracked only while the one arena of the block has a cap
};

struct Arena {
  int group = 0;                    // index of its block
  std::vector<Slot> slots;
  int64_t step_bytes = -1;          // cap of the step's own bytes while no static bytes are offloaded; -1: no cap
  int64_t offloaded = 0;            // static bytes that are offloaded now
  int64_t outside = 0;              // bytes that this step allocated outside of the block
  int64_t step_peak = 0;            // peak of the step's own bytes beyond `offloaded`, in this step
  int64_t peak = 0;                 // the same, in this step or the one before
  int64_t misses = 0;
  int64_t hits = 0;
};

struct Pages {
  int64_t begin, end;
};

// Return all pages that a range touches.
Pages pages(int64_t begin, int64_t end) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  return {begin / page * page, (end + page - 1) / page * page};
}

// The search for idle pages takes time. It therefore releases `kExtra` bytes more than needed, and spares the pages of at
// most `kLookahead` slots.
constexpr int64_t kExtra = int64_t{1} << 20;
constexpr size_t kLookahead = 512;

void release_pages(Block& block, Pages idle) {
  madvise(block.base + idle.begin, idle.end - idle.begin, MADV_DONTNEED);
  poison(block.base + idle.begin, std::min(idle.end, block.bytes) - idle.begin);
  block.resident.cut(idle.begin, idle.end);
}

// Release all pages between live slots: one tensor that lives on, such as a new state of the optimizer, keeps its own pages alone.
void release_idle(Block& block) {
  if (block.base == nullptr) return;
  Ranges idle;
  const Pages all = pages(0, block.bytes);
  idle.add(all.begin, all.end);
  for (const auto& [begin, end] : block.live) {
    const Pages used = pages(begin, end);
    idle.cut(used.begin, used.end);
  }
  for (const auto& [begin, end] : idle) release_pages(block, {begin, end});
}

std::vector<Block*> blocks;   // all of them; never shrinks, because a tensor may outlive the owner of its block
std::vector<Block*> current_block;  // of each group: a group that needs more gets a larger block, and leaves the old one
std::atomic<int> block_count{0};
std::vector<Arena*> arenas;

Block& block_of(const Arena& arena) { return *current_block[arena.group]; }

// Release idle pages until the resident bytes are at most the peak of the step, scratch of kernels included. Pages that
// the slots from `next` on (and then those of the next step) need soonest are spared if there are enough others.
void enforce_cap(Arena& arena, size_t next) {
  if (arena.step_bytes < 0) return;
  Block& block = block_of(arena);
  arena.step_peak =
      std::max({arena.step_peak, arena.step_bytes, block.live_bytes + arena.outside - arena.offloaded});
  arena.peak = std::max(arena.peak, arena.step_peak);
  const int64_t over = block.resident.bytes() + arena.outside - arena.peak - arena.offloaded;
  const int64_t page = pages(0, 1).end;
  if (over <= 0 || block.resident.bytes() - block.live_bytes < page) return;
  const int64_t target = over + kExtra;
  Ranges idle = block.resident;
  const auto cut = [&idle](Pages used) { idle.cut(used.begin, used.end); };
  for (const auto& [begin, end] : block.live) cut(pages(begin, end));
  for (size_t i = 0; i < std::min(kLookahead, arena.slots.size()); ++i) {
    const Slot slot = arena.slots[(next + i) % arena.slots.size()];
    if (slot.offset < 0) continue;
    const Pages used = pages(slot.offset, slot.offset + slot.size);
    if (idle.bytes() - idle.covered(used.begin, used.end) < target) break;
    cut(used);
  }
  int64_t left = target;
  for (const auto& [begin, end] : idle) {
    const Pages range = pages(begin, std::min(end, begin + left));
    release_pages(block, range);
    if ((left -= range.end - range.begin) <= 0) break;
  }
}

enum class Mode { kOff, kRecord, kReplay, kKeep };

std::mutex mutex;
c10::Allocator* original = nullptr;

Heap heap;  // for recorded steps, and with its mappings for static tensors that are read back
std::vector<Event> events;                 // of the one recording that runs, of whichever thread
std::unordered_map<void*, size_t> recording;
std::atomic<bool> is_recording{false};
int64_t moment = 0;
thread_local bool is_recorder = false;     // the recording that runs is the one of this thread
thread_local std::vector<Event> recorded;  // of the last recording of this thread

std::unordered_multimap<size_t, void*> kept;        // blocks freed while memory is kept, by their bytes
std::unordered_map<void*, size_t> handed_out;       // requested bytes of all blocks allocated meanwhile, `kept` included
std::atomic<bool> is_keeping{false}, any_kept{false};

// per thread, so that data loaders and autograd threads stay outside of a replay
thread_local Mode mode = Mode::kOff;
thread_local Arena* current = nullptr;
thread_local size_t position = 0;

Block* owner(void* data) {
  const int count = block_count.load(std::memory_order_acquire);
  for (int i = 0; i < count; ++i) {
    Block* block = blocks[i];
    if (data >= block->base && data < block->base + block->bytes) return block;
  }
  return nullptr;
}

// Return true if a freed block is kept for a later request; blocks freed after `arena_stop_keeping` are not.
bool keep(void* data) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto block = handed_out.find(data);
  if (block == handed_out.end()) return false;
  if (is_keeping) {
    kept.emplace(block->second, data);
    return true;
  }
  handed_out.erase(block);
  any_kept = !handed_out.empty();
  return false;
}

void release(void* data) {
  if (data == nullptr) return;
  if (Block* block = owner(data)) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto slot = block->live.find(static_cast<char*>(data) - block->base);
    if (slot == block->live.end()) return stop("freed twice", data);
    poison(data, slot->second - slot->first);
    block->live_bytes -= slot->second - slot->first;
    block->live.erase(slot);
    if (block->released && block->live.empty()) release_idle(*block);
    return;
  }
  if (any_kept.load(std::memory_order_relaxed) && keep(data)) return;
  if (is_recording.load(std::memory_order_relaxed)) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto allocation = recording.find(data);
    if (allocation != recording.end()) {
      events[allocation->second].died = moment++;
      recording.erase(allocation);
    }
  }
  if (heap.may_own(data)) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (heap.release(data)) return;
  }
  original->raw_deallocate(data);
}

bool is_free(const Block& block, int64_t offset, int64_t size) {
  const auto next = block.live.lower_bound(offset);
  if (next != block.live.end() && next->first < offset + size) return false;
  return next == block.live.begin() || std::prev(next)->second <= offset;
}

void* from_slot(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const size_t index = position++;
  if (index < current->slots.size()) {
    const Slot slot = current->slots[index];
    if (slot.size == static_cast<int64_t>(bytes)) {
      if (slot.offset < 0) {  // planned to stay outside
        current->outside += slot.size;
        enforce_cap(*current, position);
        return nullptr;
      }
      Block& block = block_of(*current);
      if (is_free(block, slot.offset, slot.size)) {
        block.live.emplace(slot.offset, slot.offset + slot.size);
        block.live_bytes += slot.size;
        ++current->hits;
        if (current->step_bytes >= 0) {
          const Pages used = pages(slot.offset, slot.offset + slot.size);
          block.resident.add(used.begin, used.end);
          enforce_cap(*current, position);
        }
        unpoison(block.base + slot.offset, slot.size);
        return block.base + slot.offset;
      }
    }
  }
  ++current->misses;
  current->outside += static_cast<int64_t>(bytes);
  enforce_cap(*current, position);
  return nullptr;
}

void* from_kept(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto block = kept.find(bytes);
  void* data = block != kept.end() ? block->second : original->raw_allocate(bytes);
  if (block != kept.end()) {
    kept.erase(block);
  } else {
    handed_out[data] = bytes;
    any_kept = true;
  }
  return data;
}

void* from_heap(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  return heap.allocate(static_cast<int64_t>(bytes));
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

constexpr size_t kMost = 4096;
constexpr int kNoMemory = -1, kTooMany = -2;  // errors of `arena_create`

// Map a block; nullptr if there is no memory. A block of 0 bytes has no mapping.
Block* create_block(int64_t bytes) {
  auto* block = new Block;
  if (bytes > 0) {
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
      delete block;
      return nullptr;
    }
    block->base = static_cast<char*>(base);
    block->bytes = bytes;
    poison(base, bytes);
  }
  if (blocks.capacity() == 0) blocks.reserve(kMost);  // readers walk it without a lock; a new arena adds at most one
  blocks.push_back(block);
  block_count.fetch_add(1, std::memory_order_release);
  return block;
}

// Lock, because a data loader may fork while another thread holds the lock, and its child allocates too. Release idle
// pages: the child would keep each one that a later step overwrites, and the system would charge for both.
void prepare_fork() {
  mutex.lock();
  for (Block* block : blocks) release_idle(*block);
}

}  // namespace

extern "C" {

void arena_install() {
  if (original != nullptr) return;
  original = c10::GetCPUAllocator();
  pthread_atfork(prepare_fork, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  c10::SetCPUAllocator(&replay, 255);
}

// Create an arena and return its id, or an error: `kNoMemory`, or `kTooMany` after `kMost` arenas of this process. It shares
// the block of the arenas of `group`, whose steps must not run at once; -1 is a group of its own.
int arena_create(int64_t bytes, const int64_t* offsets, const int64_t* sizes, int64_t count, int group) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (arenas.size() >= kMost) return kTooMany;
  Block* previous = group < 0 ? nullptr : current_block[group];
  // tensors that live on, as in the traceback of an error, would be in the way of the new layout
  if (previous == nullptr || previous->bytes < bytes || !previous->live.empty()) {
    Block* block = create_block(previous == nullptr ? bytes : std::max(bytes, previous->bytes));
    if (block == nullptr) return kNoMemory;
    if (group < 0) {
      group = static_cast<int>(current_block.size());
      current_block.push_back(block);
    } else {
      previous->released = true;
      release_idle(*previous);
      current_block[group] = block;
    }
  }
  auto* arena = new Arena;
  arena->group = group;
  for (int64_t i = 0; i < count; ++i) arena->slots.push_back({offsets[i], sizes[i]});
  arenas.push_back(arena);
  return static_cast<int>(arenas.size()) - 1;
}

int arena_group(int id) {
  const std::lock_guard<std::mutex> lock(mutex);
  return arenas[id]->group;
}

// Release the memory until the next replay. Pages of tensors that are still live are released after the last one.
void arena_release(int id) {
  const std::lock_guard<std::mutex> lock(mutex);
  Block& block = block_of(*arenas[id]);
  block.released = true;
  release_idle(block);
}

// Cap the resident bytes at `step_bytes` plus the static bytes that are offloaded now. Live slots stay resident.
void arena_limit_resident(int id, int64_t step_bytes, int64_t offloaded) {
  const std::lock_guard<std::mutex> lock(mutex);
  Arena& arena = *arenas[id];
  Block& block = block_of(arena);
  if (block.base == nullptr) return;
  if (arena.step_bytes < 0) {
    const Pages all = pages(0, block.bytes);
    madvise(block.base, all.end, MADV_NOHUGEPAGE);  // a huge page would be charged for one small slot
    block.resident.add(all.begin, all.end);         // pages were not tracked until now
  }
  arena.step_bytes = step_bytes;
  arena.offloaded = offloaded;
  enforce_cap(arena, current == &arena ? position : 0);
}

// Allocate memory for a storage without memory: a mapping of its own from `kSmallestMapping` on, else malloc. Return
// false if there is no memory.
bool arena_map_storage(void* storage, int64_t bytes) {
  constexpr int64_t kSmallestMapping = int64_t{64} << 10;  // smaller blocks share pages with others, as in malloc
  void* data = nullptr;
  if (bytes >= kSmallestMapping) {
    const std::lock_guard<std::mutex> lock(mutex);
    if ((data = heap.map(bytes)) != nullptr) madvise(data, bytes, MADV_NOHUGEPAGE);  // a part of a huge page would stay charged
  }
  try {
    if (data == nullptr) data = original->raw_allocate(bytes);
  } catch (const std::exception&) {
    return false;
  }
  auto* target = static_cast<c10::StorageImpl*>(storage);
  target->set_data_ptr_noswap({data, data, &release, c10::Device(c10::DeviceType::CPU)});
  target->set_nbytes(bytes);
  return true;
}

// Keep the blocks that this thread allocates, once freed, for its later requests of the same size, with their pages.
void arena_keep() {
  is_keeping = true;
  mode = Mode::kKeep;
}

// Release all kept blocks.
void arena_stop_keeping() {
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

// Begin a recording of this thread and return true; return false while another one runs, whose events would be mixed in.
bool arena_record() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_recording) return false;
  events.clear();
  recording.clear();
  moment = 0;
  is_recording = is_recorder = true;
  mode = Mode::kRecord;
  return true;
}

// Copy at most `capacity` events of this thread's last recording, and return their number. A call that copies also drops them.
int64_t arena_recorded(Event* out, int64_t capacity) {
  const int64_t count = static_cast<int64_t>(recorded.size());
  std::copy_n(recorded.begin(), std::min(count, capacity), out);
  if (out != nullptr) std::vector<Event>().swap(recorded);
  return count;
}

void arena_replay(int id) {
  const std::lock_guard<std::mutex> lock(mutex);
  current = arenas[id];
  block_of(*current).released = false;
  current->peak = std::max(current->step_bytes, current->step_peak);
  current->step_peak = current->outside = 0;
  position = 0;
  current->misses = current->hits = 0;
  mode = Mode::kReplay;
}

// End a recording or a replay, and return the misses of the replayed step.
int64_t arena_stop() {
  const int64_t missed = mode == Mode::kReplay ? current->misses : 0;
  mode = Mode::kOff;
  current = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_recorder) {
    recorded.swap(events);
    recording.clear();
    is_recording = is_recorder = false;
  }
  return missed;
}

int64_t arena_hits(int id) {
  const std::lock_guard<std::mutex> lock(mutex);
  return arenas[id]->hits;
}

}  // extern "C"
