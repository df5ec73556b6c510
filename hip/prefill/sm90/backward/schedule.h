// Schedules of the backward on sm_90a: wgmma for keys of 65 to 128 elements, the schedules of
// ../../backward/ for others.
#pragma once

#include "../../backward/gradients.h"
#include "gradients.h"
#include "walk.h"

namespace prefill {
namespace backward {

constexpr bool own_walk(int keys) { return keys == 128; }
template <int Keys> constexpr int walk_kernel_threads() {
    return own_walk(Keys) ? (WalkStage<Keys>::most_groups + 1) * group_threads : walk_threads;
}
template <int Keys> constexpr int walk_kernel_residency() { return own_walk(Keys) ? 1 : walk_residency; }
// tests/ptx.rs compares it with src/kernels/target.rs.
#define BACKWARD_SUMMARISE_SHARED_BYTES(keys)                                                                          \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_backward_summarise_shared_bytes_k##keys =            \
        prefill::backward::own_walk(keys) ? prefill::backward::WalkLayout<keys>::most_bytes : 0;
#define BACKWARD_WALK_SHARED_BYTES(keys)                                                                               \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_backward_walk_shared_bytes_k##keys =                 \
        prefill::backward::own_walk(keys) ? prefill::backward::WalkLayout<keys>::most_bytes : 0;

constexpr bool own_gradients(int keys) { return own_walk(keys); }
template <int Keys> constexpr int gradient_kernel_threads() {
    return own_gradients(Keys) ? own_gradient_threads : gradient_threads;
}
template <int Keys> constexpr int gradient_kernel_residency() { return own_gradients(Keys) ? 1 : gradient_residency; }
#define BACKWARD_GRADIENTS_SHARED_BYTES(keys)                                                                          \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_backward_gradients_shared_bytes_k##keys =            \
        prefill::backward::own_gradients(keys) ? prefill::backward::GradientPlaces::dynamic_bytes : 0;

} // namespace backward
} // namespace prefill
