// Memory that is kept.

#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

// Memory that grows, from the beginning of a cache line on: vectors that lie across two of them are read half as fast.
class Room {
    void* at = nullptr;
    int64_t bytes = 0;

  public:
    Room() = default;
    Room(const Room&) = delete;
    ~Room() { std::free(at); }
    template <class X>
    X* of(int64_t n) {
        const int64_t wanted = (n * sizeof(X) + 63) / 64 * 64;
        if (bytes < wanted) {
            std::free(at);
            at = std::aligned_alloc(64, bytes = wanted);
        }
        return (X*)at;
    }
};

}  // namespace
