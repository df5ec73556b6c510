#include "kernels.h"

#include <cmath>
#include <fstream>
#include <sstream>

#include "../../hip/kernel_args.h"
#include "failure.h"

namespace bench {
namespace {

// First line of a list of kernels that this program can launch (`code_objects::save`).
const char *const list_format = "format 2";

// Chunks of all sequences, at most: their own, rounded up where they lie unfavourably.
int64_t slots(const Shape &s) { return s.tokens() / DWK_CHUNK + s.sequences(); }

int64_t slabs(const Shape &s, const Kernel &scan) { return (s.value_dim + scan.columns - 1) / scan.columns; }

// Of a dense [T, H, D].
dwk_token_strides dense(int64_t heads, int64_t dim) { return {0, heads * dim, dim}; }

template <typename Arguments>
void enqueue(const Stream &stream, const Kernel &kernel, int64_t workgroups, Arguments arguments) {
    if (sizeof arguments != kernel.argument_bytes)
        throw Failure(kernel.name + " takes " + std::to_string(kernel.argument_bytes) +
                      " bytes of arguments, and this program was compiled for " + std::to_string(sizeof arguments) +
                      ": kernels and program are of different versions");
    // Descriptions of q, k, v and states for the copy engine of NVIDIA GPUs: zeros, so that the kernel's threads move
    // them.
    alignas(64) char maps[DWK_MAPS_BYTES] = {};
    if (kernel.second_argument_bytes > sizeof maps)
        throw Failure(kernel.name + " takes a second argument of " + std::to_string(kernel.second_argument_bytes) +
                      " bytes, and this program knows one of " + std::to_string(sizeof maps) +
                      ": kernels and program are of different versions");
    void *parameters[] = {&arguments, maps};
    check(hipModuleLaunchKernel(kernel.function, static_cast<unsigned>(workgroups), 1, 1, kernel.threads, 1, 1,
                                kernel.shared_bytes, stream.handle(), parameters, nullptr),
          "hipModuleLaunchKernel", kernel.name);
}

class Unpartitioned : public Prefill {
  public:
    Unpartitioned(const Kernels &kernels, const Shape &shape)
        : shape_(shape), dies_(kernels.dies()), prepare_(kernels.named("dw_prefill_prepare_bf16")),
          scan_(kernels.scan_for(shape.key_dim)), offsets_(Buffer::of(shape.offsets())) {}

    size_t workspace_bytes() const override {
        return static_cast<size_t>(slots(shape_)) * static_cast<size_t>(shape_.value_heads) * DWK_RECORD_BYTES;
    }
    bool has_parts() const override { return true; }

