// Callers that compete for the pool, while its size changes; then all on one core.
#include "../threads.h"
#include "checks.h"

#include <thread>

#include <sched.h>

namespace pagemill {

void check_threads() {
    auto call = [](int times) {
        for (int i = 0; i < times; ++i) {
            Exclusive exclusive;
            if (i % 16 == 0) set_num_threads(1 + i / 16 % 4);
            std::vector<int64_t> done(257);
            auto body = [&](int64_t task, int thread) {
                static_cast<char*>(thread_scratch(thread, 100 + size_t(task)))[0] = 1;
                done[task] += task;
            };
            parallel(int64_t(done.size()), body);
            for (size_t task = 0; task < done.size(); ++task)
                if (done[task] != int64_t(task)) std::abort();
        }
    };
    const auto both = [&] {
        std::thread other(call, 200);
        call(200);
        other.join();
    };
    both();
#if defined(__linux__)
    cpu_set_t before, one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_getaffinity(0, sizeof before, &before);
    sched_setaffinity(0, sizeof one, &one);
    both();
    sched_setaffinity(0, sizeof before, &before);
#endif
}

}  // namespace pagemill
