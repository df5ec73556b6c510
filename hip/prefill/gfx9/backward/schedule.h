// Schedules of the backward on gfx9: those of ../../backward/walk.h and gradients.h for every key bucket.
#pragma once

#include "../../backward/gradients.h"
#include "../../backward/walk.h"

namespace prefill {
namespace backward {

constexpr bool own_walk(int) { return false; }
template <class T, int Keys> DEVICE void run_own_walk(const dwk_prefill_backward_args &) {}
template <class T, int Keys> DEVICE void run_own_summary(const dwk_prefill_backward_args &, const WalkWork &, bool) {}
constexpr int own_columns = slab;
template <int Keys> constexpr int walk_kernel_threads() { return walk_threads; }
template <int Keys> constexpr int walk_kernel_residency() { return walk_residency; }
#define BACKWARD_WALK_SHARED_BYTES(keys)
#define BACKWARD_SUMMARISE_SHARED_BYTES(keys)

constexpr bool own_gradients(int) { return false; }
constexpr int own_skip_threads = gradient_threads;
template <class T, class Skip> DEVICE void run_own_gradients(const dwk_prefill_backward_args &, const Skip &) {}
template <int Keys> constexpr int gradient_kernel_threads() { return gradient_threads; }
template <int Keys> constexpr int gradient_kernel_residency() { return gradient_residency; }
#define BACKWARD_GRADIENTS_SHARED_BYTES(keys)

} // namespace backward
} // namespace prefill
