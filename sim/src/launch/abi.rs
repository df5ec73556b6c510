//! Initial state of a kernel: arguments, dispatch packet, registers.

use super::Launch;
use crate::code_object::{Image, property};
use crate::exec::{PRIVATE_BASE_HI, SHARED_BASE_HI};
use crate::memory::Extent;
use crate::wave::Wave;

/// Bytes of `hsa_kernel_dispatch_packet_t`.
const PACKET: usize = 64;
/// Size in bytes of the `amd_queue_t` behind the queue pointer. gfx942 kernels read nothing in it.
const QUEUE: usize = 256;
/// Distance in bytes between the blocks, so that running off the end of one is a fault.
const GAP: usize = 256;

/// Memory blocks that a launch provides, and the scalar registers that point to them.
pub(super) struct Setup {
    image: Image,
    blocks: [(usize, usize); 3],
    user_sgprs: Vec<u32>,
    /// First SGPR after the user SGPRs.
    system_sgpr: usize,
}

impl Setup {
    /// Lays out the blocks. The error is the size in bytes for which there was no memory.
    pub fn new(launch: &Launch, scratch: u32) -> Result<Setup, usize> {
        let kernarg = kernarg(launch);
        // Scalar loads may be wider than the arguments that they load.
        let size = kernarg.len().next_multiple_of(64);
        let packet = size + GAP;
        let queue = packet + PACKET + GAP;
        let total = queue + QUEUE;
        let image = Image::new(total).map_err(|_| total)?;
        let at = |offset: usize| image.address() + offset as u64;
        image.write(0, &kernarg);
        let dispatch = dispatch_packet(launch, at(0), scratch);
        image.write(packet as u64, &dispatch);

        let d = &launch.kernel.descriptor;
        let mut s = Vec::new();
        let pair = |on: u16, value: u64, s: &mut Vec<u32>| {
            if d.has(on) {
                s.extend([value as u32, (value >> 32) as u32]);
            }
        };
        if d.has(property::PRIVATE_SEGMENT_BUFFER) {
            // gfx942 reaches scratch through its flat scratch instructions, never through a buffer.
            s.extend([0; 4]);
        }
        pair(property::DISPATCH_PTR, at(packet), &mut s);
        pair(property::QUEUE_PTR, at(queue), &mut s);
        pair(property::KERNARG_SEGMENT_PTR, at(0), &mut s);
        pair(property::DISPATCH_ID, 0, &mut s);
        pair(property::FLAT_SCRATCH_INIT, 0, &mut s);
        if d.has(property::PRIVATE_SEGMENT_SIZE) {
            s.push(scratch);
        }
        let (first, count) = d.preload();
        let dwords = kernarg.chunks_exact(4).skip(first as usize);
        s.extend(
            dwords
                .take(count as usize)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        );
        let system_sgpr = d.user_sgprs() as usize;
        s.truncate(system_sgpr);
        Ok(Setup {
            image,
            blocks: [(0, size), (packet, PACKET), (queue, QUEUE)],
            user_sgprs: s,
            system_sgpr,
        })
    }

    /// Address ranges of the blocks.
    pub fn extents(&self) -> Vec<Extent> {
        let base = self.image.address();
        let extent = |(offset, size): (usize, usize)| Extent {
            start: base + offset as u64,
            end: base + (offset + size) as u64,
        };
        let used = self.blocks.iter().filter(|(_, size)| *size > 0);
        used.map(|b| extent(*b)).collect()
    }

    /// The scalar registers that [`Setup::start`] initialises, one bit each.
    pub fn defined(&self, launch: &Launch) -> u128 {
        let d = &launch.kernel.descriptor;
        let below = |n: usize| (1u128 << n.min(102)) - 1;
        let ids = d.workgroup_ids().into_iter().filter(|on| *on).count();
        let system = ids + usize::from(d.workgroup_info());
        let system = below(self.system_sgpr + system) & !below(self.system_sgpr);
        // flat_scratch, xnack_mask, what the trap handler keeps, EXEC.
        let special = 0xffff << 108 | 0xf << FLAT_SCRATCH | 3 << 126;
        below(self.user_sgprs.len()) | system | special
    }

