// One shape: inputs, a launch that is checked, then launches that are timed.
#pragma once

#include <optional>
#include <vector>

#include "prefill.h"
#include "reference.h"

namespace bench {

// How times are taken.
struct Method {
    int runs = 30;
    double warm_up_ms = 100;
    size_t cache_bytes = size_t{256} << 20; // the largest cache between the compute units and memory
};

// Times of one part, in microseconds between two events.
struct Times {
    double median = 0;
    double fastest = 0;
    double slowest = 0;
};

// What the operation needs whoever computes it.
struct Bound {
    double bytes = 0; // inputs, outputs and states, each once
    double flops = 0; // products of the T-form
    explicit Bound(const Shape &shape);
};

struct Result {
    Shape shape;
    Bound bound;
    Deviation deviation;
    int copies = 0;               // of the tensors, which launches take in turn
    std::optional<Times> whole;   // none where the result is wrong
    std::optional<Times> prepare; // none where parts cannot be launched alone
    std::optional<Times> scan;
};

Result measure(const Implementation &implementation, const Shape &shape, const Method &method);

} // namespace bench
