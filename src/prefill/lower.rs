//! From the shape of a batch and its tensors to the kernels' arguments and grids: pure, no device.

use std::ffi::c_void;
use std::ptr;

use super::{CHUNK, Gating, Part, PrefillSpec, PrefillTensors};
use crate::abi::{self, dw_prefill_prepare_args, dw_prefill_scan_args};
use crate::check::{self, Batch, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::launch::LaunchShape;
use crate::runtime::{Context, Stream};
use crate::types::{Dtype, HeadMap, StateLayout};

const RECORD_BYTES: usize = abi::DW_RECORD_BYTES as usize;

/// A batch, as far as it decides launches: a pure value, no device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) spec: PrefillSpec,
    pub(super) batch: Batch,
    pub(super) sequences: usize,
    pub(super) launch: &'static LaunchShape,
    dies: u32,
}

/// Arguments and grids of one launch.
pub(super) struct Lowered {
    prepare: dw_prefill_prepare_args,
    prepare_groups: u32,
    scan: dw_prefill_scan_args,
    scan_groups: u32,
}

impl Shape {
    pub(super) fn new(
        spec: PrefillSpec,
        batch: Batch,
        sequences: usize,
        context: &Context,
    ) -> Checked<Shape> {
        spec.validate()?;
        let rows = match batch {
            Batch::Packed { tokens } => Some(tokens),
            Batch::Dense { batch, tokens } => batch.checked_mul(tokens),
        };
        check::ensure(
            rows.is_some_and(|rows| rows <= i32::MAX as usize - CHUNK),
            || {
                let was = rows.map_or("more than 2^64".to_owned(), |r| r.to_string());
                ArgumentError::new(
                    "tokens",
                    ArgumentKind::Shape,
                    was,
                    format!("at most {} tokens", i32::MAX as usize - CHUNK),
                )
            },
        )?;
        check::ensure(sequences < 1 << 24, || {
            ArgumentError::new(
                "sequences",
                ArgumentKind::Lengths,
                sequences,
                "fewer than 2^24 sequences",
            )
        })?;
        let shape = Shape {
            spec,
            batch,
            sequences,
            launch: context.launch_shape(),
            dies: context.dies(),
        };
        let (prepare, scan) = shape.grids();
        check::ensure(prepare < 1 << 26 && scan < 1 << 24, || {
            let was = format!(
                "{} tokens, {sequences} sequences, {} value heads",
                batch.rows(),
                spec.value_heads
            );
            ArgumentError::new(
                "tokens, sequences and heads",
                ArgumentKind::Shape,
                was,
                "a launch must have fewer than 2^32 threads",
            )
        })?;
        Ok(shape)
    }

    /// Chunks of the batch, at most: the sequences' own, rounded up where they lie unfavourably.
    pub(super) fn slots(&self) -> usize {
        self.batch.rows() / CHUNK + self.sequences
    }

    pub(super) fn slabs(&self) -> usize {
        self.spec
            .value_dim
            .div_ceil(self.launch.scan_columns(self.spec.key_bucket()))
    }

    /// Workgroups of prepare (one more slot for rows past the last sequence) and of scan.
    pub(super) fn grids(&self) -> (u64, u64) {
        let prepare = (self.slots() as u64 + 1) * self.spec.key_heads as u64;
        let scan = self.sequences as u64 * self.spec.value_heads as u64 * self.slabs() as u64;
        (prepare, scan)
    }

    pub(super) fn record_bytes(&self) -> usize {
        self.slots() * self.spec.value_heads * RECORD_BYTES
    }

