// Runs the pool of cpp/pool.h in the way that argv[1] names; the exit status is 0 if all was right.

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "vectors.h"

namespace {

void need(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

// Each of 0 .. n - 1 is in one chunk; chunks have the sizes asked for.
void cover(int64_t n, int64_t grain, int64_t max_chunk, int threads) {
    std::vector<std::atomic<int>> seen(n);
    std::atomic<int64_t> chunks{0};
    ThreadPool::shared().run(n, grain, max_chunk, threads, [&](int64_t first, int64_t last) {
        need(first < last, "an empty chunk");
        need(last - first <= std::max(grain, max_chunk) || last - first == n,
             "a chunk above the maximum");
        chunks++;
        for (int64_t i = first; i < last; i++) seen[i]++;
    });
    for (auto& count : seen) need(count == 1, "an item was left out or done twice");
    need(chunks <= n / grain + threads, "chunks below the grain");
}

void cover_many(int rounds) {
    for (int round = 0; round < rounds; round++)
        for (int64_t n : {1, 2, 3, 17, 1000})
            for (int64_t grain : {1, 4})
                for (int threads : {1, 2, 3, 4, 9}) cover(n, grain, round % 2 ? n : grain, threads);
}

// Workers that have time take part, and no more than asked for.
void share() {
    for (int threads : {4, 2, 3}) {
        std::atomic<int> inside{0}, most{0};
        parallel_items(24, threads, [&](int64_t) {
            const int now = ++inside;
            for (int before = most; before < now && !most.compare_exchange_weak(before, now);) {
            }
            const timespec pause{0, 20'000'000};
            nanosleep(&pause, nullptr);
            inside--;
        });
        need(most > 1, "no worker took part");
        need(most <= threads, "more threads than asked for took part");
    }
}

// Several threads at a time: one has the pool, the others compute by themselves.
void many_callers() {
    std::vector<std::thread> callers;
    for (int i = 0; i < 6; i++) callers.emplace_back([] { cover_many(60); });
    for (auto& caller : callers) caller.join();
}

// The child of a fork has none of the workers, and children of the child likewise.
void fork_again(int depth) {
    cover_many(5);
    if (!depth) return;
    const pid_t child = fork();
    need(child >= 0, "no fork");
    if (!child) {
        alarm(60);
        fork_again(depth - 1);
        std::_Exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    need(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child of a fork failed");
    cover_many(5);
}

// A fork while another thread has the pool.
void fork_meanwhile() {
    std::atomic<bool> over{false};
    std::thread busy([&] {
        while (!over) cover_many(1);
    });
    for (int i = 0; i < 20; i++) fork_again(1);
    over = true;
    busy.join();
}

// If one chunk lacks memory, the caller gets the error after all chunks were computed or skipped.
void shortage() {
    for (int round = 0; round < 200; round++) {
        std::atomic<int> inside{0};
        int64_t missing = 0;
        try {
            parallel_items(100, 3, [&](int64_t i) {
                inside++;
                if (i == round % 100) {
                    inside--;
                    if (round % 2) throw OutOfMemory(77);
                    throw std::bad_alloc();
                }
                inside--;
            });
        } catch (const OutOfMemory& error) {
            missing = error.bytes;
        }
        need(missing == (round % 2 ? 77 : 1), "the shortage was not reported");
        need(inside == 0, "a chunk ran on after the call");
    }
    cover_many(1);
}

// A region within a region is computed by the thread that is in it.
void nested() {
    parallel_items(50, 3, [](int64_t) { cover(40, 1, 1, 3); });
}

// Long pauses, so that workers sleep in between; then pauses of about the time that they spin.
void sleep_between() {
    for (int i = 0; i < 300; i++) {
        cover(64, 1, 1, 4);
        const timespec pause{0, i < 20 ? 2'000'000 : i * 1000};
        nanosleep(&pause, nullptr);
    }
}

// The process ends while workers compute for another thread: they are not waited for.
void exit_meanwhile() {
    std::thread([] {
        for (;;) cover_many(1);
    }).detach();
    const timespec pause{0, 20'000'000};
    nanosleep(&pause, nullptr);
    std::exit(0);
}

}  // namespace

int main(int, char** given) {
    alarm(120);
    const struct {
        const char* name;
        void (*run)();
    } ways[] = {{"cover", [] { cover_many(100); }},
                {"share", share},
                {"many_callers", many_callers},
                {"fork", [] { fork_again(2); }},
                {"fork_meanwhile", fork_meanwhile},
                {"shortage", shortage},
                {"nested", nested},
                {"sleep_between", sleep_between},
                {"exit_meanwhile", exit_meanwhile}};
    for (const auto& way : ways)
        if (!std::strcmp(way.name, given[1])) {
            way.run();
            return 0;
        }
    return 2;
}
