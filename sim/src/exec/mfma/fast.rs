//! Fast MFMA arithmetic: f32 results by a chain of fused multiply-adds from C in ascending k.

use super::vector::Lanes16;
use super::{Addend, Env, Flow, Input, Inst, MfmaMode, Operands, Wave, exact, expand, row_place};

/// Computes blocks of 16x16 or 32x32, `ROWS` rows of sixteen columns at a time.
///
/// # Safety
/// As for [`super::Exec`], and the host must have the extension of `V`.
#[inline(always)]
pub(super) unsafe fn blocks<
    V: Lanes16,
    A: Input,
    B: Input,
    const MN: usize,
    const BLOCKS: usize,
    const KV: usize,
    const ROWS: usize,
>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
) -> Flow {
    let counts = [KV / A::PER_DWORD, KV / B::PER_DWORD, MN * MN * BLOCKS / 64];
    let mut o = match Operands::new(w, inst, e, counts) {
        Ok(o) => o,
        Err(flow) => return flow,
    };
    // SAFETY: the extension is there and the registers were checked.
    let (a, b) = unsafe {
        (
            expand::<V, A, KV>(&w.vgpr, o.a, |g| g),
            if o.blgp == 0 {
                expand::<V, B, KV>(&w.vgpr, o.b, |g| g)
            } else {
                expand::<V, B, KV>(&w.vgpr, o.b, |g| o.b_group(g))
            },
        )
    };
    o.settle(w, MN * MN * BLOCKS / 64);
    if e.mfma == MfmaMode::Exact {
        exact::blocks::<A, B, MN, BLOCKS, KV>(w, &o, &a, &b);
        return Flow::Next;
    }
    let file = w.vgpr.as_mut_ptr().cast::<[f32; 64]>();
    for block in 0..BLOCKS {
        let a_block = if BLOCKS == 1 {
            0
        } else {
            o.a_block(block) % BLOCKS
        };
        for column in (0..MN).step_by(16) {
            for row in (0..MN).step_by(ROWS) {
                // SAFETY: the registers were checked, rows and columns are inside the block, and
                // the lanes read are below 64.
                unsafe {
                    let mut acc = [V::splat(0.0); ROWS];
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let (register, lane) = row_place::<MN>(block, row + r);
                        *acc = match o.c {
                            Addend::Registers(c) => {
                                V::load(file.add(c + register).cast::<f32>().add(lane + column))
                            }
                            Addend::Constant(bits) => V::splat(f32::from_bits(bits)),
                        };
                    }
                    for group in 0..64 / (MN * BLOCKS) {
                        let a_lane = MN * (a_block + BLOCKS * group) + row;
                        let b_lane = MN * (block + BLOCKS * group) + column;
                        for j in 0..KV {
                            let from = a[j].as_ptr().add(a_lane);
                            let b = V::load(b[j].as_ptr().add(b_lane));
                            for (r, acc) in acc.iter_mut().enumerate() {
                                *acc = V::splat(*from.add(r)).fma(b, *acc);
                            }
                        }
                    }
                    for (r, acc) in acc.iter().enumerate() {
                        let (register, lane) = row_place::<MN>(block, row + r);
                        acc.store(file.add(o.d + register).cast::<f32>().add(lane + column));
                    }
                }
            }
        }
    }
    Flow::Next
}

/// Computes sixteen blocks of 4x4.
///
/// # Safety
/// As for [`blocks`].
#[inline(always)]
pub(super) unsafe fn blocks4<V: Lanes16, T: Input, const KV: usize, const UNUSED: usize>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
) -> Flow {
    let regs = KV / T::PER_DWORD;
    let mut o = match Operands::new(w, inst, e, [regs, regs, 4]) {
        Ok(o) => o,
        Err(flow) => return flow,
    };
    // SAFETY: the extension is there and the registers were checked.
    let (a, b) = unsafe {
        (
            expand::<V, T, KV>(&w.vgpr, o.a, |g| g),
            expand::<V, T, KV>(&w.vgpr, o.b, |g| o.b_group(g)),
        )
    };
    o.settle(w, 4);
    if e.mfma == MfmaMode::Exact {
        exact::blocks4::<T, KV>(w, &o, &a, &b);
        return Flow::Next;
    }
    for row in 0..4 {
        let mut acc = match o.c {
            Addend::Registers(c) => w.vgpr[c + row].0.map(f32::from_bits),
            Addend::Constant(bits) => [f32::from_bits(bits); 64],
        };
        for j in 0..KV {
            let rows: [f32; 64] =
                std::array::from_fn(|lane| a[j][4 * (o.a_block(lane / 4) & 15) + row]);
            for lane in (0..64).step_by(16) {
                // SAFETY: sixteen lanes from `lane` exist.
                unsafe {
                    let x = V::load(rows.as_ptr().add(lane));
                    let y = V::load(b[j].as_ptr().add(lane));
                    let z = V::load(acc.as_ptr().add(lane));
                    x.fma(y, z).store(acc.as_mut_ptr().add(lane));
                }
            }
        }
        w.vgpr[o.d + row].0 = acc.map(f32::to_bits);
    }
    Flow::Next
}
