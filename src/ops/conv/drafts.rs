//! Convolution for speculative decoding: conv states with a column for every draft.

use std::ptr;

use super::ConvTensors;
use super::lower::Shape;
use crate::abi::{self, dwk_conv_args, dwk_conv_draft_args};
use crate::batch::PerSequence;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};

/// Counts and slots of a step of speculative decoding, on the device.
///
/// With `accepted`, conv states have at least `width - 2` columns more than a sequence has tokens. Sequence n reads
/// `width - 1` columns from column `accepted[n] - 1` on. Then it writes, from column 0 on, those columns but the first,
/// and its tokens. So after a step that accepts `accepted[n]` of the tokens, the columns from `accepted[n] - 1` on are the
/// last accepted ones. After a step without drafts the first `width - 1` columns hold the last tokens, which is an
/// `accepted` of 1.
#[derive(Clone, Debug, Default)]
pub struct ConvDrafts<'a> {
    /// `[N]`: tokens of the step before that were accepted, counted from 1. Counts outside are clamped to the columns.
    /// Absent: states are read and written as without drafts.
    pub accepted: Option<PerSequence<'a, i32>>,
    /// Columns of `slots`, which is then `[N, slot_columns]`: the first column holds the slots. Absent: 1.
    pub slot_columns: Option<usize>,
    /// A slot that means padding, besides negative ones and those beyond the pool.
    pub null_slot: Option<i32>,
}

impl ConvDrafts<'_> {
    /// Columns of the table of slots.
    pub(super) fn slot_columns(&self) -> Checked<usize> {
        let columns = self.slot_columns.unwrap_or(1);
        check::ensure((1..=1 << 16).contains(&columns), || {
            let allowed = "it must be from 1 to 2^16";
            ArgumentError::new("slot_columns", ArgumentKind::Shape, columns, allowed)
        })?;
        Ok(columns)
    }

    /// Checks the drafts and returns the kernel's arguments. `conv`: arguments of a convolution of the same tensors.
    /// `longest`: tokens of the longest sequence, 0 if only the device knows.
    pub(super) fn lower(
        &self,
        shape: &Shape,
        x: &ConvTensors<'_>,
        longest: usize,
        conv: dwk_conv_args,
    ) -> Checked<dwk_conv_draft_args> {
        let mut out = dwk_conv_draft_args {
            accepted: ptr::null(),
            columns: conv.state_columns,
            slot_stride: self.slot_columns()? as i32,
            null_slot: self.null_slot.unwrap_or(-1),
            keep_states: 1,
            conv,
        };
        let Some(accepted) = &self.accepted else {
            return Ok(out);
        };
        check::ensure(x.state.is_some(), || {
            let (was, allowed) = ("given without a state", "it needs a state");
            ArgumentError::new("accepted", ArgumentKind::Presence, was, allowed)
        })?;
        let width = shape.spec.width;
        let least = (width - 2).saturating_add(longest);
        check::ensure(out.columns as usize >= least, || {
            let was = format!("{} columns", out.columns);
            let allowed =
                format!("drafts of {longest} tokens and width {width} need at least {least}");
            ArgumentError::new("state", ArgumentKind::Shape, was, allowed)
        })?;
        out.accepted = accepted.checked("accepted", shape.sequences)?;
        out.keep_states = shape.keeps_states.into();
        out.conv.state_columns = (width - 1) as i32;
        out.conv.flags |= abi::DWK_CONV_KEEP_STATES;
        Ok(out)
    }
}