    /// Initialises wave `w.id` of a workgroup with `items` work-items. The caller has set the wave's scratch.
    pub fn start(&self, w: &mut Wave, launch: &Launch, workgroup: [u32; 3], items: [u32; 3]) {
        let d = &launch.kernel.descriptor;
        w.vgpr_count = d.vgprs() as u16;
        w.accum_offset = d.accum_offset() as u16;
        w.scc = false;
        w.mode = d.mode();
        w.pc = launch.kernel.entry;
        w.executed = 0;
        w.ended = false;
        fresh_registers(w);

        w.sgpr[..self.user_sgprs.len()].copy_from_slice(&self.user_sgprs);
        let mut next = self.system_sgpr;
        for (enabled, id) in d.workgroup_ids().into_iter().zip(workgroup) {
            if enabled {
                w.sgpr[next] = id;
                next += 1;
            }
        }
        let total = items.iter().product::<u32>();
        if d.workgroup_info() {
            w.sgpr[next] = total.div_ceil(64);
        }
        w.set_s64(FLAT_SCRATCH, w.scratch);

        let first = w.id * 64;
        let ids = d.workitem_ids();
        let lanes = total.saturating_sub(first).min(64);
        w.set_exec(if lanes == 64 { !0 } else { (1 << lanes) - 1 });
        for lane in 0..lanes {
            let flat = first + lane;
            let x = flat % items[0];
            let y = flat / items[0] % items[1];
            let z = flat / items[0] / items[1];
            let mut packed = x;
            if ids > 1 {
                packed |= y << 10;
            }
            if ids > 2 {
                packed |= z << 20;
            }
            w.vgpr[0].0[lane as usize] = packed;
        }
    }
}

const FLAT_SCRATCH: u16 = 102;

/// Initial value of registers, LDS and scratch in every byte. Hardware guarantees none; here it is the same in every
/// run.
pub(super) const FRESH: u8 = 0;

fn fresh_registers(w: &mut Wave) {
    let word = u32::from_ne_bytes([FRESH; 4]);
    let count = usize::from(w.vgpr_count)
        .max(usize::from(w.accum_offset))
        .min(512);
    for v in &mut w.vgpr[..count] {
        v.0.fill(word);
    }
    w.sgpr.fill(word);
}

/// The argument block: the caller's arguments, then the hidden arguments.
fn kernarg(launch: &Launch) -> Vec<u8> {
    let m = &launch.kernel.metadata;
    let mut block = vec![0; m.kernarg_segment_size as usize];
    let explicit = (launch.kernel.explicit_size() as usize).min(launch.kernarg.len());
    block[..explicit].copy_from_slice(&launch.kernarg[..explicit]);
    for arg in m.args.iter().filter(|a| a.is_hidden()) {
        let (axis, kind) = match arg.value_kind.strip_prefix("hidden_").unwrap_or_default() {
            k if k.ends_with("_x") => (0, &k[..k.len() - 2]),
            k if k.ends_with("_y") => (1, &k[..k.len() - 2]),
            k if k.ends_with("_z") => (2, &k[..k.len() - 2]),
            k => (0, k),
        };
        let value = match kind {
            "block_count" => launch.grid[axis],
            "group_size" => launch.block[axis],
            "remainder" => launch.remainder[axis],
            "grid_dims" => 3,
            "dynamic_lds_size" => launch.dynamic_lds,
            "private_base" => PRIVATE_BASE_HI,
            "shared_base" => SHARED_BASE_HI,
            // Global offsets are zero; printf, hostcall, heap, queues and the like are absent: null.
            _ => 0,
        };
        let bytes = u64::from(value).to_le_bytes();
        let (start, size) = (arg.offset as usize, (arg.size as usize).min(8));
        block[start..start + size].copy_from_slice(&bytes[..size]);
    }
    block
}

/// An `hsa_kernel_dispatch_packet_t`.
fn dispatch_packet(launch: &Launch, kernarg: u64, scratch: u32) -> [u8; PACKET] {
    const KERNEL_DISPATCH: u16 = 2;
    let mut p = [0; PACKET];
    let mut put = |at: usize, bytes: &[u8]| p[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &KERNEL_DISPATCH.to_le_bytes());
    put(2, &3u16.to_le_bytes());
    for d in 0..3 {
        let (grid, block) = (launch.grid[d], launch.block[d]);
        put(4 + 2 * d, &(block as u16).to_le_bytes());
        let items = grid * block + launch.remainder[d];
        put(12 + 4 * d, &items.to_le_bytes());
    }
    let lds = launch.kernel.descriptor.group_segment_fixed_size + launch.dynamic_lds;
    put(24, &scratch.to_le_bytes());
    put(28, &lds.to_le_bytes());
    put(32, &launch.kernel.object.to_le_bytes());
    put(40, &kernarg.to_le_bytes());
    p
}