    void launch(const Stream &stream, const Tensors &x, const Buffer &workspace, Part part) const override {
        const Shape &s = shape_;
        const dwk_token_strides keys = dense(s.key_heads, s.key_dim), values = dense(s.value_heads, s.value_dim);
        const dwk_token_strides scalars = dense(s.value_heads, 1);
        const dwk_state_strides states = {int64_t{s.value_heads} * s.key_dim * s.value_dim,
                                          int64_t{s.key_dim} * s.value_dim, s.value_dim};

        dwk_prefill_prepare_args prepare = {};
        prepare.q = x.q.address();
        prepare.k = x.k.address();
        prepare.g = x.g.address();
        prepare.beta = x.beta.address();
        prepare.o = x.o.address();
        prepare.cu_seqlens = static_cast<const int32_t *>(offsets_.address());
        prepare.records = workspace.address();
        prepare.q_strides = prepare.k_strides = keys;
        prepare.g_strides = prepare.beta_strides = scalars;
        prepare.o_strides = values;
        prepare.sequences = static_cast<int32_t>(s.sequences());
        prepare.tokens = static_cast<int32_t>(s.tokens());
        prepare.key_heads = s.key_heads;
        prepare.value_heads = s.value_heads;
        prepare.key_dim = s.key_dim;
        prepare.value_dim = s.value_dim;
        prepare.g_type = prepare.beta_type = DWK_F32;
        prepare.head_groups = 1;
        prepare.group_heads = s.value_heads / s.key_heads;
        prepare.dies = dies_;

        dwk_prefill_scan_args scan = {};
        scan.q = prepare.q;
        scan.k = prepare.k;
        scan.v = x.v.address();
        scan.o = prepare.o;
        scan.initial_state = x.initial_state.address();
        scan.final_state = x.final_state.address();
        scan.cu_seqlens = prepare.cu_seqlens;
        scan.records = prepare.records;
        scan.q_strides = scan.k_strides = keys;
        scan.v_strides = scan.o_strides = values;
        scan.initial_strides = scan.final_strides = states;
        scan.sequences = prepare.sequences;
        scan.key_heads = s.key_heads;
        scan.value_heads = s.value_heads;
        scan.key_dim = s.key_dim;
        scan.value_dim = s.value_dim;
        scan.scale = 1.0f / std::sqrt(static_cast<float>(s.key_dim));
        scan.initial_type = scan.final_type = DWK_F32;
        scan.slabs = static_cast<int32_t>(slabs(s, scan_));
        scan.tokens = prepare.tokens;
        scan.items_count = prepare.sequences;
        scan.dies = dies_;

        if (part != Part::scan) // one slot more, for rows past the last sequence
            enqueue(stream, prepare_, (slots(s) + 1) * s.key_heads, prepare);
        if (part != Part::prepare)
            enqueue(stream, scan_, s.sequences() * s.value_heads * scan.slabs, scan);
    }

  private:
    Shape shape_;
    int dies_;
    const Kernel &prepare_;
    const Kernel &scan_;
    Buffer offsets_;
};

} // namespace

Kernels::Kernels(const std::string &folder, const Device &device)
    : dies_(device.dies()), list_(folder + "/" + device.arch + "/kernels.txt") {
    const std::string &arch = device.arch;
    std::ifstream list(list_);
    if (!list)
        throw Failure("there are no kernels for " + arch + ": " + list_ +
                      " cannot be read\ndeltawave info --save-kernels " + folder +
                      " writes it, where the program was built with DELTAWAVE_ARCHS=" + arch);
    std::map<std::string, size_t> loaded;
    std::string line;
    if (!std::getline(list, line) || line != list_format)
        throw Failure(list_ + " begins with '" + line + "', not '" + list_format +
                      "': kernels and program are of different versions");
    while (std::getline(list, line)) {
        std::istringstream words(line);
        Kernel k;
        std::string file;
        if (!(words >> k.name >> file >> k.threads >> k.columns >> k.shared_bytes >> k.argument_bytes >>
              k.second_argument_bytes))
            throw Failure(list_ + ": not a kernel, its file and five numbers: " + line);
        const auto [entry, is_new] = loaded.try_emplace(file, modules_.size());
        if (is_new)
            modules_.emplace_back(folder + "/" + arch + "/" + file);
        k.function = modules_[entry->second].function(k.name, k.shared_bytes);
        kernels_[k.name] = k;
    }
}

const Kernel &Kernels::named(const std::string &name) const {
    const auto found = kernels_.find(name);
    if (found == kernels_.end())
        throw Failure(list_ + " lists no kernel " + name);
    return found->second;
}

const Kernel &Kernels::scan_for(int key_dim) const {
    const std::string prefix = "dw_prefill_scan_bf16_k";
    const Kernel *best = nullptr;
    int smallest = 0;
    for (const auto &[name, kernel] : kernels_) {
        if (name.rfind(prefix, 0) != 0 || kernel.columns == 0)
            continue;
        const int bucket = std::atoi(name.c_str() + prefix.size());
        if (bucket >= key_dim && (best == nullptr || bucket < smallest)) {
            best = &kernel;
            smallest = bucket;
        }
    }
    if (best == nullptr)
        throw Failure(list_ + " lists no scan for keys of " + std::to_string(key_dim));
    return *best;
}

std::unique_ptr<Prefill> Kernels::prefill(const Shape &shape) const {
    return std::make_unique<Unpartitioned>(*this, shape);
}

} // namespace bench
