// Threads of our own that share the work of a kernel.
//
// OpenMP threads meet at the end of every region. If another process takes a core, all of them wait
// until the scheduler runs the thread on that core again. Here the calling thread takes part, and
// threads claim the work in chunks. A worker that the scheduler does not run claims nothing, so
// nothing waits for it. A thread that waits spins for a short time and then sleeps.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace {

using Futex = std::atomic<uint32_t>;
static_assert(sizeof(Futex) == 4 && Futex::is_always_lock_free, "as the system call reads it");

// Sleeps while `word` has the given value; may return early.
inline void futex_wait(Futex& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void futex_wake(Futex& word, int threads) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

inline int64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
    timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * 1'000'000'000LL + at.tv_nsec;
}

// Calls done() again and again; returns whether it became true within `nanoseconds`.
template <class F>
bool spin_until(int64_t nanoseconds, F done) {
    for (const int64_t end = now_ns() + nanoseconds; now_ns() < end;)
        for (int i = 0; i < 16; i++) {
            if (done()) return true;
            _mm_pause();
        }
    return done();
}

// How a worker gives way to other programs. Beside a busy process the scheduler stops a worker for
// milliseconds in the middle of a chunk, and the caller waits for that chunk. So a worker rests
// after such an interruption, for longer if interruptions follow each other, and the caller
// computes alone meanwhile.
class ContentionBackoff {
    static constexpr int64_t MS = 1'000'000, MAX_STALL_NS = MS / 2, MIN_REST_NS = 2 * MS,
                             MAX_REST_NS = 64 * MS;
    int64_t rest_ns = MIN_REST_NS, rested_at = 0, moved_at = 0;

  public:
    // Calls f, and rests if the worker did not run for more than TOLERATED_NS of that time.
    template <class F>
    void watch(F f) {
        const int64_t begun = now_ns(), used = now_ns(CLOCK_THREAD_CPUTIME_ID);
        f();
        const int64_t computed = now_ns(CLOCK_THREAD_CPUTIME_ID) - used;
        if (now_ns() - begun - computed > MAX_STALL_NS) rest();
    }

    void rest() {
        const int64_t since = now_ns() - rested_at;
        rest_ns = since < 2 * rest_ns ? std::min(2 * rest_ns, MAX_REST_NS) : MIN_REST_NS;
        const timespec pause{0, rest_ns};
        nanosleep(&pause, nullptr);
        rested_at = now_ns();
    }

    // Moves this thread to another processor: on the caller's it would only delay the caller.
    // Returns false if there is no other processor, or if a move a moment ago did not help.
    bool move() {
        const int64_t now = now_ns();
        cpu_set_t allowed, others;
        if (now - moved_at < 10 * MS || sched_getaffinity(0, sizeof allowed, &allowed))
            return false;
        moved_at = now;
        others = allowed;
        CPU_CLR(sched_getcpu(), &others);
        if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others)) return false;
        return !sched_setaffinity(0, sizeof allowed, &allowed);
    }
};

class ThreadPool {
  public:
    // Returns the pool of this process. It is never destroyed, because workers may still run while
    // static objects are destroyed. A forked child has no workers, so it gets a new pool.
    static ThreadPool& shared() {
        static const bool registered = [] {
            current() = new ThreadPool;
            pthread_atfork(nullptr, nullptr, [] { current() = new ThreadPool; });
            return true;
        }();
        (void)registered;
        return *current();
    }

    // Calls f(first, last) for chunks that together cover 0 .. n - 1, each item once, on at most
    // `threads` threads, of which the caller is one. A chunk has at most `max_chunk` items and at
    // least `grain`, except for the last of a thread's share. f must not throw. While the workers
    // serve another caller, this caller does all the work itself.
    template <class F>
    void run(int64_t n, int64_t grain, int64_t max_chunk, int threads, F f) {
        if (threads < 2 || n <= grain || is_taken.exchange(true, std::memory_order_acquire))
            return f(0, n);
        grow(std::min<int64_t>(threads, MAX_THREADS) - 1);
        const int used = (int)std::min<int64_t>({workers + 1, threads, (n + grain - 1) / grain});
        job.call = [](void* f, int64_t first, int64_t last) { (*(F*)f)(first, last); };
        job.f = &f, job.grain = grain, job.max_chunk = max_chunk, job.shares = used;
        for (int i = 0; i < used; i++) {
            shares[i].next.store(n * i / used, std::memory_order_relaxed);
            shares[i].end = n * (i + 1) / used;
        }
        caller_cpu.store(sched_getcpu(), std::memory_order_relaxed);
        gate.store(OPEN | (used - 1) * SLOT, std::memory_order_release);
        ticket.fetch_add(1);
        if (sleepers.load()) futex_wake(ticket, used - 1);
        work(0);
        close();
        is_taken.store(false, std::memory_order_release);
    }

