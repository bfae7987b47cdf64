// Memory in huge pages, where the system has them. A stream of weights in small pages spends a fifth of its time on the
// translation of addresses.
#pragma once

#include <cstddef>

namespace pagemill {

// Page-aligned, contents undefined; null: out of memory. For blocks that are large or few; freed by std::free.
void* allocate_huge(size_t bytes);

// The same for many blocks of any size: they share huge pages, which are freed with the last of their blocks.
void* allocate_shared(size_t bytes);
void release_shared(void* block);

}  // namespace pagemill
