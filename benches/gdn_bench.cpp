// Measures the prefill kernels through the HIP runtime: plain HIP C++, the code objects that ship, no Rust.
//
// | what | file, in gdn_bench/ |
// |---|---|
// | arguments, --help | options |
// | sets of shapes | shapes |
// | inputs; the result that they must have | inputs, reference |
// | devices, memory, events; errors | device, failure |
// | tensors; what launches a prefill | prefill |
// | the kernels and their arguments (hip/kernel_args.h) | kernels |
// | or the C library and its plans (include/deltawave.h) | library |
// | one shape: checked, then timed; what it needs at least | measure |
// | table, JSON, peaks of devices | report |
//
// `make bench` builds and runs it; benches/gdn_bench/build is the command line.
#include <cstdio>
#include <exception>

#include "gdn_bench/failure.h"
#include "gdn_bench/kernels.h"
#include "gdn_bench/library.h"
#include "gdn_bench/measure.h"
#include "gdn_bench/options.h"
#include "gdn_bench/report.h"

using namespace bench;

namespace {

Status run(const Options &options) {
    const Device device = Device::open(options.device);
    std::unique_ptr<Implementation> implementation;
    if (options.library.empty())
        implementation = std::make_unique<Kernels>(options.kernels, device);
    else
        implementation = std::make_unique<Library>(options.library, options.device, options.segments);
    Method method;
    if (device.simulated)
        method = {1, 0, 0};
    method.runs = options.runs.value_or(method.runs);
    method.warm_up_ms = options.warm_up_ms.value_or(method.warm_up_ms);
    method.cache_bytes = options.cache_bytes.value_or(method.cache_bytes);
    std::vector<Shape> shapes = options.shapes;
    if (shapes.empty())
        shapes = set_named(device.simulated ? "small" : "S1").shapes();

    const Report report(device, *implementation, options.peak ? options.peak : peak_of(device), method, options.json);
    Status status = Status::ok;
    for (const Shape &shape : shapes) {
        try {
            const Result result = measure(*implementation, shape, method);
            report.result(result);
            if (!result.deviation.objection.empty())
                status = Status::failed;
        } catch (const std::exception &error) {
            // A kernel that failed leaves a device on which nothing else runs: later shapes say so, too.
            report.failure(shape, error.what());
            status = Status::failed;
        }
    }
    return status;
}

} // namespace

int main(int count, char **arguments) {
    Status status = Status::ok;
    try {
        const Options options = parse({arguments + 1, arguments + count}, arguments[0]);
        if (options.help)
            std::fputs(help, stdout);
        else if (options.list)
            print_sets();
        else
            status = run(options);
    } catch (const Failure &failure) {
        std::fprintf(stderr, "error: %s\n", failure.what());
        status = failure.status;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        status = Status::failed;
    }
    return static_cast<int>(status);
}