  private:
    // How long a thread spins before it sleeps. The regions of a decoding step follow each other
    // within microseconds, and waking a sleeping thread takes longer (docs/lab/log.md).
    static constexpr int64_t WORKER_SPIN_NS = 200'000, CALLER_SPIN_NS = 200'000;
    static constexpr int MAX_THREADS = 256;

    // One thread's part of the work. Shares are equal, so threads of equal speed end together, and
    // a thread finds the rows of the region before in its cache. A thread that has finished its
    // share continues with what is left of the others'.
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};  // the first item that is not claimed yet
        int64_t end = 0;
    };
    struct Job {
        void (*call)(void*, int64_t, int64_t);
        void* f;
        int64_t grain, max_chunk;
        int shares;
    };
    // Only the caller and the workers that `gate` counts may read these two.
    Job job;
    Share shares[MAX_THREADS];

    // The bits of `gate`: whether workers may enter, whether the caller sleeps until the last
    // worker leaves, how many workers may still enter, and how many are inside.
    static constexpr uint32_t OPEN = 1u << 31, ASLEEP = 1u << 30, SLOT = 1u << 12,
                              INSIDE = SLOT - 1;
    alignas(64) Futex gate{0};
    alignas(64) Futex ticket{0};  // the number of jobs so far
    std::atomic<int> sleepers{0}, caller_cpu{0};
    alignas(64) std::atomic<bool> is_taken{false};
    int workers = 0;  // belongs to the caller that has set `is_taken`

    static ThreadPool*& current() {
        static ThreadPool* found = nullptr;
        return found;
    }

    // Each claim takes half of what is left of a share: few claims, and a short last chunk.
    void work(int thread) {
        for (int i = 0; i < job.shares; i++) {
            Share& share = shares[(thread + i) % job.shares];
            for (int64_t first = share.next.load(std::memory_order_relaxed); first < share.end;) {
                const int64_t left = share.end - first,
                              size = std::max(job.grain, std::min(job.max_chunk, left / 2)),
                              last = first + std::min(left, size);
                if (!share.next.compare_exchange_weak(first, last, std::memory_order_relaxed))
                    continue;
                job.call(job.f, first, last);
                first = share.next.load(std::memory_order_relaxed);
            }
        }
    }

    // Lets no more workers in, and returns when those inside have left.
    void close() {
        uint32_t found = gate.fetch_and(~OPEN, std::memory_order_acq_rel) & ~OPEN;
        auto is_empty = [&] {
            found = gate.load(std::memory_order_acquire);
            return !(found & INSIDE);
        };
        if (!(found & INSIDE) || spin_until(CALLER_SPIN_NS, is_empty)) return;
        found = gate.fetch_or(ASLEEP, std::memory_order_acq_rel) | ASLEEP;
        while (found & INSIDE) {
            futex_wait(gate, found);
            found = gate.load(std::memory_order_acquire);
        }
    }

    bool enter() {
        uint32_t found = gate.load(std::memory_order_relaxed);
        do {
            if (!(found & OPEN) || (found & ~(OPEN | ASLEEP)) < SLOT) return false;
        } while (!gate.compare_exchange_weak(found, found - SLOT + 1, std::memory_order_acquire,
                                             std::memory_order_relaxed));
        return true;
    }
    void leave() {
        const uint32_t before = gate.fetch_sub(1, std::memory_order_acq_rel);
        if ((before & ASLEEP) && (before & INSIDE) == 1) futex_wake(gate, 1);
    }

    void serve(int thread, uint32_t seen) {
        auto is_new = [&] { return ticket.load(std::memory_order_acquire) != seen; };
        ContentionBackoff contention;
        for (;;) {
            if (!spin_until(WORKER_SPIN_NS, is_new)) {
                sleepers.fetch_add(1);
                while (!is_new()) futex_wait(ticket, seen);
                sleepers.fetch_sub(1);
            }
            seen = ticket.load(std::memory_order_acquire);
            if (sched_getcpu() == caller_cpu.load(std::memory_order_relaxed) &&
                !contention.move()) {
                contention.rest();
                continue;
            }
            if (enter())
                contention.watch([&] {
                    work(thread);
                    leave();
                });
        }
    }

    // Starts workers until there are `wanted`, or fewer if the system refuses memory or threads.
    void grow(int wanted) {
        struct Start {
            ThreadPool* pool;
            int thread;
            uint32_t seen;
        };
        if (workers >= wanted) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
        for (; workers < wanted; workers++) {
            auto* start = new (std::nothrow) Start{this, workers + 1, ticket.load()};
            if (!start) break;
            pthread_t thread;
            const int refused = pthread_create(
                &thread, nullptr,
                [](void* given) -> void* {
                    const Start start = *(Start*)given;
                    delete (Start*)given;
                    start.pool->serve(start.thread, start.seen);
                    return nullptr;
                },
                start);
            if (refused) {
                delete start;
                break;
            }
            pthread_setname_np(thread, "planish-kernels");
            pthread_detach(thread);
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
};

}  // namespace
