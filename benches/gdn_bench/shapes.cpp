#include "shapes.h"

#include <numeric>

#include "failure.h"

namespace bench {
namespace {

// Beyond these the kernels' 32-bit counters end; the library refuses a little later.
constexpr int64_t max_tokens = (int64_t{1} << 31) - 64;
constexpr int64_t max_sequences = 1 << 20;
constexpr int64_t max_heads = 1 << 16;

Failure bad_shape(const std::string &text, const std::string &why) {
    return Failure(
        "--shape " + text + ": " + why +
            "; it is HK,HV,LENGTHS, such as 16,32,8192 or 2,8,4096x7+100 (seven sequences of 4096 tokens and "
            "one of 100)",
        Status::usage);
}

// A number in text[at...], which moves behind it.
int64_t number(const std::string &text, size_t &at, int64_t most, const char *what) {
    const size_t start = at;
    int64_t value = 0;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; at++) {
        value = value * 10 + (text[at] - '0');
        if (value > most)
            throw bad_shape(text, std::string(what) + " exceeds " + std::to_string(most));
    }
    if (at == start)
        throw bad_shape(text, std::string("expected ") + what + " at character " + std::to_string(start + 1));
    if (value == 0)
        throw bad_shape(text, std::string(what) + " is 0");
    return value;
}

bool accept(const std::string &text, size_t &at, char c) {
    if (at == text.size() || text[at] != c)
        return false;
    at++;
    return true;
}

std::vector<int64_t> lengths_at(const std::string &text, size_t &at) {
    std::vector<int64_t> lengths;
    int64_t tokens = 0;
    do {
        const int64_t length = number(text, at, max_tokens, "the length of a sequence");
        const int64_t times = accept(text, at, 'x') ? number(text, at, max_sequences, "the number of sequences") : 1;
        if (static_cast<int64_t>(lengths.size()) + times > max_sequences || length > (max_tokens - tokens) / times)
            throw bad_shape(text, "there are more than " + std::to_string(max_sequences) + " sequences or " +
                                      std::to_string(max_tokens) + " tokens");
        tokens += length * times;
        lengths.insert(lengths.end(), static_cast<size_t>(times), length);
    } while (accept(text, at, '+'));
    return lengths;
}

Shape shape(const char *set, int key_heads, int value_heads, const std::string &lengths) {
    Shape s = parse_shape(std::to_string(key_heads) + "," + std::to_string(value_heads) + "," + lengths);
    s.set = set;
    return s;
}

struct Heads {
    int key, value;
};

// "LENGTHxTIMES", as short as it goes.
std::string repeated(int64_t length, int64_t times) {
    return std::to_string(length) + (times == 1 ? "" : "x" + std::to_string(times));
}

std::vector<Shape> s1() {
    const Heads heads[] = {{2, 8}, {4, 16}, {8, 32}, {16, 64}, {16, 32}, {8, 24}, {16, 48}, {16, 16}, {32, 32}};
    const char *lengths[] = {"32768",      "16384",      "8192",    "4096",       "2048",
                             "28672+4096", "24576+8192", "16384x2", "8192+24576", "4096+28672",
                             "12288+4096", "6144+2048",  "4096x2",  "2048+6144",  "1024+7168",
                             "8192x4",     "4096x8",     "2048x4",  "1024x8"};
    std::vector<Shape> out;
    for (const Heads h : heads)
        for (const char *l : lengths)
            out.push_back(shape("S1", h.key, h.value, l));
    return out;
}

std::vector<Shape> s2() {
    std::vector<Shape> out;
    for (const int value_heads : {32, 64}) {
        for (const int ranks : {1, 2, 4, 8}) {
            const Heads h = {16 / ranks, value_heads / ranks};
            for (int64_t tokens = 1024; tokens <= 65536; tokens *= 2)
                out.push_back(shape("S2", h.key, h.value, repeated(tokens, 1)));
            for (int64_t tokens = 8192; tokens <= 65536; tokens *= 2)
                for (int64_t length = 1024; length <= 8192; length *= 2)
                    if (length < tokens) // one sequence is among the dense ones
                        out.push_back(shape("S2", h.key, h.value, repeated(length, tokens / length)));
        }
    }
    return out;
}

std::vector<Shape> s3() {
    constexpr int64_t k8 = 8192, k32 = 32768;
    std::vector<Shape> out;
    const auto equal = [&](Heads h, int64_t tokens, int64_t sequences) {
        // What does not divide goes to the last sequence.
        const int64_t length = tokens / sequences, rest = tokens % sequences;
        std::string text = repeated(length, rest == 0 ? sequences : sequences - 1);
        if (rest != 0)
            text += "+" + std::to_string(length + rest);
        out.push_back(shape("S3", h.key, h.value, text));
    };
    const char *ragged = "1024+2048+3072+3584+4608+5120+6144+7168";
    const char *bimodal = "512x4+7680x4";
    const char *skew = "25600+1024x7";
    const char *skew_last = "1024x7+25600";
    for (const int64_t tokens : {k8, k32})
        for (const int sequences : {1, 4, 8})
            equal({12, 12}, tokens, sequences);
    for (const int64_t tokens : {k8, k32})
        for (const int sequences : {1, 8})
            equal({24, 24}, tokens, sequences);
    for (const int64_t tokens : {k8, k32})
        equal({2, 4}, tokens, 8);
    for (const int64_t tokens : {k8, k32})
        equal({4, 8}, tokens, 4);
    equal({16, 16}, k8, 1);
    equal({8, 32}, k8, 1);
    equal({8, 32}, k32, 1);
    for (const char *lengths : {ragged, bimodal, skew, skew_last})
        out.push_back(shape("S3", 24, 24, lengths));
    for (const char *lengths : {ragged, skew})
        out.push_back(shape("S3", 2, 4, lengths));
    for (const int64_t tokens : {k8, k32})
        for (const int sequences : {1, 3, 5, 7})
            equal({2, 4}, tokens, sequences);
    return out;
}

std::vector<Shape> small() {
    Shape dims = shape("small", 1, 1, "80");
    dims.key_dim = 96;
    dims.value_dim = 192;
    return {shape("small", 1, 2, "128"), shape("small", 2, 4, "65+1+63"), shape("small", 1, 3, "16x5"), dims};
}

} // namespace

