// Memory that is kept, and what happens where there is none.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

// So many bytes could not be had; 1 if nobody knows how many.
struct TooLittle : std::bad_alloc {
    int64_t bytes;
    explicit TooLittle(int64_t bytes) : bytes(bytes) {}
};

// Of work that several threads share: an exception may not leave a parallel region, nor a function
// that Python calls. What lacks memory is noted here, and what would begin after it is left undone.
class Shortage {
    std::atomic<int64_t> missing{0};

  public:
    template <class F>
    void guard(F f) {
        if (missing) return;
        try {
            f();
        } catch (const TooLittle& error) {
            missing = error.bytes;
        } catch (const std::bad_alloc&) {
            missing = 1;
        }
    }
    // Behind the region.
    void raise() const {
        if (missing) throw TooLittle(missing);
    }
    int64_t bytes() const { return missing; }
};

// Memory that grows, from the beginning of a cache line on: vectors that lie across two of them are
// read half as fast.
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
            bytes = 0;
            at = std::aligned_alloc(64, wanted);
            if (!at) throw TooLittle(wanted);
            bytes = wanted;
        }
        return (X*)at;
    }
};

}  // namespace
