// One pool of threads for all kernels. The caller takes part; the others are created once, spin briefly after a region
// and then sleep. Regions do not nest, and one caller runs at a time (`Exclusive`).
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagemill {

using Task = void (*)(void* context, int64_t index, int thread);

void set_num_threads(int count);
int num_threads();

// Runs task(context, i, thread) for i in 0 .. count - 1 < 2^32, in any order, each once; returns when all are done.
// Each thread begins with a run of neighbouring tasks of its own, the same in every region of so many tasks.
void parallel_for(int64_t count, Task task, void* context);

template <class Body>
void parallel(int64_t count, Body& body) {
    parallel_for(count, [](void* context, int64_t i, int thread) { (*static_cast<Body*>(context))(i, thread); }, &body);
}

// Memory that thread `thread` may use until its task ends; at least `bytes`, 64-byte aligned, undefined contents.
void* thread_scratch(int thread, size_t bytes);
// The same for the caller of a region, living across its regions; `slot` 0, 1 or 2.
void* caller_scratch(int slot, size_t bytes);

// A turn of a loop that watches for another thread or process.
static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// Held by a caller while it runs kernels: pool and scratch serve one caller at a time.
struct Exclusive {
    Exclusive();
    ~Exclusive();
    Exclusive(const Exclusive&) = delete;
    Exclusive& operator=(const Exclusive&) = delete;
};

}  // namespace pagemill
