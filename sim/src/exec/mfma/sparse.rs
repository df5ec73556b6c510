//! SMFMAC: `D += A * B`, where A stores only two of every four consecutive k.
//!
//! A lane holds `KV` values of A, which represent `2 KV` consecutive k, and all `2 KV` values of B for its k. Stored
//! value i belongs to the four k from `4 * (i / 2)` on; two bits of the lane's index select which of them. A register
//! holds several sets of index bits: ABID selects one, unless CBSZ is set. Products with values that are not stored are
//! left out of the sum. In exact mode, stored values are grouped in the order of k.

use super::vector::Lanes16;
use super::{Env, Expanded, Flow, Input, Inst, MfmaMode, Wave, exact, expand, register, row_place};

/// The index of each lane's stored values, `2 KV` bits.
#[inline(always)]
fn index_bits<const KV: usize>(w: &Wave, inst: &Inst, first: usize) -> [u32; 64] {
    let set = if inst.ctrl & 7 == 0 {
        inst.ctrl >> 4 & (16 / KV as u32 - 1)
    } else {
        0
    };
    w.vgpr[first].0.map(|x| x >> (set * 2 * KV as u32))
}

/// Value of B in the lane that stored value `i` of A is multiplied with.
#[inline(always)]
fn partner(index: u32, i: usize) -> usize {
    4 * (i / 2) + (index >> (2 * i) & 3) as usize
}

/// Registers of A, B, index and D.
#[inline(always)]
fn operands(w: &Wave, inst: &Inst, e: &mut Env, [a, b, d]: [usize; 3]) -> Result<[usize; 4], Flow> {
    Ok([
        register(w, e, inst.src[0], a)?,
        register(w, e, inst.src[1], b)?,
        register(w, e, inst.src[2], 1)?,
        register(w, e, inst.vdst, d)?,
    ])
}

/// f32 results. `KV` values of A, `KV2` = `2 KV` of B in a lane.
///
/// # Safety
/// As for [`super::Exec`], and the host must have the extension of `V`.
#[inline(always)]
pub(super) unsafe fn blocks<
    V: Lanes16,
    A: Input,
    B: Input,
    const MN: usize,
    const KV: usize,
    const KV2: usize,
    const UNUSED: usize,
>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
) -> Flow {
    let counts = [KV / A::PER_DWORD, KV2 / B::PER_DWORD, MN * MN / 64];
    let [a, b, index, d] = match operands(w, inst, e, counts) {
        Ok(o) => o,
        Err(flow) => return flow,
    };
    let index = index_bits::<KV>(w, inst, index);
    // SAFETY: the extension is there and the registers were checked.
    let (a, b): (Expanded<KV>, Expanded<KV2>) = unsafe {
        (
            expand::<V, A, KV>(&w.vgpr, a, |g| g),
            expand::<V, B, KV2>(&w.vgpr, b, |g| g),
        )
    };
    let file = w.vgpr.as_mut_ptr().cast::<[f32; 64]>();
    for row in 0..MN {
        let (register, lane) = row_place::<MN>(0, row);
        if e.mfma == MfmaMode::Exact {
            for column in 0..MN {
                let mut pairs: Vec<(usize, f32, f32)> = Vec::with_capacity(32);
                for group in 0..64 / MN {
                    let from = MN * group + row;
                    for (i, a) in a.iter().enumerate() {
                        let j = partner(index[from], i);
                        let k = KV2 * group + j;
                        pairs.push((k, a[from], b[j][MN * group + column]));
                    }
                }
                pairs.sort_by_key(|p| p.0);
                let x: Vec<f32> = pairs.iter().map(|p| p.1).collect();
                let y: Vec<f32> = pairs.iter().map(|p| p.2).collect();
                let c = &mut w.vgpr[d + register].0[lane + column];
                *c = exact::dot::<A, B>(&x, &y, f32::from_bits(*c)).to_bits();
            }
            continue;
        }
        for column in (0..MN).step_by(16) {
            // SAFETY: the registers were checked, and the lanes are below 64.
            unsafe {
                let place = file.add(d + register).cast::<f32>().add(lane + column);
                let mut acc = V::load(place);
                for group in 0..64 / MN {
                    let from = MN * group + row;
                    for (i, a) in a.iter().enumerate() {
                        let b = &b[partner(index[from], i)];
                        let b = V::load(b.as_ptr().add(MN * group + column));
                        acc = V::splat(a[from]).fma(b, acc);
                    }
                }
                acc.store(place);
            }
        }
    }
    Flow::Next
}

/// i8 inputs, i32 results.
///
/// # Safety
/// As for [`super::Exec`].
#[inline(always)]
pub(super) unsafe fn int8<const MN: usize>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let [a, b, index, d] = match operands(w, inst, e, [2, 4, MN * MN / 64]) {
        Ok(o) => o,
        Err(flow) => return flow,
    };
    let index = index_bits::<8>(w, inst, index);
    let byte = |w: &Wave, first: usize, j: usize, lane: usize| {
        i32::from((w.vgpr[first + j / 4].0[lane] >> (8 * (j % 4))) as i8)
    };
    let a: [[i32; 64]; 8] =
        std::array::from_fn(|j| std::array::from_fn(|lane| byte(w, a, j, lane)));
    let b: [[i32; 64]; 16] =
        std::array::from_fn(|j| std::array::from_fn(|lane| byte(w, b, j, lane)));
    for row in 0..MN {
        let (register, lane) = row_place::<MN>(0, row);
        let acc = &mut w.vgpr[d + register].0[lane..lane + MN];
        for group in 0..64 / MN {
            let from = MN * group + row;
            for (i, a) in a.iter().enumerate() {
                let b = &b[partner(index[from], i)][MN * group..][..MN];
                for (acc, b) in acc.iter_mut().zip(b) {
                    *acc = acc.wrapping_add((a[from] * b) as u32);
                }
            }
        }
    }
    Flow::Next
}
