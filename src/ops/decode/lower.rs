//! Checks tensors and computes the kernel's arguments and grid. Pure: uses no device.

use std::ptr;

use super::{DecodeSpec, DecodeTensors, Draft, Drafts, MAX_TOKENS};
use crate::abi::{
    self, dwk_decode_args, dwk_decode_draft_args, dwk_decode_full_args, dwk_divisor, dwk_norm_args,
};
use crate::alias::{self, Span};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::kernels::{self, Kernel};
use crate::model::Heads;
use crate::norm;
use crate::runtime::Context;
use crate::state::HostSlots;
use crate::tensor::{Batch, Tensor, TensorMut};
use crate::types::{Dtype, HeadMap, StateLayout};

/// Value columns of a workgroup.
const COLUMNS: usize = 32;
/// `V` and largest `K` of the kernel with the gated norm, whose workgroups compute whole rows.
const NORM_VALUE_DIM: usize = 128;
const NORM_KEY_DIM: usize = 128;
/// Largest row stride of a head's state, in elements: the kernel's offsets within a head have 31 bits.
const MAX_ROW_STRIDE: usize = 1 << 21;

/// Properties of a batch that decide the launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    spec: DecodeSpec,
    pub(super) batch: usize,
    scale: f32,
    /// Dies of the device, to which it deals workgroups in turn.
    dies: u32,
    /// Most (sequence, value head) for which the kernel with the gated norm is faster than two kernels.
    norm_rows: usize,
    /// Most workgroups for which the kernel for few sequences is faster.
    few_workgroups: usize,
}

/// Launch arguments: the kernel's argument struct and grid.
pub(crate) struct LaunchArguments {
    pub(super) kernel: Kernel<dwk_decode_args>,
    pub(super) arguments: dwk_decode_args,
    /// What runs in its place, if the arguments fit it.
    pub(super) full: Option<Kernel<dwk_decode_full_args>>,
    pub(super) groups: u32,
}

/// The same for drafts.
pub(super) struct DraftArguments {
    pub(super) kernel: Kernel<dwk_decode_draft_args>,
    pub(super) arguments: dwk_decode_draft_args,
    pub(super) groups: u32,
}

/// Fuses a norm into a decode's arguments. Returns how many workgroups become one, which has whole rows.
fn fuse(arguments: &mut dwk_decode_args, norm: &dwk_norm_args) -> u32 {
    let slabs = arguments.slabs as u32;
    arguments.slabs = 1;
    arguments.by_slabs = divisor(1);
    arguments.norm = *norm;
    slabs
}

impl LaunchArguments {
    /// Fuses a norm of o, in place. `kernel`: the fused kernel; `norm`: arguments of a norm of the same tensors.
    pub(super) fn fuse(&mut self, kernel: Kernel<dwk_decode_args>, norm: &dwk_norm_args) {
        self.kernel = kernel;
        self.full = None;
        self.groups /= fuse(&mut self.arguments, norm);
    }
}

impl Shape {
    pub(crate) fn new(spec: DecodeSpec, batch: usize, context: &Context) -> Checked<Shape> {
        check::dtype("dtype", spec.dtype, &[Dtype::Bf16, Dtype::F16])?;
        spec.heads.check_recurrence()?;
        check::scale(spec.scale)?;
        check::ensure((1..=MAX_TOKENS).contains(&spec.tokens), || {
            let allowed = format!("it must be from 1 to {MAX_TOKENS}");
            ArgumentError::new("tokens", ArgumentKind::Shape, spec.tokens, allowed)
        })?;
        check::ensure(spec.draft == Draft::Chain, || {
            let allowed = "chains only: every token must follow the one before it";
            ArgumentError::new("draft", ArgumentKind::Value, "a tree", allowed)
        })?;
        let shape = Shape {
            spec,
            batch,
            scale: spec.scale.unwrap_or_else(|| spec.heads.default_scale()),
            dies: context.dies(),
            norm_rows: context.target().decode_norm_rows,
            few_workgroups: context.target().decode_few_room
                * context.device().compute_units as usize,
        };
        check::ensure(batch < 1 << 24 && shape.workgroups() < 1 << 26, || {
            let was = format!("{batch} sequences of {} value heads", spec.heads.value);
            let allowed = "a launch must have fewer than 2^32 threads";
            ArgumentError::new("batch", ArgumentKind::Shape, was, allowed)
        })?;
        Ok(shape)
    }

