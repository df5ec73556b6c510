// Contract of a target: the names that arch/<target>/target.h supplies in namespace `arch`. Kernels and shared headers
// use only these names; prefill/<target>/ may use any name of its target. docs/internals/target-contract.md says how to
// add a target.
//
//   KERNEL(threads, residency)          attributes of an entry; residency: waves per SIMD (gfx9), workgroups per
//                                       multiprocessor (sm90)
//   Traits                              numbers of the target, checked below
//   -- lanes.h
//   lanes                               lanes of a wave: 32 or 64
//   thread() workgroup() lane() wave()  ids; wave() is equal in all lanes of the wave
//   read_lane(x, from)                  x of one lane, int or float
//   row_sum(x), other_row(x)            sum over 16 lanes; x of the same lane of the neighbouring 16
//   sum_of_eight<Step>(x)               sum over eight lanes, `Step` apart: 1, or lanes / 8
//   inclusive_sum(x), inclusive_max(x)  prefix sum (float), prefix maximum (int) over the lanes of a wave
//   ballot(condition)                   bit mask of the lanes where the condition holds
//   chunk_sum, chunk_max                over the 64 threads of a workgroup, with four words of shared memory
//   spread_column<C>(out, own, four)    column C of a 16x16 matrix to all lanes of a row of 16
//   -- barriers.h
//   wave_sync() workgroup_sync()        barriers that make shared memory visible
//   team_sync<Waves>()                  barrier of a workgroup of `Waves` waves
//   end_wave()                          ends this wave; the others go on
//   wait_for_previous_kernel()          returns when the kernels before this one in the stream are complete
//   let_next_kernel_begin()             the next kernel may be started; nothing where kernels never overlap
//   end_without_work()                  in place of both, in a workgroup without work, which ends. What it has read is
//                                       older than the kernel before, and than kernels before that which may end so
//   -- compiler.h
//   uniform(p)                          load of memory that nobody writes, at an address equal in all lanes
//   uniform_value(x) uniform_pointer(p)  x or p, declared equal in all lanes
//   opaque(x) opaque_uniform(x)         x, with its value hidden from the compiler
//   held(x)                             x, computed here
//   phase()                             no instruction moves across
//   reread(arguments)                   the kernel's arguments, loaded again
//   touch_arguments<Bytes>()            brings so many bytes of the arguments to the cache
//                                       (all but uniform may be identities, or do nothing)
//   -- functions.h
//   exp2 rsqrt reciprocal exp log       of float; exp and log in full precision
//   -- memory.h
//   in_one_access(p)                    whether one access can cover 16 bytes at p
//   load_b128 store_b128 load_b64 ...   16, 8 and 4 bytes at such an address
//   load_line_b128(p) load_line_b64 ...  the same where others soon read the rest of the 128 bytes
//   request_b128(p) request_b64 ...     loads of memory that does not change meanwhile, requested here and not
//                                       where they are used first
//   Window(base)                        memory addressed by byte offsets; a load at Window::nowhere gives 0
//   -- tiles.h
//   Tile, elements                      16x16 f32, held by a wave: a vector of `elements` floats a lane
//   Run, run                            a lane's elements in consecutive rows: a vector of `run` floats
//   LaneMap(lane).row(e) .column(e)     row and column of element e
//   place_in_block(block, row, column)  place of an element among 16x16 blocks in shared memory (math/inverse.h)
//   BlockMap(map).place(block, e) .transposed_place(block, e)
//                                       place of element e, a multiple of `run`, or of the transposed block's element e
//   each_on_diagonal(tile, map, f)      f(i, element i of the diagonal) for those of the lane
//   ColumnFactor, columns_at(v, map)    one number for each column: multiplies a tile
//   minus_product(c, a, b)              c - a b, element by element
//   Operand, operand_words              16x16 numbers of 16 bits: `operand_words` words a lane
//   operand_element, operand_row        positions of the two numbers of a word
//   -- products.h
//   Bf16, F16                           types of 16 bits: mma(left, right, c), low(word), high(word), pack(a, b)
//   narrow(x)                           bits of x as bf16, in Bf16
//   rounded<T>(tile), widened<T>(op)    a tile to the right operand of a product over its rows; and back
//   multiply_transposed_f32(x, y, c)    c + x^T y in f32, x and y tiles
//
// Required of the layout: an accumulator tile, rounded, is an operand of the next product. The products of a chunk then
// follow each other without moving data between lanes.
#pragma once

