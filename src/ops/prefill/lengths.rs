//! Lengths that only the device knows. A kernel of one workgroup checks them there before other kernels index with them,
//! divides a fused prefill's sequences into segments, and chooses between the fused path and the split path.

use std::ffi::c_void;
use std::ptr;

use super::plan::{self, Balance, Choice, Counts};
use crate::abi::{
    dwk_prefill_choice, dwk_prefill_item, dwk_prefill_lengths_args, dwk_prefill_plan,
};
use crate::batch::CuSeqlens;
use crate::check::{self, Checked};
use crate::error::Result;
use crate::kernels;
use crate::runtime::{Context, Stream};
use crate::workspace::WORKSPACE_ALIGN;

/// Bytes of the workspace before the checked lengths: the status word.
const STATUS_BYTES: usize = WORKSPACE_ALIGN;

/// Lengths of `sequences` sequences in `tokens` tokens. The first `decodes` sequences have one token each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceLengths {
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
    /// At most `sequences`, and at most `tokens`.
    pub(crate) decodes: usize,
    /// Segments of the sequences after the decodes, if the device divides them.
    pub(crate) segments: Option<DeviceSegments>,
}

/// How the device divides sequences into segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceSegments {
    /// Bounds for all lengths.
    pub(super) most: Counts,
    /// Segments of each sequence; 0: the device chooses.
    pub(super) segments: i32,
    pub(super) balance: Balance,
    /// Whether and how the device chooses the path. Then no sequence is cut.
    pub(super) choice: Option<Choice>,
}

/// Device addresses of checked lengths and of lists of segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceTables {
    pub(super) cu_seqlens: *const i32,
    /// Null: every sequence is one item.
    pub(super) items: *const dwk_prefill_item,
    pub(super) chains: *const i32,
    /// Null unless the device chooses the path; `items` is then the fused path's list.
    pub(super) split_items: *const dwk_prefill_item,
}

impl DeviceSegments {
    fn item_bytes(&self) -> usize {
        let bytes = self.most.items * plan::ITEM_WORDS * size_of::<i32>();
        bytes.next_multiple_of(WORKSPACE_ALIGN)
    }

    fn chain_bytes(&self) -> usize {
        let bytes = self.most.chains as usize * plan::CHAIN_WORDS * size_of::<i32>();
        bytes.next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Bytes of all lists: items, chains and, if the device chooses the path, items of the split path.
    fn bytes(&self) -> usize {
        let of_choice = (self.choice).map_or(0, |_| self.item_bytes());
        self.item_bytes() + self.chain_bytes() + of_choice
    }

    /// Kernel arguments of the choice, with the lists at an address.
    fn lower_choice(&self, address: *mut c_void) -> dwk_prefill_choice {
        let Some(choice) = &self.choice else {
            return dwk_prefill_choice::default();
        };
        let items = address.wrapping_byte_add(self.item_bytes() + self.chain_bytes());
        dwk_prefill_choice {
            split_items: items.cast(),
            ..choice.lower()
        }
    }

    /// Kernel arguments, with the lists at an address.
    fn lower(&self, address: *mut c_void) -> dwk_prefill_plan {
        let balance = &self.balance;
        dwk_prefill_plan {
            items: address.cast(),
            chains: address.wrapping_byte_add(self.item_bytes()).cast(),
            items_count: self.most.items as i32,
            chains_count: self.most.chains as i32,
            segments: self.segments,
            workgroups: balance.workgroups,
            compute_units: balance.compute_units,
            most_summaries: balance.most_summaries,
            least_chunks: balance.least_chunks,
            start: balance.start,
            warm_up: balance.warm_up,
            summaries: balance.summaries,
            worthwhile: balance.worthwhile,
            pad0: 0,
        }
    }
}

/// The arguments of a launch.
pub(crate) struct LaunchArguments(dwk_prefill_lengths_args);

impl DeviceLengths {
    fn checked_bytes(&self) -> usize {
        ((self.sequences + 1) * 4).next_multiple_of(WORKSPACE_ALIGN)
    }

    fn rest_bytes(&self) -> usize {
        match self.decodes {
            0 => 0,
            decodes => ((self.sequences - decodes + 1) * 4).next_multiple_of(WORKSPACE_ALIGN),
        }
    }

    /// Bytes of workspace: the status word, the checked lengths and the lists of segments.
    pub(crate) fn bytes(&self) -> usize {
        let lists = self.segments.as_ref().map_or(0, DeviceSegments::bytes);
        STATUS_BYTES + self.checked_bytes() + self.rest_bytes() + lists
    }

    /// Checks the lengths' tensor and returns the launch arguments, with workspace at an address.
    pub(crate) fn lower(
        &self,
        context: &Context,
        cu_seqlens: &CuSeqlens<'_>,
        workspace: *mut c_void,
    ) -> Checked<LaunchArguments> {
        check::device("cu_seqlens", cu_seqlens.owner(), context)?;
        let (lengths, wide) = cu_seqlens.checked(self.sequences)?;
        let checked = workspace.wrapping_byte_add(STATUS_BYTES);
        let rest = match self.decodes {
            0 => ptr::null_mut(),
            _ => checked.wrapping_byte_add(self.checked_bytes()),
        };
        let lists = checked
            .wrapping_byte_add(self.checked_bytes())
            .wrapping_byte_add(self.rest_bytes());
        let plan = self.segments.map(|segments| segments.lower(lists));
        let choice = self.segments.map(|segments| segments.lower_choice(lists));
        Ok(LaunchArguments(dwk_prefill_lengths_args {
            cu_seqlens: lengths,
            checked: checked.cast(),
            status: workspace.cast(),
            rest: rest.cast(),
            sequences: self.sequences as i32,
            tokens: self.tokens as i32,
            wide: i32::from(wide),
            decodes: self.decodes as i32,
            plan: plan.unwrap_or_default(),
            choice: choice.unwrap_or_default(),
        }))
    }
}

impl LaunchArguments {
    /// The kernel's arguments, for a kernel that does the same beside other work.
    pub(crate) fn arguments(&self) -> dwk_prefill_lengths_args {
        self.0
    }

    /// `cu_seqlens` of all sequences, which the launch writes.
    pub(crate) fn checked(&self) -> *const i32 {
        self.0.checked
    }

    /// Tables of the sequences after the decodes, whose `cu_seqlens` count from 0.
    pub(crate) fn tables(&self) -> DeviceTables {
        DeviceTables {
            cu_seqlens: match self.0.decodes {
                0 => self.0.checked,
                _ => self.0.rest,
            },
            items: self.0.plan.items,
            chains: self.0.plan.chains,
            split_items: self.0.choice.split_items,
        }
    }

    /// Enqueues the kernel on the current device.
    pub(crate) fn enqueue(&self, context: &Context, stream: &Stream) -> Result<()> {
        let kernel = kernels::prefill_lengths();
        let threads = context.target().threads(kernel.role());
        // SAFETY: the caller of `lower` vouches for the workspace; lengths are borrowed, or callers of `from_raw`
        // vouch.
        unsafe { context.launch(stream, kernel, 1, threads, &self.0) }
    }
}