    /// The kernel for all heads.
    pub(super) fn kernel(&self) -> Kernel<dwk_decode_args> {
        kernels::decode(self.spec.dtype, self.spec.heads.key_dim)
    }

    /// The kernel for heads of full size, for a pool of type `states` in `layout`, if there is one for this shape.
    pub(super) fn full_kernel(
        &self,
        states: Dtype,
        layout: StateLayout,
    ) -> Option<Kernel<dwk_decode_full_args>> {
        let (dtype, heads) = (self.spec.dtype, &self.spec.heads);
        if heads.key_dim != kernels::FULL_KEY_DIM || !heads.value_dim.is_multiple_of(COLUMNS) {
            None
        } else if self.workgroups() <= self.few_workgroups as u64 {
            Some(kernels::decode_few(dtype, states, layout))
        } else {
            Some(kernels::decode_full(dtype, states, layout))
        }
    }

    /// The kernel for drafts.
    pub(super) fn draft_kernel(&self) -> Kernel<dwk_decode_draft_args> {
        kernels::decode_draft(self.spec.dtype, self.spec.heads.key_dim)
    }

    /// Tokens of a sequence; with drafts, the most.
    pub(super) fn tokens(&self) -> usize {
        self.spec.tokens
    }

    /// Element type of the outputs.
    pub(super) fn dtype(&self) -> Dtype {
        self.spec.dtype
    }

    /// The kernel with the gated norm fused in, if there is one for this shape, and it is faster.
    pub(super) fn norm_kernel(&self) -> Option<Kernel<dwk_decode_args>> {
        self.fits_norm()
            .then(|| kernels::decode_norm(self.spec.dtype))
    }

    /// The same for drafts.
    pub(super) fn draft_norm_kernel(&self) -> Option<Kernel<dwk_decode_draft_args>> {
        self.fits_norm()
            .then(|| kernels::decode_draft_norm(self.spec.dtype))
    }

    fn fits_norm(&self) -> bool {
        let heads = &self.spec.heads;
        heads.value_dim == NORM_VALUE_DIM
            && heads.key_dim <= NORM_KEY_DIM
            && self.batch * heads.value <= self.norm_rows
    }

    /// Fuses the in-place norm of the outputs into the kernel for drafts. Returns false if no kernel for this shape has
    /// it.
    pub(super) fn fuse_drafts(
        &self,
        lowered: &mut DraftArguments,
        norm: &norm::LaunchArguments,
    ) -> bool {
        if let Some(kernel) = self.draft_norm_kernel() {
            lowered.kernel = kernel;
            lowered.groups /= fuse(&mut lowered.arguments.decode, norm.arguments());
        }
        self.draft_norm_kernel().is_some()
    }

    fn slabs(&self) -> usize {
        self.spec.heads.value_dim.div_ceil(COLUMNS)
    }

    pub(super) fn workgroups(&self) -> u64 {
        (self.batch as u64)
            .saturating_mul(self.spec.heads.value as u64)
            .saturating_mul(self.slabs() as u64)
    }