    /// Checks the tensors and makes the kernels' arguments. Touches no device.
    pub(super) fn lower(
        &self,
        x: &PrefillTensors<'_>,
        cu_seqlens: *const i32,
        records: *mut c_void,
    ) -> Checked<Lowered> {
        let PrefillSpec {
            dtype,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.spec;
        let q_strides = check::tokens("q", &x.q, self.batch, key_heads, key_dim, &[dtype])?;
        let k_strides = check::tokens("k", &x.k, self.batch, key_heads, key_dim, &[dtype])?;
        let v_strides = check::tokens("v", &x.v, self.batch, value_heads, value_dim, &[dtype])?;
        let o_strides =
            check::output_tokens("o", &x.o.0, self.batch, value_heads, value_dim, &[dtype])?;

        let mut flags = 0;
        if self.spec.qk_l2norm {
            flags |= abi::DW_QK_L2NORM;
        }
        if self.spec.head_map == HeadMap::Tiled {
            flags |= abi::DW_TILED_HEADS;
        }
        let mut prepare = dw_prefill_prepare_args {
            q: x.q.0.address,
            k: x.k.0.address,
            o: x.o.0.0.address,
            cu_seqlens,
            records,
            q_strides,
            k_strides,
            o_strides,
            sequences: self.sequences as i32,
            tokens: self.batch.rows() as i32,
            key_heads: key_heads as i32,
            value_heads: value_heads as i32,
            key_dim: key_dim as i32,
            value_dim: value_dim as i32,
            ..Default::default()
        };
        flags |= self.lower_gating(&x.gating, &mut prepare)?;

        let mut scan = dw_prefill_scan_args {
            q: prepare.q,
            k: prepare.k,
            v: x.v.0.address,
            o: prepare.o,
            initial_state: ptr::null(),
            has_initial_state: ptr::null(),
            final_state: ptr::null_mut(),
            cu_seqlens,
            records,
            q_strides,
            k_strides,
            v_strides,
            o_strides,
            sequences: self.sequences as i32,
            key_heads: key_heads as i32,
            value_heads: value_heads as i32,
            key_dim: key_dim as i32,
            value_dim: value_dim as i32,
            scale: self.spec.scale(),
            slabs: self.slabs() as i32,
            tokens: self.batch.rows() as i32,
            items_count: self.sequences as i32,
            dies: self.dies as i32,
            ..Default::default()
        };
        if let Some(state) = &x.initial_state {
            scan.initial_strides = check::state(
                "initial_state",
                &state.tensor,
                self.state_shape(state.layout),
                false,
            )?;
            scan.initial_state = state.tensor.address;
            scan.initial_type = check::type_code(state.tensor.dtype);
            if state.layout == StateLayout::ValueMajor {
                flags |= abi::DW_INITIAL_VALUE_MAJOR;
            }
        }
        if let Some(has) = &x.has_initial_state {
            check::ensure(x.initial_state.is_some(), || {
                let allowed = "it is for batches with an initial_state";
                ArgumentError::new(
                    "has_initial_state",
                    ArgumentKind::Presence,
                    "given without an initial_state",
                    allowed,
                )
            })?;
            check::ensure(has.len == self.sequences, || {
                let allowed = format!("one byte for each of the {} sequences", self.sequences);
                ArgumentError::new(
                    "has_initial_state",
                    ArgumentKind::Shape,
                    format!("{} bytes", has.len),
                    allowed,
                )
            })?;
            check::region(
                "has_initial_state",
                has.address.cast(),
                has.len,
                self.sequences,
                1,
            )?;
            scan.has_initial_state = has.address;
        }
        if let Some(state) = &x.final_state {
            scan.final_strides = check::state(
                "final_state",
                &state.tensor.0,
                self.state_shape(state.layout),
                true,
            )?;
            scan.final_state = state.tensor.0.address;
            scan.final_type = check::type_code(state.tensor.0.dtype);
            if state.layout == StateLayout::ValueMajor {
                flags |= abi::DW_FINAL_VALUE_MAJOR;
            }
        }
        prepare.flags = flags;
        scan.flags = flags;
        let (prepare_groups, scan_groups) = self.grids();
        Ok(Lowered {
            prepare,
            prepare_groups: prepare_groups as u32,
            scan,
            scan_groups: scan_groups as u32,
        })
    }

    pub(super) fn lower_gating(
        &self,
        gating: &Gating<'_>,
        out: &mut dw_prefill_prepare_args,
    ) -> Checked<u32> {
        let heads = self.spec.value_heads;
        match gating {
            Gating::Given { g, beta } => {
                if let Some(g) = g {
                    out.g_strides = check::scalars("g", g, self.batch, heads, &[Dtype::F32])?;
                    out.g = g.0.address;
                }
                if let Some(beta) = beta {
                    out.beta_strides =
                        check::scalars("beta", beta, self.batch, heads, &[Dtype::F32])?;
                    out.beta = beta.0.address;
                }
                Ok(0)
            }
            Gating::Raw {
                a,
                b,
                a_log,
                dt_bias,
                allow_neg_eigval,
            } => {
                let any = [Dtype::F32, Dtype::Bf16, Dtype::F16];
                out.g_strides = check::scalars("a", a, self.batch, heads, &any)?;
                out.beta_strides = check::scalars("b", b, self.batch, heads, &any)?;
                out.a_log_stride = check::per_head("a_log", a_log, heads)?;
                out.g = a.0.address;
                out.beta = b.0.address;
                out.a_log = a_log.address;
                out.g_type = check::type_code(a.0.dtype);
                out.beta_type = check::type_code(b.0.dtype);
                out.a_log_type = check::type_code(a_log.dtype);
                if let Some(dt_bias) = dt_bias {
                    out.dt_bias_stride = check::per_head("dt_bias", dt_bias, heads)?;
                    out.dt_bias = dt_bias.address;
                    out.dt_bias_type = check::type_code(dt_bias.dtype);
                }
                let negative = if *allow_neg_eigval {
                    abi::DW_NEGATIVE_EIGENVALUES
                } else {
                    0
                };
                Ok(abi::DW_RAW_GATES | negative)
            }
        }
    }

    pub(super) fn state_shape(&self, layout: StateLayout) -> [usize; 4] {
        let PrefillSpec {
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.spec;
        match layout {
            StateLayout::KeyMajor => [self.sequences, value_heads, key_dim, value_dim],
            StateLayout::ValueMajor => [self.sequences, value_heads, value_dim, key_dim],
        }
    }

    /// Every tensor whose context is known must be of `context`.
    pub(super) fn check_devices(x: &PrefillTensors<'_>, context: &Context) -> Checked<()> {
        check::device("q", &x.q.0.owner, context)?;
        check::device("k", &x.k.0.owner, context)?;
        check::device("v", &x.v.0.owner, context)?;
        check::device("o", &x.o.0.0.owner, context)?;
        match &x.gating {
            Gating::Given { g, beta } => {
                for (name, t) in [("g", g), ("beta", beta)] {
                    t.as_ref()
                        .map_or(Ok(()), |t| check::device(name, &t.0.owner, context))?;
                }
            }
            Gating::Raw {
                a,
                b,
                a_log,
                dt_bias,
                ..
            } => {
                check::device("a", &a.0.owner, context)?;
                check::device("b", &b.0.owner, context)?;
                check::device("a_log", &a_log.owner, context)?;
                dt_bias
                    .as_ref()
                    .map_or(Ok(()), |t| check::device("dt_bias", &t.owner, context))?;
            }
        }
        x.initial_state.as_ref().map_or(Ok(()), |s| {
            check::device("initial_state", &s.tensor.owner, context)
        })?;
        x.has_initial_state.as_ref().map_or(Ok(()), |b| {
            check::device("has_initial_state", &b.owner, context)
        })?;
        x.final_state.as_ref().map_or(Ok(()), |s| {
            check::device("final_state", &s.tensor.0.owner, context)
        })
    }

    /// Enqueues prepare and scan, or one of them.
    ///
    /// # Safety
    /// `lowered` was made for memory that is alive.
    pub(super) unsafe fn enqueue(
        &self,
        context: &Context,
        stream: &Stream,
        kernels: (&str, &str),
        lowered: &Lowered,
        part: Part,
    ) -> Result<()> {
        // SAFETY: the caller answers for the memory; the arguments were checked when they were lowered.
        unsafe {
            if part != Part::Scan {
                context.launch(
                    stream,
                    kernels.0,
                    lowered.prepare_groups,
                    self.launch.prepare_threads,
                    &lowered.prepare,
                )?;
            }
            if part != Part::Prepare && lowered.scan_groups > 0 {
                context.launch(
                    stream,
                    kernels.1,
                    lowered.scan_groups,
                    self.launch.scan_threads,
                    &lowered.scan,
                )?;
            }
        }
        Ok(())
    }
}

/// Checks `cu_seqlens`: at least one entry, first 0, non-decreasing, last at most `tokens`.
pub(super) fn check_cu_seqlens<L: Copy + Into<i64>>(
    cu_seqlens: &[L],
    tokens: usize,
) -> Checked<Vec<i32>> {
    let refuse = |was: String, allowed: &str| {
        ArgumentError::new("cu_seqlens", ArgumentKind::Lengths, was, allowed)
    };
    let Some(&first) = cu_seqlens.first() else {
        return Err(refuse(
            "it is empty".to_owned(),
            "it must have one entry more than there are sequences",
        ));
    };
    let first: i64 = first.into();
    check::ensure(first == 0, || {
        refuse(format!("entry 0 is {first}"), "the first entry must be 0")
    })?;
    let mut before = 0;
    let mut out = Vec::with_capacity(cu_seqlens.len());
    for (i, &entry) in cu_seqlens.iter().enumerate() {
        let entry: i64 = entry.into();
        check::ensure(entry >= before, || {
            refuse(
                format!("entry {i} is {entry}, after {before}"),
                "entries must not decrease",
            )
        })?;
        check::ensure(usize::try_from(entry).is_ok_and(|e| e <= tokens), || {
            refuse(
                format!("entry {i} is {entry}"),
                &format!("entries must be at most the {tokens} tokens of the batch"),
            )
        })?;
        out.push(i32::try_from(entry).map_err(|_| {
            refuse(
                format!("entry {i} is {entry}"),
                "entries must be below 2^31",
            )
        })?);
        before = entry;
    }
    Ok(out)
}
