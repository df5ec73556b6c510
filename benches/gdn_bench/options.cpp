#include "options.h"

#include <cmath>
#include <cstdlib>

#include "failure.h"

namespace bench {

const char *const help = R"(Measures deltawave's prefill kernels (Gated DeltaNet, bf16) through the HIP runtime.

    gdn_bench [--set NAME | --small | --shape HK,HV,LENGTHS]... [options]

Every shape is computed once and compared with the token recurrence in double precision before it is timed. Times are
those between two HIP events around the launches: medians, after a warm-up, over copies of the tensors that together
exceed the caches. Kernels are launched as they are, and every sequence is walked from its first chunk to its last; what
the library makes of a shape, partitioning among it, is measured with --library.

What is measured (all that are given; without any, S1, or on the simulator the small set):
    --set NAME               a set of shapes; --list names them
    --small                  the same as --set small
    --shape HK,HV,LENGTHS    key heads, value heads, tokens of each sequence: 16,32,8192 or 2,8,4096x7+100
    --dims K,V               head dimensions of the shapes of --shape that follow (128,128)
    --list                   print the sets and their shapes, and stop

How:
    --runs N                 launches that are timed (30; on the simulator 1)
    --warm-up MS             milliseconds of launches before them (100; on the simulator 0)
    --cache MIB              the largest cache: copies of the tensors exceed it twice (256; on the simulator 0)
    --device N               the device (0)
    --library FILE           launch through libdeltawave_c.so, with its plans; on NVIDIA GPUs the copy engine then reads
                             q, k and v, and moves states of short sequences
    --segments N             with --library: segments of the longest sequence, to be walked in parallel; 1: sequences
                             are not cut (as the library plans)
    --kernels DIR            what `deltawave info --save-kernels DIR` wrote (kernels, beside this program)
    --roofline TFLOPS,TBPS   peak of bf16 products and bandwidth of memory, where the device is not known or clocked
                             otherwise

What is printed:
    (nothing)                a table
    --json                   a JSON object on a line for each shape; nothing else on stdout

Reached TFLOP/s and GB/s are what the operation needs over the time: dense products of the T-form in chunks of 64, and
inputs, outputs and states moved once. `roofline` is the larger of the times that both would take at the device's peaks,
over the time.

Without a GPU: LD_LIBRARY_PATH=target/dropin runs this program on the gfx942 simulator. Times are then those of this
host's CPU and say nothing about a GPU; they are labelled so, and nothing is derived from them.

Exit status: 0 success, 1 a wrong result or a failure, 2 wrong usage, 3 no device.
)";

namespace {

double positive(const std::string &option, const std::string &text, double least, double most) {
    char *end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(value >= least && value <= most)) {
        const auto plain = [](double x) { return std::to_string(static_cast<long long>(x)); };
        throw Failure(option + " " + text + ": it must be a number from " + plain(least) + " to " + plain(most),
                      Status::usage);
    }
    return value;
}

int whole(const std::string &option, const std::string &text, double least, double most) {
    const double value = positive(option, text, least, most);
    if (value != std::floor(value))
        throw Failure(option + " " + text + ": it must be a whole number", Status::usage);
    return static_cast<int>(value);
}

// "A,B".
std::pair<std::string, std::string> pair(const std::string &option, const std::string &text) {
    const size_t comma = text.find(',');
    if (comma == std::string::npos)
        throw Failure(option + " " + text + ": it must be two numbers, with a comma between them", Status::usage);
    return {text.substr(0, comma), text.substr(comma + 1)};
}

int head_dim(const std::string &text) {
    const int dim = whole("--dims", text, 16, 256);
    if (dim % 16 != 0)
        throw Failure("--dims " + text + ": dimensions are multiples of 16", Status::usage);
    return dim;
}

} // namespace

Options parse(const std::vector<std::string> &arguments, const std::string &program) {
    Options out;
    const size_t slash = program.rfind('/');
    out.kernels = (slash == std::string::npos ? "." : program.substr(0, slash)) + "/kernels";
    int key_dim = 128, value_dim = 128;
    size_t at = 0;
    const auto value = [&](const std::string &option) -> const std::string & {
        if (++at == arguments.size())
            throw Failure(option + ": its value is missing", Status::usage);
        return arguments[at];
    };
    const auto add_set = [&](const std::string &name) {
        for (Shape &s : set_named(name).shapes())
            out.shapes.push_back(std::move(s));
    };
    for (; at < arguments.size(); at++) {
        const std::string &option = arguments[at];
        if (option == "--help" || option == "-h") {
            out.help = true;
        } else if (option == "--list") {
            out.list = true;
        } else if (option == "--json") {
            out.json = true;
        } else if (option == "--set") {
            add_set(value(option));
        } else if (option == "--small") {
            add_set("small");
        } else if (option == "--shape") {
            Shape s = parse_shape(value(option));
            s.key_dim = key_dim;
            s.value_dim = value_dim;
            out.shapes.push_back(std::move(s));
        } else if (option == "--dims") {
            const auto [k, v] = pair(option, value(option));
            key_dim = head_dim(k);
            value_dim = head_dim(v);
        } else if (option == "--runs") {
            out.runs = whole(option, value(option), 1, 100000);
        } else if (option == "--warm-up") {
            out.warm_up_ms = positive(option, value(option), 0, 600000);
        } else if (option == "--cache") {
            out.cache_bytes = static_cast<size_t>(whole(option, value(option), 0, 65536)) << 20;
        } else if (option == "--device") {
            out.device = whole(option, value(option), 0, 1024);
        } else if (option == "--kernels") {
            out.kernels = value(option);
        } else if (option == "--library") {
            out.library = value(option);
        } else if (option == "--segments") {
            out.segments = whole(option, value(option), 1, 65536);
        } else if (option == "--roofline") {
            const auto [tflops, tbps] = pair(option, value(option));
            out.peak =
                Peak{"--roofline", positive(option, tflops, 0, 1e6) * 1e12, positive(option, tbps, 0, 1e6) * 1e12};
            if (!(out.peak->flops > 0 && out.peak->bytes > 0))
                throw Failure("--roofline " + arguments[at] + ": both must exceed 0", Status::usage);
        } else {
            throw Failure(option + ": there is no such option; --help lists them", Status::usage);
        }
    }
    if (out.segments != 0 && out.library.empty())
        throw Failure("--segments: it is for --library; the kernels are launched unpartitioned", Status::usage);
    return out;
}

} // namespace bench