const std::vector<Set> &sets() {
    static const std::vector<Set> all = {
        {"S1", "FlashQLA's forward benchmark: 9 pairs of heads, one sequence, two of unequal lengths, four and eight",
         s1},
        {"S2", "aiter's tuning grid: Qwen3.5 35B and 397B on 1 to 8 GPUs, 1024 to 65536 tokens", s2},
        {"S3", "31 shapes of aiter's FlyDSL kernels; lengths of the ragged and skewed ones are ours", s3},
        {"small", "a moment on the simulator: checks this program, says nothing about speed", small},
    };
    return all;
}

const Set &set_named(const std::string &name) {
    std::string known;
    for (const Set &set : sets()) {
        if (name == set.name)
            return set;
        known += (known.empty() ? "" : ", ") + std::string(set.name);
    }
    throw Failure("--set " + name + ": there is no such set; there are " + known, Status::usage);
}

Shape parse_shape(const std::string &text) {
    Shape s;
    s.set = "-";
    size_t at = 0;
    s.key_heads = static_cast<int>(number(text, at, max_heads, "HK"));
    if (!accept(text, at, ','))
        throw bad_shape(text, "expected a comma after HK");
    s.value_heads = static_cast<int>(number(text, at, max_heads, "HV"));
    if (s.value_heads % s.key_heads != 0)
        throw bad_shape(text, "HV is not a multiple of HK");
    if (!accept(text, at, ','))
        throw bad_shape(text, "expected a comma after HV");
    const size_t start = at;
    s.lengths = lengths_at(text, at);
    if (at != text.size())
        throw bad_shape(text, "there is more at character " + std::to_string(at + 1));
    s.lengths_text = text.substr(start);
    return s;
}

int64_t Shape::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }

std::vector<int32_t> Shape::offsets() const {
    std::vector<int32_t> out = {0};
    for (const int64_t n : lengths)
        out.push_back(static_cast<int32_t>(out.back() + n));
    return out;
}

std::string Shape::name() const {
    return std::to_string(key_heads) + "," + std::to_string(value_heads) + "," + lengths_text;
}

} // namespace bench
