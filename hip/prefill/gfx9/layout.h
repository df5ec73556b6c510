// Layout of a slab of value columns in a workgroup's waves on CDNA: one of prefill_scan and prefill_summarise, another
// of prefill_fused.
#pragma once

#if defined(PREFILL_FUSED)
#include "fused_layout.h"
#else
#include "scan_layout.h"
#endif

namespace prefill {

// Whether prefill_scan may be launched for sequences that are cut in two without summaries (forget.h).
constexpr bool early_starts = true;
// Whether segments of prefill_scan start early where few chunks before them forget (forget.h).
constexpr bool starts_soon = false;

// Smallest K that uses this key bucket: 16 more than the next smaller bucket.
DEVICE constexpr int smallest_key_dim(int bucket) {
    return bucket == 256 ? 208 : bucket == 192 ? 144 : bucket == 128 ? 112 : bucket == 96 ? 80 : 16;
}

// Empty: the code object declares LDS.
#define SCAN_SHARED_BYTES(keys)
#define SUMMARISE_SHARED_BYTES(keys)

} // namespace prefill
