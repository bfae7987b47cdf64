#include "exchange.h"

#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <ctime>
#endif

namespace pagemill {
namespace {

// How long a rank watches for the others before it sleeps: about as long as an operator of a small model takes.
constexpr int kSpins = 2000;
constexpr int64_t kPatienceNs = 100'000'000;

#if defined(__linux__)
// Sleeps while the word is `seen`, no longer than kPatienceNs. Returns false when that time is over.
bool sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec patience{.tv_sec = 0, .tv_nsec = kPatienceNs};
    return syscall(SYS_futex, &word, FUTEX_WAIT, seen, &patience, nullptr, 0) == 0 || errno != ETIMEDOUT;
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
#else
bool sleep_on(std::atomic<uint32_t>&, uint32_t) { throw std::runtime_error("memory is shared on Linux only"); }
void wake_all(std::atomic<uint32_t>&) {}
#endif

}  // namespace

// arrived: how many ranks have come to all meetings together, modulo 2^32. asleep: how many wait for it to change.
struct Exchange::Head {
    alignas(64) std::atomic<uint32_t> arrived;
    alignas(64) std::atomic<uint32_t> asleep;
};

Exchange::Exchange(void* memory, int64_t bytes, int rank, int size)
    : head_(static_cast<Head*>(memory)), places_{}, place_bytes_((bytes - kHead) / 2 / 64 * 64), rank_(rank),
      size_(size) {
    if (size < 1 || rank < 0 || rank >= size || place_bytes_ <= 0 || reinterpret_cast<uintptr_t>(memory) % 64)
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                    " cannot exchange through " + std::to_string(bytes) + " bytes");
    char* const first = static_cast<char*>(memory) + kHead;
    places_[0] = first;
    places_[1] = first + place_bytes_;
}

// Returns when all ranks have come.
void Exchange::meet(const Idle& idle) {
    std::atomic<uint32_t>& arrived = head_->arrived;
    const uint32_t wanted = ++met_ * uint32_t(size_);
    if (arrived.fetch_add(1) + 1 == wanted) {
        if (head_->asleep.load() > 0) wake_all(arrived);
        return;
    }
    // Nobody is more than one meeting ahead.
    const auto come = [&] { return int32_t(arrived.load() - wanted) >= 0; };
    for (int spin = 0; spin < kSpins; ++spin) {
        if (come()) return;
        relax();
    }
    const auto begin = std::chrono::steady_clock::now();
    head_->asleep.fetch_add(1);
    try {
        for (uint32_t seen = arrived.load(); int32_t(seen - wanted) < 0; seen = arrived.load())
            if (!sleep_on(arrived, seen) && !come())
                idle(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    } catch (...) {
        head_->asleep.fetch_sub(1);
        throw;
    }
    head_->asleep.fetch_sub(1);
}

// There are two places. A rank writes to one again when all have come to the next meeting, and so have read it.
void Exchange::gather(const void* part, void* out, const std::vector<int64_t>& widths, int64_t rows, const Idle& idle) {
    int64_t whole = 0, before = 0;
    if (int64_t(widths.size()) != size_) throw std::invalid_argument("each rank has a width");
    for (int rank = 0; rank < size_; ++rank) {
        if (widths[rank] < 0) throw std::invalid_argument("widths must not be negative");
        if (rank < rank_) before += widths[rank];
        whole += widths[rank];
    }
    if (whole > place_bytes_) throw std::invalid_argument("a row does not fit into the memory that is shared");
    const int64_t width = widths[rank_], most = whole ? place_bytes_ / whole : rows;
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first);
        char* const place = places_[met_ % 2];
        const char* const from = static_cast<const char*>(part) + first * width;
        for (int64_t row = 0; row < count; ++row)
            std::memcpy(place + row * whole + before, from + row * width, size_t(width));
        meet(idle);
        std::memcpy(static_cast<char*>(out) + first * whole, place, size_t(count * whole));
    }
}

}  // namespace pagemill
