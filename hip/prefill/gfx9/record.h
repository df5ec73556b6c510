// Record on CDNA: T and P as left operands, which a wave loads directly to registers.
#pragma once

#include "../record.h"
#include "layout.h"

namespace prefill {

using arch::OperandPair;

// Position of a row within a factor of the record.
DEVICE int row_position(int row) { return row; }

// Blocks are stored in pairs, up to the diagonal: two adjacent blocks of a row of blocks. A lane loads 16 bytes of a
// pair. In even rows the diagonal block has no neighbour, so the diagonal blocks of T and P form a pair.
constexpr int pair_bytes = 2 * 16 * 16 * 2;
constexpr int record_t = record_matrices;
DEVICE constexpr int t_pair(int row, int pair) { return record_t + ((row == 3 ? 4 : row) + pair) * pair_bytes; }
constexpr int record_p = record_t + 6 * pair_bytes;
DEVICE constexpr int p_pair(int row, int pair) {
    return row % 2 == 0 && 2 * pair == row ? t_pair(row, pair) : record_p + (row - (row > 0) + pair) * pair_bytes;
}
static_assert(p_pair(3, 1) + pair_bytes <= DWK_RECORD_BYTES, "a record holds all parts");

// Writes lower blocks of T and P. Blocks are given transposed, because a rounded accumulator tile is then a left
// operand.
template <class T> class RecordWriter {
  public:
    DEVICE_MEMBER explicit RecordWriter(char *record) : to(record + arch::lane() * 16) {}
    DEVICE_MEMBER void put_t(int row, int column, Tile transposed) const {
        put(t_pair(row, column / 2) + column % 2 * 8, transposed);
    }
    DEVICE_MEMBER void put_p(int row, int column, Tile transposed) const {
        const bool with_t = row == column && row % 2 == 0;
        put(p_pair(row, column / 2) + (with_t ? 1 : column % 2) * 8, transposed);
    }

  private:
    DEVICE_MEMBER void put(int at, Tile transposed) const { *(Operand *)(to + at) = rounded<T>(transposed); }

    char *const to;
};

// Right operands of a token tile, one for each column tile of a slab, in 8 bytes for each of a lane's.
template <int Across> struct SlabOperands : OperandPair {
    DEVICE_MEMBER SlabOperands() = default;
    DEVICE_MEMBER explicit SlabOperands(const Operand (&x)[Across])
        : OperandPair{i32x4{x[0].x, x[0].y, x[1].x, x[1].y}} {}
    template <int J> DEVICE_MEMBER Operand of() const { return J == 0 ? first() : second(); }
};
template <> struct SlabOperands<1> {
    Operand data;
    DEVICE_MEMBER SlabOperands() = default;
    DEVICE_MEMBER explicit SlabOperands(const Operand (&x)[1]) : data(x[0]) {}
    DEVICE_MEMBER Operand first() const { return data; }
    template <int> DEVICE_MEMBER Operand of() const { return data; }
};

// Lower blocks of T or P in one row of blocks, which one wave multiplies. `last`: the last one or two, up to the
// diagonal. `before`: the two before them, in rows of the lower half of the matrix.
class LowerBlocks {
  public:
    // Offsets of the blocks in a record.
    class Offsets {
      public:
        Offsets() = default;
        static DEVICE_MEMBER Offsets of_t(int row) { return Offsets(row, t_pair(row, 0), t_pair(row, row / 2)); }
        static DEVICE_MEMBER Offsets of_p(int row) {
            return Offsets(row, p_pair(row, 0), p_pair(row, row / 2) + (row % 2 == 0 ? 8 : 0));
        }

      private:
        friend LowerBlocks;
        DEVICE_MEMBER Offsets(int row, int first, int last)
            : before(row < 2 ? Window::nowhere : arch::lane() * 16),
              second(row % 2 == 0 ? Window::nowhere : arch::lane() * 16 + 8),
              first(arch::opaque_uniform(arch::uniform_value(first))),
              last(arch::opaque_uniform(arch::uniform_value(last))) {}
        u32 before, second;
        int first, last; // equal in all lanes
    };

    DEVICE_MEMBER void load(const Window &record, const Offsets &from) {
        before.data = record.load_b128(from.before, from.first);
        last[0] = record.load_b64(arch::lane() * 16, from.last);
        last[1] = record.load_b64(from.second, from.last);
    }
    // out += blocks times `tokens`, which `take` has loaded. No branch may follow the last products: clang 19 would
    // omit the wait for them.
    template <class T, int Across>
    DEVICE_MEMBER void multiply(Tile (&out)[Across], const SlabOperands<Across> (&tokens)[tiles], int row) const {
        if (row >= 2) {
            multiply<T>(out, before.first(), tokens[0]);
            multiply<T>(out, before.second(), tokens[1]);
        }
        multiply<T>(out, last[0], tokens[2]);
        arch::phase(); // so that products of one sum do not follow each other
        multiply<T>(out, last[1], tokens[3]);
    }
    // Loads the token tiles that the blocks of `row` multiply, from LDS.
    template <class Operands, int Threads>
    static DEVICE_MEMBER void take(Operands (&to)[tiles], const Operands (&from)[Threads], int row) {
        const Operands *const first = from + arch::lane(), *const last = first + row / 2 * 2 * arch::lanes;
        to[0] = first[0];
        to[1] = first[arch::lanes];
        arch::phase();
        to[2] = last[0];
        to[3] = last[arch::lanes];
        arch::phase();
    }

  private:
    template <class T, int Across>
    static DEVICE_MEMBER void multiply(Tile (&out)[Across], Operand block, const SlabOperands<Across> &tokens) {
        out[0] = T::mma(block, tokens.first(), out[0]);
        if constexpr (Across > 1) {
            out[1] = T::mma(block, tokens.second(), out[1]);
        }
    }

    Operand last[2];
    OperandPair before;
};

// Records of a value head, from record `first` on.
class Records {
  public:
    DEVICE_MEMBER Records(const dwk_prefill_scan_args &x, int first, int head)
        : memory((const char *)x.records + ((int64_t)first * x.value_heads + head) * DWK_RECORD_BYTES),
          step((u64)x.value_heads * DWK_RECORD_BYTES) {}

    DEVICE_MEMBER void advance(bool there = true) { memory.advance(there ? step : 0); }

    Window memory;

  private:
    const u64 step;
};

} // namespace prefill