#if defined(__NVPTX__)
#include "sm90/target.h"
#else
#include "gfx9/target.h"
#endif

namespace arch {
namespace contract {

// Traits must agree with the names.
static_assert(Traits::wave_lanes == lanes && (lanes == 32 || lanes == 64), "a wave has 32 or 64 lanes");
static_assert(Traits::tile_elements == elements && Traits::tile_run == run, "elements of a tile");
static_assert(Traits::words_of_operand == operand_words, "words of an operand");

// A wave holds each element of a tile, and of an operand, once.
static_assert(lanes * elements == 16 * 16, "a tile is 16x16");
static_assert(lanes * operand_words * 2 == 16 * 16, "an operand is 16x16");
static_assert(elements % run == 0, "runs divide the elements of a lane");
static_assert(sizeof(Tile) == 4 * elements && sizeof(Run) == 4 * run, "a tile and a run are vectors of f32");
static_assert(sizeof(Operand) == 4 * operand_words, "an operand is a vector of words");
static_assert(Window::nowhere >= 1u << 31, "tensors of a (sequence, head) are below 2^31 bytes");

// Types of the functions that kernels call.
template <class T> struct Products {
    static_assert(__is_same(decltype(T::mma(Operand{}, Operand{}, Tile{})), Tile), "mma gives a tile");
    static_assert(__is_same(decltype(T::low(0)), float) && __is_same(decltype(T::high(0)), float), "widening");
    static_assert(__is_same(decltype(T::pack(0.0f, 0.0f)), int), "pack gives a word");
    static_assert(__is_same(decltype(rounded<T>(Tile{})), Operand), "rounded gives an operand");
    static_assert(__is_same(decltype(widened<T>(Operand{})), Tile), "widened gives a tile");
};
template struct Products<Bf16>;
template struct Products<F16>;
static_assert(__is_same(decltype(multiply_transposed_f32(Tile{}, Tile{}, Tile{})), Tile), "f32 products");
static_assert(__is_same(decltype(minus_product(Tile{}, Tile{}, Tile{})), Tile), "c - a b");
static_assert(__is_same(decltype(Tile{} * columns_at(nullptr, LaneMap(0))), Tile), "column factors multiply a tile");
static_assert(__is_same(decltype(LaneMap(0).row(0)), int) && __is_same(decltype(LaneMap(0).column(0)), int), "places");
static_assert(__is_same(decltype(operand_element(0, 0)), int) && __is_same(decltype(operand_row(0, 0)), int), "places");
static_assert(__is_same(decltype(exp2(0.0f)), float) && __is_same(decltype(exp(0.0f)), float) &&
                  __is_same(decltype(log(0.0f)), float) && __is_same(decltype(rsqrt(0.0f)), float) &&
                  __is_same(decltype(reciprocal(0.0f)), float),
              "functions of f32");
static_assert(__is_same(decltype(ballot(true)), u64) && __is_same(decltype(read_lane(0, 0)), int) &&
                  __is_same(decltype(read_lane(0.0f, 0)), float),
              "lanes");
static_assert(__is_same(decltype(inclusive_sum(0.0f)), float) && __is_same(decltype(inclusive_max(0)), int), "lanes");
static_assert(__is_same(decltype(row_sum(0.0f)), float) && __is_same(decltype(other_row(0.0f)), float), "lanes");
static_assert(__is_same(decltype(sum_of_eight<1>(0.0f)), float), "lanes");
static_assert(__is_same(decltype(sum_of_eight<lanes / 8>(0.0f)), float), "lanes");
static_assert(__is_same(decltype(load_b128(nullptr)), i32x4) && __is_same(decltype(load_b64(nullptr)), i32x2), "loads");

} // namespace contract
} // namespace arch
