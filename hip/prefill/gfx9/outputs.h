// Output waves of prefill_scan on CDNA: O = scale (exp(G) Q S0 + P U), [16 tokens, slab] per wave. They meet the waves
// that hold the state at every barrier and share SIMDs with them. They use the matrix unit when the other waves do not.
#pragma once

#include "../recurrence.h"
#include "../segment.h"
#include "exchange.h"
#include "maps.h"
#include "record.h"
#include "rows.h"

namespace prefill {

template <class T, int Keys> class OutputChunks {
    static constexpr int across = slab_tiles(Keys), pairs = key_pairs(Keys), split_x = 1,
                         split_update = 2; // key pairs multiplied before X, and before the update
    typedef Tile Slab[across];
    typedef SlabOperands<across> Tokens;

  public:
    DEVICE_MEMBER OutputChunks(const dwk_prefill_scan_args &x, const Segment &s, int head, int key_head,
                               u32 value_offset)
        : shared(exchange<Keys, true>()), values(shared_values<across>()),
          q(x.q, x.q_strides, s.sequence, s.begin, key_head, x.key_dim),
          o(x.o, apart(x.o_strides, x.value_dim), s.sequence, s.begin, head, x.value_dim), record(x, s.record, head),
          at_p(LowerBlocks::Offsets::of_p(row)), key_dim(x.key_dim), scale(x.scale), rest(s.end - s.begin),
          quiet(s.quiet) {
        const int lane = arch::lane();
        q_offset = (16 * row + lane % 16) * q.stride + arch::eighth(lane) * 16;
        factor_offset = (16 * row + LaneMap(lane).row(0)) * 4;
        for (int r = 0; r < elements; ++r) {
            o_offset[r] = (16 * row + LaneMap(lane).row(r)) * o.stride + value_offset;
        }
    }

    // Computes all chunks of the segment. A chunk's outputs are finished while the next chunk begins.
    DEVICE_MEMBER void run() {
        arch::workgroup_sync(); // the first state is in LDS
        if (rest <= 0) {
            return;
        }
        limit(rest);
        load_q<0, pairs>();
        read_state<false>();
        arch::loads_done(); // otherwise the compiler waits for them in every chunk
        // Outputs of quiet chunks are dropped. Two rounds of one loop, so that no chunk decides whether it is quiet.
        int end = max_of(rest - quiet, chunk);
        o.limit_to(0);
#pragma unroll 1
        do {
            end = arch::opaque_uniform(arch::uniform_value(end));
#pragma unroll 1
            while (rest > end) {
                rest = arch::opaque_uniform(arch::uniform_value(rest - chunk));
                read_state<true>();
            }
            o.limit_to(chunk);
            end -= chunk;
            end = end > 0 ? chunk : 0;
        } while (end > 0);
        take_values();
        p.template multiply<T, across>(done, u, row);
        o.limit_to(rest);
        write_outputs();
        arch::workgroup_sync(); // matches the barrier of the last update's rounding error
    }

  private:
    DEVICE_MEMBER void limit(int rows) {
        if (rows < chunk) {
            q.limit(arch::opaque_uniform(arch::uniform_value(rows)));
        }
    }
    template <int First, int End> DEVICE_MEMBER void load_q() {
        for (int b = First; b < End; ++b) {
            part_q[b].data = q.memory.load_b128(inside_keys<Keys>(b, key_dim) ? q_offset + 64 * b : Window::nowhere);
        }
    }
    DEVICE_MEMBER Tile factor(RowFactor which) const {
        return bits<Tile>(record.memory.load_b128(record_rows + which * chunk * 4 + factor_offset));
    }

    // Computes Q S0 of a chunk, [16 tokens, slab]. With `Finish` also finishes O of the chunk before: O = scale (exp(G)
    // Q S0 + diag(P) U + (P - diag(P)) U) [16 tokens, slab]
    template <bool Finish> DEVICE_MEMBER void read_state() {
        OperandPair s[pairs][across];
        take_state<0, split_x>(s);
        if constexpr (Finish) {
            take_values();
        }
        output = factor(output_row);
        diagonal = factor(diagonal_row);
        arch::phase();
        for (int j = 0; j < across; ++j) {
            out[j] = Tile{};
        }
        q.advance();
        limit(rest - chunk);
        multiply_q<0, split_x>(s);
        arch::phase();
        arch::workgroup_sync(); // X is in LDS
        take_state<split_x, split_update>(s);
        if constexpr (Finish) {
            p.template multiply<T, across>(done, u, row);
            arch::phase();
        }
        p.load(record.memory, at_p);
        record.advance();
        arch::phase();
        multiply_q<split_x, split_update>(s);
        arch::phase();
        arch::workgroup_sync(); // the update and U in f32 are in LDS
        const int own = row * arch::lanes + arch::lane();
        for (int j = 0; j < across; ++j) {
            exact[j] = bits<Tile>(values.exact[j][own]);
            arch::phase();
        }
        take_state<split_update, pairs>(s);
        if constexpr (Finish) {
            write_outputs();
            o.advance();
        }
        arch::phase();
        Operand rounded_u[across];
        for (int j = 0; j < across; ++j) {
            rounded_u[j] = rounded<T>(exact[j]);
        }
        values.operands[own] = Tokens(rounded_u);
        arch::phase();
        multiply_q<split_update, pairs>(s);
        parity ^= 1;
        arch::phase();
        arch::workgroup_sync(); // the next state and rounded U are in LDS
    }
    // Loads U of all waves, and computes O before its product with P.
    DEVICE_MEMBER void take_values() {
        LowerBlocks::take(u, values.operands, row);
        for (int j = 0; j < across; ++j) {
            done[j] = output_of(output, out[j], diagonal, exact[j]);
        }
        arch::phase();
    }
    DEVICE_MEMBER void write_outputs() const {
        Tile nearest[across];
        for (int j = 0; j < across; ++j) {
            nearest[j] = arch::held(T::nearest(scale * done[j]));
        }
        for (int r = 0; r < elements; ++r) {
            const int word = T::join(nearest[0][r], nearest[across - 1][r]);
            is_narrow(Keys) ? o.memory.store_b16(o_offset[r], word) : o.memory.store_b32(o_offset[r], word);
        }
    }

    template <int First, int End> DEVICE_MEMBER void take_state(OperandPair (&s)[pairs][across]) {
        for (int b = First; b < End; ++b) {
            for (int j = 0; j < across; ++j) {
                s[b][j] = shared.operand(parity, b, j);
                arch::phase();
            }
        }
    }
    template <int First, int End> DEVICE_MEMBER void multiply_q(const OperandPair (&s)[pairs][across]) {
        for (int b = First; b < End; ++b) {
            for (int j = 0; j < across; ++j) {
                out[j] = T::mma(part_q[b].first(), s[b][j].first(), out[j]);
            }
            for (int j = 0; j < across; ++j) {
                out[j] = T::mma(part_q[b].second(), s[b][j].second(), out[j]);
            }
            arch::phase();
        }
        load_q<First, End>();
    }

    // Tile of tokens, in a scalar register. The wave with most blocks of T shares its SIMD with the wave with fewest
    // blocks of P.
    const int row = arch::opaque_uniform(arch::uniform_value(2 * scan_waves - 1 - arch::wave()));
    const Exchange<Keys, true> &shared;
    Values<across> &values;
    TokenRows q, o;
    Records record;
    const LowerBlocks::Offsets at_p;
    const int key_dim;
    const float scale;
    u32 q_offset, factor_offset, o_offset[elements];
    OperandPair part_q[pairs];
    LowerBlocks p;
    Tile output, diagonal;
    Slab out, exact, done;
    Tokens u[tiles];
    int rest;
    const int quiet; // tokens at the begin whose outputs are not written
    int parity = 0;
};

// Runs the output waves, which end here. The waves that hold the state return.
template <class T, int Keys, bool Outputs>
DEVICE void run_helper_waves(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work, Maps) {
    if constexpr (Outputs) {
        if (arch::wave() < scan_waves) {
            arch::set_priority<1>();
            return;
        }
        const int column = work.slab * slab_columns<Keys, true>() + first_column(arch::lane(), slab_tiles(Keys));
        const u32 column_offset = column < x.value_dim ? 2 * column : Window::nowhere;
        OutputChunks<T, Keys>(x, segment, work.head, work.key_head, column_offset).run();
        arch::end_wave();
    }
}

} // namespace prefill
