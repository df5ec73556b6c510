// Checks cu_seqlens [sequences + 1], i32 or i64, on the device, replaces entries that would lead out of bounds, and
// makes the lists of a prefill's work (prefill/lengths.h). One workgroup.
#include "../prefill/lengths.h"

namespace {

constexpr int waves = plan::parts;

} // namespace

KERNEL(waves *arch::lanes, 1) void dw_prefill_lengths(dwk_prefill_lengths_args x) {
    lengths::make<waves>(arch::reread(x));
}