    /// Checks the tensors and returns the launch arguments. What `drafts` hold is not checked here.
    pub(super) fn lower(
        &self,
        x: &DecodeTensors<'_>,
        plan_slots: Option<&HostSlots>,
        drafts: Option<&Drafts<'_>>,
    ) -> Checked<LaunchArguments> {
        let DecodeSpec { dtype, tokens, .. } = self.spec;
        let Heads {
            key: key_heads,
            value: value_heads,
            key_dim,
            value_dim,
            map,
        } = self.spec.heads;
        let rows = drafts.and_then(|drafts| drafts.rows(x));
        let batch_of = |dense| match (rows, dense) {
            (Some(tokens), _) => Batch::Packed { tokens },
            (None, true) => Batch::Dense {
                batch: self.batch,
                tokens,
            },
            (None, false) => Batch::Packed {
                tokens: self.batch * tokens,
            },
        };
        let (batch, types) = (batch_of, [dtype]);
        let q_strides = check::tokens("q", &x.q, batch(x.q.1), key_heads, key_dim, &types)?;
        let k_strides = check::tokens("k", &x.k, batch(x.k.1), key_heads, key_dim, &types)?;
        let v_strides = check::tokens("v", &x.v, batch(x.v.1), value_heads, value_dim, &types)?;
        let o = &x.o.0;
        let o_strides = check::output_tokens("o", o, batch(o.1), value_heads, value_dim, &types)?;
        let gates = x.gating.lower(value_heads, |t| batch_of(t.1))?;
        let flag = |set: bool, bit| if set { bit } else { 0 };
        let flags = gates.flags
            | flag(self.spec.qk_l2norm, abi::DWK_QK_L2NORM)
            | flag(map == HeadMap::Tiled, abi::DWK_TILED_HEADS);
        let mut arguments = dwk_decode_args {
            q: x.q.0.address,
            k: x.k.0.address,
            v: x.v.0.address,
            g: gates.g,
            beta: gates.beta,
            a_log: gates.a_log,
            dt_bias: gates.dt_bias,
            o: o.0.address,
            has_initial_state: match &x.has_initial_state {
                Some(has) => has.checked("has_initial_state", self.batch)?,
                None => ptr::null(),
            },
            q_strides,
            k_strides,
            v_strides,
            g_strides: gates.g_strides,
            beta_strides: gates.beta_strides,
            o_strides,
            a_log_stride: gates.a_log_stride,
            dt_bias_stride: gates.dt_bias_stride,
            batch: self.batch as i32,
            tokens: tokens as i32,
            key_heads: key_heads as i32,
            value_heads: value_heads as i32,
            key_dim: key_dim as i32,
            value_dim: value_dim as i32,
            flags,
            scale: self.scale,
            g_type: gates.g_type,
            beta_type: gates.beta_type,
            a_log_type: gates.a_log_type,
            dt_bias_type: gates.dt_bias_type,
            slabs: self.slabs() as i32,
            dies: self.dies as i32,
            by_slabs: divisor(self.slabs()),
            by_value_heads: divisor(value_heads),
            by_key_heads: divisor(match map {
                HeadMap::Tiled => key_heads,
                HeadMap::Grouped => value_heads / key_heads,
            }),
            ..Default::default()
        };
        let in_table = drafts.is_some_and(|drafts| drafts.read_slots.is_some());
        self.lower_pool(x, plan_slots, in_table, &mut arguments)?;
        if let Some(states) = &x.states {
            let in_slots = drafts.is_some_and(|drafts| drafts.draft_slots.is_some());
            self.lower_states(states, x.pool.layout, in_slots, &mut arguments)?;
        }
        if is_aligned(&arguments, x) {
            arguments.flags |= abi::DWK_ALIGNED;
        }
        Ok(LaunchArguments {
            kernel: self.kernel(),
            arguments,
            full: self.full_kernel(x.pool.tensor.0.dtype, x.pool.layout),
            groups: self.workgroups() as u32,
        })
    }

    /// Rows and columns of a head's state in memory.
    fn matrix(&self, layout: StateLayout) -> [usize; 2] {
        matrix(&self.spec, layout)
    }

    fn lower_pool(
        &self,
        x: &DecodeTensors<'_>,
        plan_slots: Option<&HostSlots>,
        in_table: bool,
        out: &mut dwk_decode_args,
    ) -> Checked<()> {
        let pool = &x.pool;
        let tensor = &pool.tensor.0;
        let slots = tensor.shape[0];
        // Without slots, sequence n has slot n.
        let given = pool.slots.is_some() || plan_slots.is_some() || in_table;
        let least = if given { 1 } else { self.batch };
        check_slot_count("pool", tensor, least)?;
        let [rows, columns] = self.matrix(pool.layout);
        let shape = [slots, self.spec.heads.value, rows, columns];
        out.state_strides = check::state("pool", tensor, shape, true)?;
        check_row_stride("pool", tensor.strides[2])?;
        out.state = tensor.address;
        out.state_type = check::type_code(tensor.dtype);
        out.slot_count = slots as i32;
        if pool.layout == StateLayout::ValueMajor {
            out.flags |= abi::DWK_INITIAL_VALUE_MAJOR;
        }
        if let Some(plan) = plan_slots {
            [out.slots, out.write_slots] = plan.lower(pool)?;
        }
        if let Some(slots) = &pool.slots {
            out.slots = slots.checked("slots", self.batch)?;
        }
        if let Some(slots) = &pool.write_slots {
            out.write_slots = slots.checked("write_slots", self.batch)?;
        }
        Ok(())
    }

