// Chain of segments that do not forget on sm_90a. A warp owns 16 rows of M and of S, and S passes from warp to warp
// through shared memory. One more warp lets the copy engine bring the matrices M there, some steps ahead.
#pragma once

#include "../segment.h"
#include "parts.h"

namespace prefill {

constexpr int chain_columns = 16; // per workgroup
constexpr int chain_warps(int keys) { return keys / 16; }
constexpr int combine_threads(int keys) { return (chain_warps(keys) + 1) * arch::lanes; }
// Least number of workgroups that share a multiprocessor.
constexpr int combine_residency = 1;
DEVICE int next_unit(int unit) { return unit + arch::workgroups(); }

extern "C" SHARED __attribute__((aligned(16))) char dw_combine_shared[];

// Shared memory of a workgroup: S in two buffers, and after that a ring of stages. A stage has a matrix M or, where
// that is too large, some column tiles of it.
template <int Keys> struct ChainShared {
    static constexpr int key_tiles = Keys / 16;
    static constexpr int block_bytes = 2 * part_words * 4; // of 16x16 elements of M
    static constexpr int tiles_of_stage = key_tiles <= 8 ? key_tiles : 4;
    static constexpr int row_bytes = tiles_of_stage * block_bytes, stage_bytes = key_tiles * row_bytes;
    // Whole matrices are brought two ahead: more would keep other workgroups away. There are barriers for `most`.
    static constexpr int most = 8, wanted = key_tiles <= 8 ? 3 : most;
    struct Fixed {
        u64 full[most], empty[most];                 // barriers of the ring
        Operand state[2][key_tiles][2][arch::lanes]; // buffer, row tile, high and low, lane
    };
    static constexpr int fitting = (arch::Traits::shared_bytes - (int)sizeof(Fixed)) / stage_bytes;
    static constexpr int stages = fitting < wanted ? fitting : wanted;
    static constexpr int dynamic_bytes = sizeof(Fixed) + stages * stage_bytes;
    static_assert(stages >= 2, "a stage is filled while another is read");
};

template <int Keys> class Chains {
    typedef ChainShared<Keys> Shared;
    static constexpr int warps = chain_warps(Keys);

  public:
    DEVICE_MEMBER explicit Chains(const dwk_prefill_combine_args &x)
        : x(x), shared(*(typename Shared::Fixed *)dw_combine_shared), key_tiles(x.key_dim / 16), warp(arch::wave()),
          stage(0), uses(0) {
        if (arch::thread() == 0) {
            for (int i = 0; i < Shared::stages; ++i) {
                arch::phases_begin(full(i), 1);
                arch::phases_begin(empty(i), warps);
            }
            arch::publish_phases();
        }
        arch::workgroup_sync();
    }

    DEVICE_MEMBER void run(int first, int head, int slab, int count) {
        const int64_t step = (int64_t)x.value_heads * summary_size(x);
        float *const n = summary_of(x, first, head);
        if (warp == warps) {
            bring((const char *)second_part(n + step, x), step * 4, count);
        } else {
            chain(n + slab * chain_columns * x.key_dim, step, count);
        }
    }

  private:
    DEVICE_MEMBER u32 full(int i) const { return arch::shared_address(&shared.full[i]); }
    DEVICE_MEMBER u32 empty(int i) const { return arch::shared_address(&shared.empty[i]); }
    DEVICE_MEMBER u32 ring(int i) const { return arch::shared_address(&shared + 1) + i * Shared::stage_bytes; }
    DEVICE_MEMBER void next_stage() {
        uses += stage + 1 == Shared::stages;
        stage = stage + 1 == Shared::stages ? 0 : stage + 1;
    }

    // Copies M of `count` summaries but the first. Lane r copies row r of blocks.
    DEVICE_MEMBER void bring(const char *m, int64_t step_bytes, int count) {
        const int row = arch::lane();
#pragma unroll 1
        for (int i = 1; i < count; ++i) {
#pragma unroll 1
            for (int tile = 0; tile < key_tiles; tile += Shared::tiles_of_stage) {
                const int bytes = min_of(Shared::tiles_of_stage, key_tiles - tile) * Shared::block_bytes;
                if (uses > 0) {
                    arch::phase_wait(empty(stage), uses - 1);
                }
                if (row == 0) {
                    arch::phase_arrive_expecting(full(stage), key_tiles * bytes);
                }
                arch::wave_sync();
                if (row < key_tiles) {
                    arch::copy_bulk(ring(stage) + row * Shared::row_bytes,
                                    m + (row * key_tiles + tile) * Shared::block_bytes, bytes, full(stage));
                }
                next_stage();
            }
            m += step_bytes;
        }
    }

    // Computes these columns of the states, in place of those of N from `n` on.
    DEVICE_MEMBER void chain(float *n, int64_t step, int count) {
        const LaneMap at(arch::lane());
        n += at.column(0) * x.key_dim + 16 * warp + at.row(0); // this lane's first element
        Tile state = load(n), added = load(n + step);          // added: N of the next state
        publish(state, 0);
        synchronise();
#pragma unroll 1
        for (int i = 1; i < count; ++i) {
            state = product((i - 1) & 1) + added;
            publish(state, i & 1);
            n += step;
            if (i + 1 < count) {
                added = load(n + step);
            }
            store(state, n);
            synchronise();
        }
    }

    // Barrier of all warps but the one that copies.
    static DEVICE_MEMBER void synchronise() { arch::barrier_wait(1, warps * arch::lanes); }

    // N or S [columns, K]: calls f(element, address) for this lane's pairs of rows. Tiles past K have none.
    template <class F> DEVICE_MEMBER void for_each(float *first, F f) const {
        if (warp < key_tiles) {
            for (int e = 0; e < elements; e += arch::run) {
                f(e, first + e / 2 % 2 * 8 * x.key_dim + e / 4 * 8);
            }
        }
    }
    DEVICE_MEMBER Tile load(float *from) const {
        Tile to{};
        for_each(from, [&](int e, const float *address) __attribute__((always_inline)) {
            const arch::Run pair = *(const arch::Run *)address;
            to[e] = pair[0];
            to[e + 1] = pair[1];
        });
        return to;
    }
    DEVICE_MEMBER void store(const Tile &from, float *to) const {
        for_each(to, [&](int e, float *address)
                         __attribute__((always_inline)) { *(arch::Run *)address = arch::Run{from[e], from[e + 1]}; });
    }

    // Shares this warp's rows of S with all. Rounded, a tile is an operand of the next product.
    DEVICE_MEMBER void publish(const Tile &from, int buffer) const {
        Operand(&to)[2][arch::lanes] = shared.state[buffer][warp];
        const Operand high = rounded<Bf16>(from);
        to[0][arch::lane()] = high;
        to[1][arch::lane()] = rounded<Bf16>(from - widened<Bf16>(high));
    }

    // Products of one sum wait for each other, so each of the three terms has its own.
    static constexpr int terms = 3;

    // Adds products of `Count` column tiles of M, from `at` on in the ring, and row tiles of S, from `tile` on.
    template <int Count> DEVICE_MEMBER void add(Tile (&sums)[terms], int buffer, int tile, u32 at) const {
        Operand m[Count][2], s[Count][2]; // high and low numbers
        for (int t = 0; t < Count; ++t) {
            for (int part = 0; part < 2; ++part) {
                m[t][part] = in_order(arch::load_shared(at + t * Shared::block_bytes + part * part_words * 4));
                s[t][part] = shared.state[buffer][tile + t][part][arch::lane()];
            }
        }
        for (int t = 0; t < Count; ++t) {
            sums[0] = Bf16::mma(m[t][1], s[t][0], sums[0]);
            sums[1] = Bf16::mma(m[t][0], s[t][1], sums[1]);
            sums[2] = Bf16::mma(m[t][0], s[t][0], sums[2]);
        }
    }

    // M S, with the next M of the ring and S in buffer `buffer`.
    DEVICE_MEMBER Tile product(int buffer) {
        Tile sums[terms] = {};
        constexpr int of_stage = Shared::tiles_of_stage;
        constexpr int at_once = warps > 8 ? 2 : of_stage % 4 == 0 ? 4 : 3; // more take more registers than there are
        static_assert(of_stage % at_once == 0, "a stage is so many tiles several times");
#pragma unroll 1
        for (int first = 0; first < key_tiles; first += of_stage) {
            const u32 at = ring(stage) + warp * Shared::row_bytes + arch::lane() * 16;
            arch::phase_wait(full(stage), uses);
            if (key_tiles - first >= of_stage) {
#pragma unroll 1
                for (int t = 0; t < of_stage; t += at_once) {
                    add<at_once>(sums, buffer, first + t, at + t * Shared::block_bytes);
                }
            } else {
#pragma unroll 1
                for (int t = 0; first + t < key_tiles; ++t) {
                    add<1>(sums, buffer, first + t, at + t * Shared::block_bytes);
                }
            }
            arch::wave_sync();
            if (arch::lane() == 0) {
                arch::phase_arrive(empty(stage));
            }
            next_stage();
        }
        return sums[0] + sums[1] + sums[2];
    }

    const dwk_prefill_combine_args &x;
    typename Shared::Fixed &shared;
    const int key_tiles; // of K, which may be less than `Keys`
    const int warp;
    int stage, uses; // the next stage of the ring, and how often all stages were used before
};

} // namespace prefill

// Bytes of dynamic shared memory that the host requests at a launch. tests/ptx.rs compares it with
// src/kernels/target.rs.
#define COMBINE_SHARED_BYTES(keys)                                                                                     \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_combine_shared_bytes_k##keys =                       \
        prefill::ChainShared<keys>::dynamic_bytes;
