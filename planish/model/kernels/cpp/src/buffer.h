// Growing buffers, and what happens if memory runs out.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

// `bytes` bytes could not be allocated; 1 if the number is unknown.
struct OutOfMemory : std::bad_alloc {
    int64_t bytes;
    explicit OutOfMemory(int64_t bytes) : bytes(bytes) {}
};

// An exception may not leave a parallel region, nor a function that Python calls. The guard records
// a failed allocation, and then skips the work that has not begun.
class AllocationGuard {
    std::atomic<int64_t> missing{0};

  public:
    template <class F>
    void run(F f) {
        if (missing) return;
        try {
            f();
        } catch (const OutOfMemory& error) {
            missing = error.bytes;
        } catch (const std::bad_alloc&) {
            missing = 1;
        }
    }
    // Throws the recorded failure, after the region.
    void rethrow() const {
        if (missing) throw OutOfMemory(missing);
    }
    int64_t missing_bytes() const { return missing; }
};

// Memory that grows. It begins at a cache line, because a vector that crosses two lines is read
// half as fast.
class Buffer {
    void* data = nullptr;
    int64_t bytes = 0;

  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { std::free(data); }
    template <class X>
    X* reserve(int64_t n) {
        const int64_t needed = (n * sizeof(X) + 63) / 64 * 64;
        if (bytes < needed) {
            std::free(data);
            bytes = 0;
            data = std::aligned_alloc(64, needed);
            if (!data) throw OutOfMemory(needed);
            bytes = needed;
        }
        return (X*)data;
    }
};

}  // namespace
