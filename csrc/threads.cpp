#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <pthread.h>

namespace pagemill {
namespace {

// How long an idle thread watches for the next region before it sleeps: longer than the gap between two operators called
// from Python, shorter than anything a user would notice as load.
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

struct Scratch {
    void* data = nullptr;
    size_t bytes = 0;

    void* get(size_t wanted) {
        if (wanted > bytes) {
            std::free(data);
            bytes = (wanted + 4095) / 4096 * 4096;
            data = std::aligned_alloc(4096, bytes);
            if (!data) {
                bytes = 0;
                throw std::bad_alloc();
            }
        }
        return data;
    }
};

struct Pool {
    std::mutex exclusive;
    std::vector<std::thread> threads;
    std::vector<Scratch> scratch{1};
    Scratch caller[2];

    // One region: `generation` announces it, `next` hands out indices, `running` counts the threads still inside.
    Task task = nullptr;
    void* context = nullptr;
    int64_t count = 0;
    alignas(64) std::atomic<uint64_t> generation{0};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> running{0};
    std::atomic<bool> failed{false};
    std::atomic<int> asleep{0};
    std::atomic<bool> stop{false};
    std::mutex mutex;
    std::condition_variable wake;

    void work(int thread) {
        try {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, i, thread);
        } catch (const std::bad_alloc&) {
            failed.store(true);
        }
    }

    void loop(int thread, uint64_t seen) {
        for (;;) {
            for (int spin = 0; spin < kSpins && generation.load(std::memory_order_acquire) == seen; ++spin) relax();
            if (generation.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                asleep.fetch_add(1);
                wake.wait(lock, [&] { return generation.load() != seen; });
                asleep.fetch_sub(1);
            }
            seen = generation.load(std::memory_order_acquire);
            if (stop.load()) return;
            work(thread);
            running.fetch_sub(1, std::memory_order_release);
        }
    }

    void announce() {
        generation.fetch_add(1);
        if (asleep.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex); }
            wake.notify_all();
        }
    }

    void resize(int wanted) {
        stop.store(true);
        announce();
        for (auto& thread : threads) thread.join();
        threads.clear();
        stop.store(false);
        if (scratch.size() < size_t(wanted)) scratch.resize(wanted);
        const uint64_t seen = generation.load();
        for (int i = 1; i < wanted; ++i) threads.emplace_back([this, i, seen] { loop(i, seen); });
    }
};

// Never destroyed: threads must not outlive it, and at exit nobody joins them. A forked child gets a new, single-threaded one.
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
    p.count = count;
    p.failed.store(false, std::memory_order_relaxed);
    p.next.store(0, std::memory_order_relaxed);
    p.running.store(int(p.threads.size()), std::memory_order_relaxed);
    p.announce();
    p.work(0);
    // A thread that the system has descheduled may be late: after a while, let it have this core.
    for (int spin = 0; p.running.load(std::memory_order_acquire) > 0; ++spin) {
        if (spin < kSpins) relax();
        else std::this_thread::yield();
    }
    if (p.failed.load()) throw std::bad_alloc();
}

void* thread_scratch(int thread, size_t bytes) { return pool().scratch[thread].get(bytes); }
void* caller_scratch(int slot, size_t bytes) { return pool().caller[slot].get(bytes); }

}  // namespace pagemill
