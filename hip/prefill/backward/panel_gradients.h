// Contract of a target for the gradients of the backward, where what the walk keeps is in panels. <target> supplies
//
//   keeps_panels(keys)            whether it is, for a bucket of K
//   panel_gradient_threads        threads of a workgroup
//   panel_gradients<T>(x, skip)   gradients of the chunks of a workgroup of a persistent launch; skip(number, thread):
//   of
//                                 an item (chunk, key head) that has no chunk, by panel_skip_threads threads
//   GRADIENT_SHARED_BYTES(keys)   declares the dynamic shared memory
#pragma once

#include "gradients.h"

#if defined(__NVPTX__)
#include "../sm90/backward_gradients.h"
namespace prefill {
namespace backward {
constexpr bool keeps_panels(int keys) { return keys == 128; }
} // namespace backward
} // namespace prefill
#define GRADIENT_SHARED_BYTES(keys)                                                                                    \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_backward_gradients_shared_bytes_k##keys =            \
        prefill::backward::GradientPlaces::dynamic_bytes;
#else
namespace prefill {
namespace backward {
constexpr bool keeps_panels(int) { return false; }
constexpr int panel_gradient_threads = gradient_threads, panel_skip_threads = gradient_threads;
template <class T, class Skip> DEVICE void panel_gradients(const dwk_prefill_backward_args &, const Skip &) {}
} // namespace backward
} // namespace prefill
#define GRADIENT_SHARED_BYTES(keys)
#endif

namespace prefill {
namespace backward {
constexpr int gradient_threads_of(int keys) { return keeps_panels(keys) ? panel_gradient_threads : gradient_threads; }
constexpr int gradient_residency_of(int keys) { return keeps_panels(keys) ? 1 : gradient_residency; }
} // namespace backward
} // namespace prefill