    fn lower_states(
        &self,
        states: &TensorMut<'_, 5>,
        layout: StateLayout,
        in_slots: bool,
        out: &mut dwk_decode_args,
    ) -> Checked<()> {
        // In slots of their own, states are a pool of any number of slots.
        let [slots, ..] = states.0.shape;
        let (batch, tokens) = match in_slots {
            true => (slots, 1),
            false => (self.batch, self.spec.tokens),
        };
        check::ensure(slots < i32::MAX as usize, || {
            let was = format!("shape {:?}", states.0.shape);
            let allowed = "it must have fewer than 2^31 - 1 slots";
            ArgumentError::new("states", ArgumentKind::Shape, was, allowed)
        })?;
        let (strides, token) = check_states(
            "states",
            &states.0,
            batch,
            tokens,
            self.spec.heads.value,
            self.matrix(layout),
        )?;
        check::no_overlap("states", &states.0.shape, &states.0.strides)?;
        out.states = states.0.address;
        out.states_strides = strides;
        out.states_token = token;
        out.states_type = check::type_code(states.0.dtype);
        Ok(())
    }
}

/// Whether all rows of q, k, v, o and states begin at multiples of 16 bytes.
fn is_aligned(of: &dwk_decode_args, x: &DecodeTensors<'_>) -> bool {
    let tokens = |address: usize, strides: &abi::dwk_token_strides| {
        let elements = [strides.sequence, strides.token, strides.head];
        address.is_multiple_of(16) && elements.iter().all(|stride| stride % 8 == 0)
    };
    let state = |address: usize, strides: &abi::dwk_state_strides, token: i64, dtype: Dtype| {
        let elements = [strides.sequence, strides.head, strides.row, token];
        let of_16_bytes = 16 / dtype.size() as i64;
        address.is_multiple_of(16) && elements.iter().all(|stride| stride % of_16_bytes == 0)
    };
    tokens(of.q.addr(), &of.q_strides)
        && tokens(of.k.addr(), &of.k_strides)
        && tokens(of.v.addr(), &of.v_strides)
        && tokens(of.o.addr(), &of.o_strides)
        && state(of.state.addr(), &of.state_strides, 0, x.pool.tensor.0.dtype)
        && x.states.as_ref().is_none_or(|states| {
            let (strides, token) = (&of.states_strides, of.states_token);
            state(of.states.addr(), strides, token, states.0.dtype)
        })
}

/// Factors that divide any `n < 2^31` by `by`, from 1 to 2^31, with a product of 64 bits and a shift.
fn divisor(by: usize) -> dwk_divisor {
    let shift = 31 + by.next_power_of_two().trailing_zeros();
    dwk_divisor {
        multiplier: (1u64 << shift).div_ceil(by as u64) as u32,
        shift,
    }
}

/// Rows and columns of a head's state in memory.
pub(crate) fn matrix(spec: &DecodeSpec, layout: StateLayout) -> [usize; 2] {
    match layout {
        StateLayout::KeyMajor => [spec.heads.key_dim, spec.heads.value_dim],
        StateLayout::ValueMajor => [spec.heads.value_dim, spec.heads.key_dim],
    }
}

/// Checks states after every token, `[B, T, HV, rows, columns]`. Returns strides, and elements from token to token.
pub(crate) fn check_states(
    argument: &str,
    t: &Tensor<'_, 5>,
    batch: usize,
    tokens: usize,
    heads: usize,
    [rows, columns]: [usize; 2],
) -> Checked<(abi::dwk_state_strides, i64)> {
    let wanted = [batch, tokens, heads, rows, columns];
    check::ensure(t.shape == wanted, || {
        let was = format!("shape {:?}", t.shape);
        ArgumentError::new(
            argument,
            ArgumentKind::Shape,
            was,
            format!("it must be {wanted:?}"),
        )
    })?;
    let [sequence, token, head, row, column] = t.strides;
    let of_token = t.part(
        [batch, heads, rows, columns],
        [sequence, head, row, column],
        0,
    );
    let strides = check::state(argument, &of_token, of_token.shape, false)?;
    check_row_stride(argument, row)?;
    check::ensure(token < 1 << 40, || {
        let was = format!("a token stride of {token}");
        ArgumentError::new(
            argument,
            ArgumentKind::Stride,
            was,
            "it must be below 2^40 elements",
        )
    })?;
    Ok((strides, token as i64))
}

