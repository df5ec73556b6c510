// Parameter Keys of a walk: a key bucket, or narrow(bucket) with slabs of half the columns, which prefill_scan of some
// targets has.
#pragma once

namespace prefill {

constexpr int narrow(int bucket) { return bucket + 1; }
constexpr bool is_narrow(int keys) { return keys % 2 != 0; }
constexpr int bucket_of(int keys) { return keys - keys % 2; }

} // namespace prefill
