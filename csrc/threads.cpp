#include "threads.h"

#include "memory.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>

namespace pagemill {
namespace {

// How long an idle thread watches for the next region before it sleeps: longer than the gap between two operators
// called from Python, shorter than anything a user would notice as load.
constexpr int kSpins = 4000;

// How long a thread leaves the caller's core alone, where it has no other.
constexpr std::chrono::milliseconds kAside{10};

// The core that this thread is on, or -1.
int this_core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

struct Scratch {
    void* data = nullptr;
    size_t bytes = 0;

    void* get(size_t wanted) {
        if (wanted > bytes) {
            std::free(data);
            bytes = (wanted + 4095) / 4096 * 4096;
            data = allocate_huge(bytes);
            if (!data) {
                bytes = 0;
                throw std::bad_alloc();
            }
        }
        return data;
    }
};

// A thread's tasks of a region that nobody has taken yet: begin in the upper half, end in the lower. The thread takes
// the first, others the last.
struct alignas(64) Share {
    std::atomic<uint64_t> range{0};

    void set(uint64_t begin, uint64_t end) { range.store(begin << 32 | end, std::memory_order_relaxed); }

    // A task, or -1.
    int64_t take(bool own) {
        for (uint64_t seen = range.load(std::memory_order_relaxed);;) {
            const uint64_t begin = seen >> 32, end = uint32_t(seen);
            if (begin == end) return -1;
            if (range.compare_exchange_weak(seen, own ? seen + (uint64_t(1) << 32) : seen - 1,
                                            std::memory_order_relaxed))
                return int64_t(own ? begin : end - 1);
        }
    }
};

struct Pool {
    std::mutex exclusive;
    std::vector<std::thread> threads;
    std::unique_ptr<Share[]> shares{new Share[1]};
    std::vector<Scratch> scratch{1};
    Scratch caller[3];

    // One region. `gate` is its generation, odd while it is open, above the number of threads inside. Only threads that
    // came in while it was open are waited for: one that the system has descheduled, or that sleeps, holds nobody up.
    Task task = nullptr;
    void* context = nullptr;
    alignas(64) std::atomic<uint64_t> gate{0};
    std::atomic<bool> failed{false};
    std::atomic<int> core{-1};  // the caller's
    std::atomic<int> asleep{0};
    std::atomic<bool> stop{false};
    std::mutex mutex;
    std::condition_variable wake;

    static constexpr int kInsideBits = 16;
    static uint64_t generation(uint64_t gate) { return gate >> kInsideBits; }
    static uint64_t inside(uint64_t gate) { return gate & ((uint64_t(1) << kInsideBits) - 1); }

    void work(int thread) {
        try {
            const int all = int(threads.size()) + 1;
            for (int i = 0; i < all; ++i) {
                Share& share = shares[(thread + i) % all];
                for (int64_t index; (index = share.take(i == 0)) >= 0;) task(context, index, thread);
            }
        } catch (const std::bad_alloc&) {
            failed.store(true);
        }
    }

    // Whether there is a region that a thread which was last in generation `seen` can enter.
    bool open(uint64_t seen) const {
        const uint64_t current = generation(gate.load());
        return (current & 1) && current != seen;
    }

    void loop(int thread) {
        uint64_t seen = 0;
        for (;;) {
            for (int spin = 0; spin < kSpins && !open(seen) && !stop.load(); ++spin) relax();
            if (!open(seen)) {
                std::unique_lock<std::mutex> lock(mutex);
                asleep.fetch_add(1);
                wake.wait(lock, [&] { return open(seen) || stop.load(); });
                asleep.fetch_sub(1);
            }
            if (stop.load()) return;
            uint64_t current = gate.load();
            while ((generation(current) & 1) && generation(current) != seen) {
                if (!gate.compare_exchange_weak(current, current + 1)) continue;
                seen = generation(current);
                work(thread);
                gate.fetch_sub(1);
                // Other processes have the other cores: to watch for the next region would keep the caller from it.
                if (const int here = this_core(); here >= 0 && here == core.load(std::memory_order_relaxed))
                    std::this_thread::sleep_for(kAside);
                break;
            }
        }
    }

    void wake_sleepers() {
        if (asleep.load() > 0) {
            {
                std::lock_guard<std::mutex> lock(mutex);
            }
            wake.notify_all();
        }
    }

    // Opens a closed region, or closes an open one.
    uint64_t turn() { return gate.fetch_add(uint64_t(1) << kInsideBits); }

    void resize(int wanted) {
        stop.store(true);
        wake_sleepers();
        for (auto& thread : threads) thread.join();
        threads.clear();
        stop.store(false);
        if (scratch.size() < size_t(wanted)) scratch.resize(wanted);
        shares.reset(new Share[wanted]);
        for (int i = 1; i < wanted; ++i) threads.emplace_back([this, i] { loop(i); });
    }
};

// Never destroyed: threads must not outlive it, and at exit nobody joins them. A forked child gets a new,
// single-threaded one.
Pool* pool_instance = nullptr;

Pool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool_instance = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool_instance = new Pool; });
    });
    return *pool_instance;
}

}  // namespace

Exclusive::Exclusive() { pool().exclusive.lock(); }
Exclusive::~Exclusive() { pool().exclusive.unlock(); }

void set_num_threads(int count) {
    if (count != num_threads()) pool().resize(count);
}

int num_threads() { return int(pool().threads.size()) + 1; }

void parallel_for(int64_t count, Task task, void* context) {
    Pool& p = pool();
    if (count <= 1 || p.threads.empty()) {
        for (int64_t i = 0; i < count; ++i) task(context, i, 0);
        return;
    }
    p.task = task;
    p.context = context;
    p.failed.store(false, std::memory_order_relaxed);
    p.core.store(this_core(), std::memory_order_relaxed);
    const int64_t all = num_threads();
    for (int64_t i = 0; i < all; ++i) p.shares[i].set(count * i / all, count * (i + 1) / all);
    p.turn();
    p.wake_sleepers();
    p.work(0);
    p.turn();
    for (int spin = 0; Pool::inside(p.gate.load()) > 0; ++spin) {
        if (spin < kSpins) relax();
        else std::this_thread::yield();  // one that is inside has lost its core: let it have this one
    }
    if (p.failed.load()) throw std::bad_alloc();
}

void* thread_scratch(int thread, size_t bytes) { return pool().scratch[thread].get(bytes); }
void* caller_scratch(int slot, size_t bytes) { return pool().caller[slot].get(bytes); }

}  // namespace pagemill
