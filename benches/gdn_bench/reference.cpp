#include "reference.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace bench {
namespace {

constexpr int max_heads = 8;
constexpr int columns = 8;
// bf16 outputs are off by 2.1e-3 to 3.3e-3 in the simulator, final states by less; a chunk that is wrong among 512
// makes 4e-2.
constexpr double bar = 1e-2;

struct Sums {
    double output_errors = 0, output_squares = 0, state_errors = 0, state_squares = 0;
};

// One head of one sequence.
Sums walk(const Shape &s, const Inputs &x, const std::vector<uint16_t> &outputs, const std::vector<float> &states,
          int64_t sequence, int64_t head, int64_t begin, int64_t end) {
    const int kd = s.key_dim, vd = s.value_dim;
    const int64_t key_head = head / (s.value_heads / s.key_heads);
    const int64_t state_at = (sequence * s.value_heads + head) * kd * vd;
    const double scale = 1.0 / std::sqrt(double(kd));
    int column[columns];
    for (int c = 0; c < columns; c++)
        column[c] = static_cast<int>((head + c * (vd / columns) + c) % vd);
    std::vector<double> state(static_cast<size_t>(kd * columns));
    for (int i = 0; i < kd; i++)
        for (int c = 0; c < columns; c++)
            state[i * columns + c] = x.states[state_at + int64_t{i} * vd + column[c]];

    Sums sums;
    for (int64_t t = begin; t < end; t++) {
        const uint16_t *key = &x.k[(t * s.key_heads + key_head) * kd];
        const uint16_t *query = &x.q[(t * s.key_heads + key_head) * kd];
        const int64_t row = t * s.value_heads + head;
        const double decay = std::exp(double(x.g[row])), beta = x.beta[row];
        double read[columns] = {}, delta[columns], out[columns] = {};
        for (int i = 0; i < kd; i++) {
            const double k = from_bf16(key[i]);
            for (int c = 0; c < columns; c++)
                read[c] += k * (state[i * columns + c] *= decay);
        }
        for (int c = 0; c < columns; c++)
            delta[c] = beta * (from_bf16(x.v[row * vd + column[c]]) - read[c]);
        for (int i = 0; i < kd; i++) {
            const double k = from_bf16(key[i]), q = scale * from_bf16(query[i]);
            for (int c = 0; c < columns; c++)
                out[c] += q * (state[i * columns + c] += k * delta[c]);
        }
        for (int c = 0; c < columns; c++) {
            const double error = from_bf16(outputs[row * vd + column[c]]) - out[c];
            sums.output_errors += error * error;
            sums.output_squares += out[c] * out[c];
        }
    }
    for (int i = 0; i < kd; i++) {
        for (int c = 0; c < columns; c++) {
            const double right = state[i * columns + c];
            const double error = states[state_at + int64_t{i} * vd + column[c]] - right;
            sums.state_errors += error * error;
            sums.state_squares += right * right;
        }
    }
    return sums;
}

} // namespace

Deviation compare(const Shape &s, const Inputs &inputs, const std::vector<uint16_t> &outputs,
                  const std::vector<float> &states) {
    const std::vector<int32_t> offsets = s.offsets();
    const int64_t heads = std::min(max_heads, s.value_heads);
    std::vector<Sums> parts(static_cast<size_t>(s.sequences() * heads));
    in_parallel(static_cast<int64_t>(parts.size()), [&](int64_t i) {
        const int64_t n = i / heads;
        // Spread from the first to the last, others for the next sequence.
        const int64_t head = (i % heads * s.value_heads / heads + n) % s.value_heads;
        parts[i] = walk(s, inputs, outputs, states, n, head, offsets[n], offsets[n + 1]);
    });
    Sums sum;
    for (const Sums &p : parts) {
        sum.output_errors += p.output_errors;
        sum.output_squares += p.output_squares;
        sum.state_errors += p.state_errors;
        sum.state_squares += p.state_squares;
    }
    Deviation out;
    out.outputs = std::sqrt(sum.output_errors / sum.output_squares);
    out.states = std::sqrt(sum.state_errors / sum.state_squares);
    // Outputs held NaN before the launch.
    const auto finite = [](double x) { return std::isfinite(x); };
    const bool whole = std::all_of(outputs.begin(), outputs.end(), [&](uint16_t x) { return finite(from_bf16(x)); }) &&
                       std::all_of(states.begin(), states.end(), finite);
    if (!whole)
        out.objection = "an output or a final state is not finite, or was not written";
    else if (!(out.outputs <= bar && out.states <= bar))
        out.objection = "the relative rms error is " + std::to_string(out.outputs) + " of outputs and " +
                        std::to_string(out.states) + " of final states; at most " + std::to_string(bar) + " passes";
    return out;
}

} // namespace bench
