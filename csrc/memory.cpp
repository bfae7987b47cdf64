#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

#include <sys/mman.h>

namespace pagemill {
namespace {

constexpr size_t kPage = 4096, kHugePage = size_t(2) << 20, kChunk = size_t(32) << 20;

size_t whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Chunk {
    char* begin;
    size_t size, used, blocks;
};

std::mutex mutex;
std::vector<Chunk> chunks;  // the last one is being filled

// A mapping of its own of whole huge pages: what the C library's heap has free would not go back to the system.
char* map_huge(size_t size) {
    void* all = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    char* const first = static_cast<char*>(all);
    char* const begin = reinterpret_cast<char*>(whole(reinterpret_cast<size_t>(first), kHugePage));
    if (begin > first) munmap(first, begin - first);
    munmap(begin + size, first + kHugePage - begin);
#if defined(MADV_HUGEPAGE)
    madvise(begin, size, MADV_HUGEPAGE);  // refused: small pages do as well
#endif
    return begin;
}

}  // namespace

void* allocate_huge(size_t bytes) {
    const size_t size = whole(bytes, bytes < kHugePage ? kPage : kHugePage);
    void* data = std::aligned_alloc(bytes < kHugePage ? kPage : kHugePage, size);
#if defined(MADV_HUGEPAGE)
    if (data && bytes >= kHugePage) madvise(data, size, MADV_HUGEPAGE);  // refused: small pages do as well
#endif
    return data;
}

void* allocate_shared(size_t bytes) {
    bytes = whole(bytes, kPage);
    std::lock_guard<std::mutex> lock(mutex);
    if (chunks.empty() || chunks.back().size - chunks.back().used < bytes) {
        const size_t size = std::max(kChunk, whole(bytes, kHugePage));
        char* const begin = map_huge(size);
        if (!begin) return nullptr;
        chunks.push_back({begin, size, 0, 0});
    }
    Chunk& chunk = chunks.back();
    chunk.used += bytes;
    ++chunk.blocks;
    return chunk.begin + chunk.used - bytes;
}

void release_shared(void* block) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto holds = [&](const Chunk& chunk) { return block >= chunk.begin && block < chunk.begin + chunk.size; };
    const auto chunk = std::find_if(chunks.begin(), chunks.end(), holds);
    if (chunk == chunks.end() || --chunk->blocks) return;
    munmap(chunk->begin, chunk->size);
    chunks.erase(chunk);
}

}  // namespace pagemill
