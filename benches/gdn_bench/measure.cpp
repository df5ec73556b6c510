#include "measure.h"

#include <algorithm>
#include <chrono>

#include "../../hip/kernel_args.h"
#include "failure.h"

namespace bench {
namespace {

// Launches that are enqueued before the warm-up looks at the clock.
constexpr int batch = 4;
// Beyond it copies of small tensors only take time to make.
constexpr size_t max_copies = 64;

std::string gib(size_t bytes) {
    const size_t tenths = bytes * 10 >> 30;
    return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GiB";
}

Times time(const Prefill &prefill, const std::vector<Tensors> &tensors, const Buffer &workspace, Part part,
           const Method &method) {
    const Stream stream;
    size_t turn = 0;
    const auto launch = [&] { prefill.launch(stream, tensors[turn++ % tensors.size()], workspace, part); };
    using clock = std::chrono::steady_clock;
    const auto begin = clock::now();
    while (std::chrono::duration<double, std::milli>(clock::now() - begin).count() < method.warm_up_ms) {
        for (int i = 0; i < batch; i++)
            launch();
        stream.synchronize();
    }
    const auto runs = static_cast<size_t>(method.runs);
    const std::vector<Event> starts(runs), ends(runs);
    for (size_t i = 0; i < runs; i++) {
        starts[i].record(stream);
        launch();
        ends[i].record(stream);
    }
    stream.synchronize();
    std::vector<double> times;
    for (size_t i = 0; i < runs; i++)
        times.push_back(ends[i].microseconds_since(starts[i]));
    std::sort(times.begin(), times.end());
    return {(times[(runs - 1) / 2] + times[runs / 2]) / 2, times.front(), times.back()};
}

} // namespace

Bound::Bound(const Shape &s) {
    const double keys = double(s.tokens()) * s.key_heads * s.key_dim;
    const double values = double(s.tokens()) * s.value_heads * s.value_dim;
    const double scalars = double(s.tokens()) * s.value_heads;
    const double states = double(s.sequences()) * s.value_heads * s.key_dim * s.value_dim;
    // q, k, v, o in 16 bits; g, beta, initial and final states in 32.
    bytes = 2 * (2 * keys + 2 * values) + 4 * (2 * scalars + 2 * states);

    // Of a chunk of n tokens: K K^T and Q K^T for each key head; the inverse, T X and P U, and K S, Q S and K^T U for
    // each value head.
    const auto chunk = [&](double n) {
        const double k = s.key_dim, v = s.value_dim;
        return s.key_heads * (2 * 2 * n * n * k) +
               s.value_heads * (n * n * n / 3 + 2 * 2 * n * n * v + 3 * 2 * n * k * v);
    };
    for (const int64_t length : s.lengths) {
        flops += double(length / DWK_CHUNK) * chunk(DWK_CHUNK);
        if (length % DWK_CHUNK != 0)
            flops += chunk(double(length % DWK_CHUNK));
    }
}

Result measure(const Implementation &implementation, const Shape &shape, const Method &method) {
    Result out{shape, Bound(shape), {}, 0, {}, {}, {}};
    const std::unique_ptr<Prefill> prefill = implementation.prefill(shape);
    const size_t workspace_bytes = prefill->workspace_bytes();
    const auto tensor_bytes = static_cast<size_t>(out.bound.bytes);
    const size_t available = Device::free_bytes();
    if (workspace_bytes + tensor_bytes > available / 10 * 9)
        throw Failure("it takes " + gib(workspace_bytes + tensor_bytes) + " of device memory, of which " +
                      gib(available) + " are free");

    const Inputs inputs(shape);
    Buffer workspace(workspace_bytes);
    workspace.fill(0xff);
    std::vector<Tensors> tensors;
    tensors.emplace_back(inputs);
    {
        const Stream stream;
        prefill->launch(stream, tensors[0], workspace, Part::whole);
        stream.synchronize();
    }
    out.deviation = compare(shape, inputs, tensors[0].o.download<uint16_t>(), tensors[0].final_state.download<float>());
    if (!out.deviation.objection.empty())
        return out;

    // No launch finds in a cache what an earlier one read or wrote.
    const size_t wanted = (2 * method.cache_bytes + tensor_bytes - 1) / tensor_bytes;
    const size_t room = (available / 10 * 9 - workspace_bytes) / tensor_bytes;
    while (tensors.size() < std::min({wanted, room, max_copies}))
        tensors.emplace_back(inputs);
    out.copies = static_cast<int>(tensors.size());
    out.whole = time(*prefill, tensors, workspace, Part::whole, method);
    if (prefill->has_parts()) {
        out.prepare = time(*prefill, tensors, workspace, Part::prepare, method);
        // Its records are of the tensors of the last preparation: the contents of all copies are the same.
        out.scan = time(*prefill, tensors, workspace, Part::scan, method);
    }
    return out;
}

} // namespace bench
