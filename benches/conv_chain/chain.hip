// The convolution in two kernels, as serving engines have had it: what the fused one is set beside.
// Written for that comparison, with what makes public kernels of this kind fast: eight channels a thread, which walks
// over a block of tokens; 16 bytes an access. bf16, width 4, SiLU, one sequence that starts from zeros.
//   conv   y[t, c] = silu(sum over j of weight[c, j] x[t - 3 + j, c]), all channels in one tensor [T, dim]
//   split  q, k and v of it, each a tensor of its own
typedef float f32x8 __attribute__((ext_vector_type(8)));
typedef unsigned u32x4 __attribute__((ext_vector_type(4)));

#define DEVICE static inline __attribute__((device, always_inline))
#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(256, 256)))

namespace {

constexpr int threads = 256, octet = 8, width = 4;
constexpr int run = 32; // tokens of a workgroup

DEVICE int thread() { return (int)__builtin_amdgcn_workitem_id_x(); }
DEVICE int workgroup() { return (int)__builtin_amdgcn_workgroup_id_x(); }

DEVICE f32x8 widened(u32x4 x) {
    f32x8 out;
    for (int i = 0; i < octet; ++i) {
        const unsigned word = x[i / 2];
        out[i] = __builtin_bit_cast(float, i % 2 ? word & 0xffff0000u : word << 16);
    }
    return out;
}

// To nearest even.
DEVICE unsigned rounded(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

DEVICE float silu(float x) { return x * __builtin_amdgcn_rcpf(1.0f + __builtin_amdgcn_exp2f(-1.44269504f * x)); }

} // namespace

// Rows of x are `stride` elements apart.
KERNEL void chain_conv(const unsigned short *x, const unsigned short *weight, unsigned short *y, long stride,
                       int tokens, int dim) {
    const int slabs = (dim + threads * octet - 1) / (threads * octet);
    const int channel = (workgroup() % slabs * threads + thread()) * octet, first = workgroup() / slabs * run;
    if (channel >= dim) {
        return;
    }
    f32x8 taps[width];
    for (int c = 0; c < octet; ++c) {
        for (int j = 0; j < width; ++j) {
            const unsigned tap = weight[(channel + c) * width + j];
            taps[j][c] = __builtin_bit_cast(float, tap << 16);
        }
    }
    const auto row = [&](int t) __attribute__((always_inline)) {
        return t < 0 ? f32x8{} : widened(*(const u32x4 *)(x + t * stride + channel));
    };
    f32x8 before[width - 1];
    for (int j = 0; j < width - 1; ++j) {
        before[j] = row(first - (width - 1) + j);
    }
    const int last = first + run < tokens ? first + run : tokens;
#pragma unroll 4
    for (int t = first; t < last; ++t) {
        const f32x8 now = row(t);
        f32x8 sum = taps[0] * before[0];
        sum = __builtin_elementwise_fma(taps[1], before[1], sum);
        sum = __builtin_elementwise_fma(taps[2], before[2], sum);
        sum = __builtin_elementwise_fma(taps[3], now, sum);
        u32x4 out;
        for (int i = 0; i < octet / 2; ++i) {
            out[i] = rounded(silu(sum[2 * i])) | rounded(silu(sum[2 * i + 1])) << 16;
        }
        *(u32x4 *)(y + (long)t * dim + channel) = out;
        before[0] = before[1];
        before[1] = before[2];
        before[2] = now;
    }
}

// q and k have `keys` channels, v the rest.
KERNEL void chain_split(const unsigned short *y, unsigned short *q, unsigned short *k, unsigned short *v, int tokens,
                        int dim, int keys) {
    const long octets = dim / octet, index = (long)workgroup() * threads + thread();
    if (index >= tokens * octets) {
        return;
    }
    const long t = index / octets;
    const int channel = (int)(index - t * octets) * octet, values = dim - 2 * keys;
    const u32x4 piece = *(const u32x4 *)(y + t * dim + channel);
    unsigned short *to = channel < keys       ? q + t * keys + channel
                         : channel < 2 * keys ? k + t * keys + channel - keys
                                              : v + t * values + channel - 2 * keys;
    *(u32x4 *)to = piece;
}
