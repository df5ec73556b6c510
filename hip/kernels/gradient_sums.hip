// Gradients of weights: sums of the records that the workgroups of a backward kernel leave. The order of additions
// depends on the number of records alone, so that two launches give the same bits.
//
// partials [records, columns] f32; two outputs, f32 of any strides (dwk_gradient_sums_part).
//
// 16 threads share a column. Each adds every 16th record; then their sums are added in order.
#include "../arch/contract.h"
#include "../kernel_args.h"

namespace {

constexpr int threads = 256;
constexpr int columns = 16; // of a workgroup
constexpr int slices = threads / columns;

DEVICE void store(const dwk_gradient_sums_part &part, u32 column, float sum) {
    if (part.out) {
        const u32 outer = column / (u32)part.inner, inner = column - outer * part.inner;
        part.out[outer * part.outer_stride + inner * part.inner_stride] = sum;
    }
}

} // namespace

KERNEL(threads, 4) void dw_gradient_sums(dwk_gradient_sums_args x) {
    SHARED float sums[slices][columns];
    const int within = arch::thread() % columns, slice = arch::thread() / columns;
    const int column = arch::workgroup() * columns + within;
    float sum = 0.0f;
    if (column < x.columns) {
        const float *from = x.partials + (int64_t)slice * x.columns + column;
        const int64_t step = (int64_t)slices * x.columns;
#pragma unroll 4
        for (int record = slice; record < x.records; record += slices) {
            sum += *from;
            from += step;
        }
    }
    sums[slice][within] = sum;
    arch::workgroup_sync();
    if (slice == 0 && column < x.columns) {
        float all = 0.0f;
        for (int i = 0; i < slices; ++i) {
            all += sums[i][within];
        }
        if (column < x.first.columns) {
            store(x.first, column, all);
        } else {
            store(x.second, column - x.first.columns, all);
        }
    }
}