/// Checks that a pool has at least `least` slots, and fewer than 2^31 - 1.
pub(crate) fn check_slot_count(argument: &str, t: &Tensor<'_, 4>, least: usize) -> Checked<()> {
    check::ensure((least..i32::MAX as usize).contains(&t.shape[0]), || {
        let was = format!("shape {:?}", t.shape);
        let allowed = format!("it must have at least {least} slots, and fewer than 2^31 - 1");
        ArgumentError::new(argument, ArgumentKind::Shape, was, allowed)
    })
}

pub(crate) fn check_row_stride(argument: &str, row: usize) -> Checked<()> {
    check::ensure(row <= MAX_ROW_STRIDE, || {
        let was = format!("a row stride of {row}");
        let allowed = format!("it must be at most {MAX_ROW_STRIDE} elements");
        ArgumentError::new(argument, ArgumentKind::Stride, was, allowed)
    })
}

/// Memory of the outputs.
pub(super) fn outputs<'a>(x: &'a DecodeTensors<'_>) -> [Span<'a>; 3] {
    [
        Span::of("o", &x.o.0.0),
        Span::maybe("states", x.states.as_ref().map(|t| &t.0)),
        Span::of("pool", &x.pool.tensor.0),
    ]
}

/// Checks that no output shares memory with another argument. o may be v: a workgroup reads the elements of v that it
/// then overwrites.
pub(super) fn check_overlaps(x: &DecodeTensors<'_>) -> Checked<()> {
    let [g, beta, a_log, dt_bias] = x.gating.spans();
    let inputs = [
        Span::of("q", &x.q.0),
        Span::of("k", &x.k.0),
        Span::of("v", &x.v.0),
        g,
        beta,
        a_log,
        dt_bias,
        Span::numbers("slots", x.pool.slots.as_ref()),
        Span::numbers("write_slots", x.pool.write_slots.as_ref()),
        Span::numbers("has_initial_state", x.has_initial_state.as_ref()),
    ];
    alias::check(&outputs(x), &inputs, &[("o", "v")])
}

/// Checks that every tensor with a known context belongs to `context`.
pub(super) fn check_devices(x: &DecodeTensors<'_>, context: &Context) -> Checked<()> {
    x.gating.check_devices(context)?;
    let always = [
        ("q", &x.q.0.owner),
        ("k", &x.k.0.owner),
        ("v", &x.v.0.owner),
        ("pool", &x.pool.tensor.0.owner),
        ("o", &x.o.0.0.owner),
    ];
    let optional = [
        ("slots", x.pool.slots.as_ref().map(|s| s.owner())),
        (
            "write_slots",
            x.pool.write_slots.as_ref().map(|s| s.owner()),
        ),
        (
            "has_initial_state",
            x.has_initial_state.as_ref().map(|s| s.owner()),
        ),
        ("states", x.states.as_ref().map(|t| &t.0.owner)),
    ];
    let optional = optional.into_iter().filter_map(|(n, o)| Some((n, o?)));
    let mut all = always.into_iter().chain(optional);
    all.try_for_each(|(name, owner)| check::device(name, owner, context))
}

#[cfg(test)]
mod tests {
    use super::divisor;

    #[test]
    fn divisors_divide() {
        let bounds = [
            1,
            2,
            3,
            4,
            5,
            7,
            30,
            48,
            64,
            1000,
            (1 << 20) - 1,
            1 << 20,
            1 << 30,
            1 << 31,
        ];
        for by in bounds {
            let factors = divisor(by);
            let most = (1u64 << 31) - 1;
            let multiples = (0..4).flat_map(|i| {
                let near = ((most / by as u64) >> (8 * i)) * by as u64;
                [near.saturating_sub(1), near, near + 1, near + by as u64 - 1]
            });
            for n in multiples.chain([0, 1, most]).map(|n| n.min(most)) {
                let quotient = (n * u64::from(factors.multiplier)) >> factors.shift;
                assert_eq!(quotient, n / by as u64, "{n} / {by}");
            }
        }
    }
}
