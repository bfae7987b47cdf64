#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

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
        char* begin = static_cast<char*>(allocate_huge(size));
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
    std::free(chunk->begin);
    chunks.erase(chunk);
}

}  // namespace pagemill
