// Parameter Keys of a walk: a key bucket, or narrow(bucket) with slabs of half the columns, which prefill_scan of some
// targets has.
#pragma once

#include "../arch/base.h"

namespace prefill {

DEVICE constexpr int narrow(int bucket) { return bucket + 1; }
DEVICE constexpr bool is_narrow(int keys) { return keys % 2 != 0; }
DEVICE constexpr int bucket_of(int keys) { return keys - keys % 2; }

} // namespace prefill
