// Loops over all cores of the host.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace bench {

// body(i) for every i below count. Each index has a result of its own, so that their order is of no matter.
template <typename Body> void in_parallel(int64_t count, const Body &body) {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t i = next++; i < count; i = next++)
            body(i);
    };
    const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (int64_t i = 1; i < std::min(cores, count); i++)
        threads.emplace_back(work);
    work();
    for (std::thread &t : threads)
        t.join();
}

} // namespace bench
