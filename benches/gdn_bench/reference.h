// The token recurrence in double precision, on some columns of some heads, and what the outputs deviate from it.
#pragma once

#include <string>
#include <vector>

#include "inputs.h"
#include "shapes.h"

namespace bench {

// Errors, as rms over the rms of what is right.
struct Deviation {
    double outputs = 0;
    double states = 0;
    std::string objection; // empty: the result passes
};

// Compares outputs [T, HV, V] (bf16) and final states [N, HV, K, V] with the recurrence. Every element must be finite;
// the recurrence is computed for up to 8 heads of each sequence and 8 columns of each: columns of the state do not
// depend on each other.
Deviation compare(const Shape &shape, const Inputs &inputs, const std::vector<uint16_t> &outputs,
                  const std::vector<float> &states);

} // namespace bench
