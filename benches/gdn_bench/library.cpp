#include "library.h"

#include <initializer_list>
#include <type_traits>

#include <dlfcn.h>

#include "../../include/deltawave.h"
#include "failure.h"

namespace bench {

// The functions that are used, with the types of the header.
struct Library::Functions {
    void *library = nullptr;
    dw_context *context = nullptr;
    decltype(&::dw_abi_version) abi_version = nullptr;
    decltype(&::dw_version) version = nullptr;
    decltype(&::dw_last_error) last_error = nullptr;
    decltype(&::dw_context_create) context_create = nullptr;
    decltype(&::dw_context_destroy) context_destroy = nullptr;
    decltype(&::dw_prefill_packed) packed = nullptr;
    decltype(&::dw_prefill_destroy) destroy = nullptr;
    decltype(&::dw_prefill_workspace_bytes) workspace_bytes = nullptr;
    decltype(&::dw_prefill_launch) launch = nullptr;

    void check(int status, const char *call) const {
        if (status != DW_OK)
            throw Failure(std::string(call) + ": " + last_error());
    }
};

namespace {

dw_tensor dense(const Buffer &buffer, int32_t dtype, std::initializer_list<int64_t> shape) {
    dw_tensor t = {};
    t.size = sizeof t;
    t.data = buffer.address();
    t.dtype = dtype;
    t.rank = static_cast<int32_t>(shape.size());
    int i = 0;
    for (const int64_t n : shape)
        t.shape[i++] = n;
    int64_t stride = 1;
    for (i = t.rank - 1; i >= 0; i--) {
        t.strides[i] = stride;
        stride *= t.shape[i];
    }
    return t;
}

class Planned : public Prefill {
  public:
    Planned(const Library::Functions &functions, const Shape &shape, int segments) : f_(functions), shape_(shape) {
        dw_prefill_spec spec = {};
        spec.size = sizeof spec;
        spec.dtype = DW_BF16;
        spec.key_heads = shape.key_heads;
        spec.value_heads = shape.value_heads;
        spec.key_dim = shape.key_dim;
        spec.value_dim = shape.value_dim;
        spec.segments = segments;
        const std::vector<int32_t> offsets = shape.offsets();
        dw_lengths lengths = {};
        lengths.size = sizeof lengths;
        lengths.data = offsets.data();
        lengths.entries = static_cast<int64_t>(offsets.size());
        lengths.dtype = DW_I32;
        f_.check(f_.packed(f_.context, &spec, &lengths, shape.tokens(), &plan_), "dw_prefill_packed");
    }
    ~Planned() override { f_.destroy(plan_); }
    Planned(const Planned &) = delete;

    size_t workspace_bytes() const override {
        size_t bytes = 0;
        f_.check(f_.workspace_bytes(plan_, &bytes), "dw_prefill_workspace_bytes");
        return bytes;
    }
    bool has_parts() const override { return false; }

    void launch(const Stream &stream, const Tensors &x, const Buffer &workspace, Part) const override {
        const int64_t tokens = shape_.tokens(), hk = shape_.key_heads, hv = shape_.value_heads;
        const dw_tensor q = dense(x.q, DW_BF16, {tokens, hk, shape_.key_dim});
        const dw_tensor k = dense(x.k, DW_BF16, {tokens, hk, shape_.key_dim});
        const dw_tensor v = dense(x.v, DW_BF16, {tokens, hv, shape_.value_dim});
        const dw_tensor o = dense(x.o, DW_BF16, {tokens, hv, shape_.value_dim});
        const dw_tensor g = dense(x.g, DW_F32, {tokens, hv});
        const dw_tensor beta = dense(x.beta, DW_F32, {tokens, hv});
        const std::initializer_list<int64_t> states = {shape_.sequences(), hv, shape_.key_dim, shape_.value_dim};
        const dw_tensor initial = dense(x.initial_state, DW_F32, states);
        const dw_tensor last = dense(x.final_state, DW_F32, states);
        dw_prefill_tensors t = {};
        t.size = sizeof t;
        t.q = &q;
        t.k = &k;
        t.v = &v;
        t.o = &o;
        t.g = &g;
        t.beta = &beta;
        t.initial_state = &initial;
        t.initial_layout = DW_STATE_KEY_MAJOR;
        t.final_state = &last;
        t.final_layout = DW_STATE_KEY_MAJOR;
        t.workspace = workspace.address();
        t.workspace_bytes = workspace.bytes();
        f_.check(f_.launch(plan_, stream.handle(), &t), "dw_prefill_launch");
    }

  private:
    const Library::Functions &f_;
    Shape shape_;
    dw_prefill *plan_ = nullptr;
};

} // namespace

Library::Library(const std::string &path, int device, int segments)
    : path_(path), segments_(segments), functions_(std::make_unique<Functions>()) {
    Functions &f = *functions_;
    // Never unloaded: its threads may outlive it.
    f.library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (f.library == nullptr)
        throw Failure("--library " + path + ": " + dlerror() + "; cargo build --release -p deltawave-c makes it");
    const auto find = [&](auto &function, const char *name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(f.library, name));
        if (function == nullptr)
            throw Failure("--library " + path + ": it has no " + name);
    };
    find(f.abi_version, "dw_abi_version");
    if (f.abi_version() != DW_ABI_VERSION)
        throw Failure("--library " + path + ": its ABI is version " + std::to_string(f.abi_version()) +
                      ", and this program was compiled for " + std::to_string(DW_ABI_VERSION));
    find(f.version, "dw_version");
    find(f.last_error, "dw_last_error");
    find(f.context_create, "dw_context_create");
    find(f.context_destroy, "dw_context_destroy");
    find(f.packed, "dw_prefill_packed");
    find(f.destroy, "dw_prefill_destroy");
    find(f.workspace_bytes, "dw_prefill_workspace_bytes");
    find(f.launch, "dw_prefill_launch");
    // It takes the runtime that the process has loaded, which is this program's.
    f.check(f.context_create(DW_BACKEND_HIP, device, &f.context), "dw_context_create");
}

Library::~Library() {
    if (functions_->context != nullptr)
        functions_->context_destroy(functions_->context);
}

std::unique_ptr<Prefill> Library::prefill(const Shape &shape) const {
    return std::make_unique<Planned>(*functions_, shape, segments_);
}

std::string Library::name() const {
    const std::string plan = segments_ == 0 ? "its plan" : std::to_string(segments_) + " segments";
    return path_ + " " + functions_->version() + ", " + plan;
}

} // namespace bench
