//! Chunked Gated DeltaNet prefill.
//!
//! Per value head, with a state `S` of shape `[K, V]`, token after token:
//!
//! ```text
//! S   <- exp(g_t) S
//! d_t  = beta_t (v_t - S^T k_t)
//! S   <- S + k_t d_t^T
//! o_t  = scale S^T q_t
//! ```
//!
//! computed in chunks of 64 tokens by two kernels, `prefill_prepare` and `prefill_scan`, and two more where sequences are
//! cut into segments, `prefill_summarise` and `prefill_combine`. A [`Prefill`] is made once for a batch shape whose
//! lengths the host knows; a [`DevicePrefill`] for one whose lengths are on the device alone.
//! Launching allocates nothing, waits for nothing and reads nothing back, so that it can be captured into a graph.

mod device;
mod divide;
mod lengths;
mod lower;
mod plan;
mod snapshots;
mod states;
mod workspace;

pub use device::DevicePrefill;
pub(crate) use lengths::{DeviceLengths, Lowered as LoweredLengths};
pub(crate) use lower::Lowered;
use lower::{Counts, Kernels, Shape, Tables};
pub use snapshots::{Snapshot, Snapshots};
pub(crate) use states::HostSlots;
use states::PlanSlots;
pub use states::{State, StateMut, StatePool};
pub(crate) use workspace::check_workspace;
pub use workspace::{WORKSPACE_ALIGN, Workspace};

use crate::abi;
use crate::check::{self, Batch, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::launch::KEY_BUCKETS;
use crate::runtime::{Context, Stream};
use crate::sequences::{PerSequence, checked_cu_seqlens};
use crate::tensor::{Buffer, Tensor, TokenScalars, Tokens, TokensMut};
use crate::types::{Dtype, HeadMap};

/// Tokens of a chunk.
pub const CHUNK: usize = abi::DW_CHUNK as usize;
/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 256;

/// What a prefill computes, whatever the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillSpec {
    /// Element type of q, k, v and o: [`Dtype::Bf16`] or [`Dtype::F16`].
    pub dtype: Dtype,
    /// `HK`, at least 1.
    pub key_heads: usize,
    /// `HV`, a multiple of `HK`.
    pub value_heads: usize,
    /// `K`, a multiple of 16 up to 256.
    pub key_dim: usize,
    /// `V`, a multiple of 16 up to 256.
    pub value_dim: usize,
    /// Which key head a value head reads.
    pub head_map: HeadMap,
    /// Whether rows of q and k are l2-normalised inside: `x / sqrt(sum(x^2) + 1e-6)`, in f32 and never rounded.
    pub qk_l2norm: bool,
    /// Factor of the output; absent is `K^-0.5`.
    pub scale: Option<f32>,
    /// Segments of the longest sequence of a [`Prefill`], each of the same number of chunks; longer ones than that are cut
    /// too, shorter ones stay whole. 1: no sequence is cut. More than the sequence has chunks are as many as it has.
    /// Absent: as many as take least time by the planner's estimate, and one unless that saves 15%.
    /// [`SEGMENTS_VARIABLE`] decides it from outside.
    pub segments: Option<usize>,
    /// Compute units that the launches will have, where these are not all of the device.
    pub compute_units: Option<u32>,
}

/// The environment variable that is used instead of [`PrefillSpec::segments`] where it is set: `1` switches segments
/// off.
pub const SEGMENTS_VARIABLE: &str = "DELTAWAVE_SEGMENTS";

impl PrefillSpec {
    /// bf16, grouped heads, no norm inside, the default scale.
    pub fn new(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        PrefillSpec {
            dtype: Dtype::Bf16,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            head_map: HeadMap::Grouped,
            qk_l2norm: false,
            scale: None,
            segments: None,
            compute_units: None,
        }
    }

    pub(crate) fn validate(&self) -> Checked<()> {
        let dim = |name: &str, n: usize| {
            check::ensure(n > 0 && n.is_multiple_of(16) && n <= MAX_HEAD_DIM, || {
                ArgumentError::new(
                    name,
                    ArgumentKind::Shape,
                    n,
                    format!("it must be a multiple of 16 from 16 to {MAX_HEAD_DIM}"),
                )
            })
        };
        check::dtype("dtype", self.dtype, &[Dtype::Bf16, Dtype::F16])?;
        dim("key_dim", self.key_dim)?;
        dim("value_dim", self.value_dim)?;
        check::ensure(self.key_heads > 0, || {
            ArgumentError::new(
                "key_heads",
                ArgumentKind::Shape,
                self.key_heads,
                "it must be at least 1",
            )
        })?;
        check::ensure(
            self.value_heads > 0
                && self.value_heads.is_multiple_of(self.key_heads)
                && self.value_heads < 1 << 20,
            || {
                let allowed = format!(
                    "it must be a multiple of the {} key heads, at least 1 and below 2^20",
                    self.key_heads
                );
                ArgumentError::new(
                    "value_heads",
                    ArgumentKind::Shape,
                    self.value_heads,
                    allowed,
                )
            },
        )?;
        let positive = |name: &str, n: Option<usize>| {
            check::ensure(n != Some(0), || {
                ArgumentError::new(name, ArgumentKind::Value, 0, "it must be at least 1")
            })
        };
        positive("segments", self.segments)?;
        positive("compute_units", self.compute_units.map(|n| n as usize))?;
        check::ensure(self.scale.is_none_or(f32::is_finite), || {
            ArgumentError::new(
                "scale",
                ArgumentKind::Value,
                self.scale.unwrap_or_default(),
                "it must be finite",
            )
        })
    }

    pub(crate) fn scale(&self) -> f32 {
        self.scale
            .unwrap_or_else(|| (self.key_dim as f32).powf(-0.5))
    }

    /// The smallest key bucket that holds the key dimension.
    fn key_bucket(&self) -> usize {
        let fits = KEY_BUCKETS.into_iter().find(|&b| self.key_dim <= b);
        fits.unwrap_or(KEY_BUCKETS[KEY_BUCKETS.len() - 1])
    }

    fn dtype_name(&self) -> &'static str {
        if self.dtype == Dtype::Bf16 {
            "bf16"
        } else {
            "f16"
        }
    }

    fn kernels(&self) -> Kernels {
        let find = |wanted: String| {
            let all = crate::runtime::KERNELS
                .iter()
                .flat_map(|(_, kernels)| kernels.iter());
            all.copied()
                .find(|k| *k == wanted)
                .expect("every bucket has its kernels")
        };
        let (dtype, bucket) = (self.dtype_name(), self.key_bucket());
        Kernels {
            prepare: find(format!("dw_prefill_prepare_{dtype}")),
            summarise: find(format!("dw_prefill_summarise_{dtype}_k{bucket}")),
            combine: find(format!("dw_prefill_combine_k{bucket}")),
            scan: find(format!("dw_prefill_scan_{dtype}_k{bucket}")),
        }
    }
}

/// The gates of a prefill.
#[derive(Clone, Debug)]
pub enum Gating<'a> {
    /// g and beta themselves.
    Given {
        /// `[T, HV]`, f32, natural logarithms, at most 0; absent: no decay.
        g: Option<TokenScalars<'a>>,
        /// `[T, HV]`, f32; absent: 1.
        beta: Option<TokenScalars<'a>>,
    },
    /// What the projections give; g and beta are computed inside.
    Raw {
        /// `[T, HV]`, f32, bf16 or fp16.
        a: TokenScalars<'a>,
        /// `[T, HV]`, f32, bf16 or fp16.
        b: TokenScalars<'a>,
        /// `[HV]`, f32, bf16 or fp16.
        a_log: Tensor<'a, 1>,
        /// `[HV]`; absent: 0.
        dt_bias: Option<Tensor<'a, 1>>,
        /// Whether beta is `2 sigmoid(b)`. Beta of 1.5 to 2 on repeated keys without decay is ill-conditioned: in bf16,
        /// outputs and states then have errors of 20% to 80% of their rms and more, here and in unfused kernels
        /// (`docs/results/accuracy.md`).
        allow_neg_eigval: bool,
    },
}

/// The tensors of one prefill. Packed batches have `[T, H, D]`, dense ones `[B, T, H, D]`.
#[derive(Debug)]
pub struct PrefillTensors<'a> {
    /// `[T, HK, K]`.
    pub q: Tokens<'a>,
    /// `[T, HK, K]`.
    pub k: Tokens<'a>,
    /// `[T, HV, V]`.
    pub v: Tokens<'a>,
    /// Gates.
    pub gating: Gating<'a>,
    /// The states that sequences start from; absent: zeros.
    pub initial_state: Option<State<'a>>,
    /// One byte per sequence, 0: it starts from zeros whatever `initial_state` or `pool` holds; absent: all have a state.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
    /// `[T, HV, V]`. Rows past the last sequence become zeros.
    pub o: TokensMut<'a>,
    /// The states after the last token; absent: not wanted. For an empty sequence the initial one. It may be the memory
    /// of `initial_state`, where both have the same type, layout and strides.
    pub final_state: Option<StateMut<'a>>,
    /// States that are updated in place, instead of `initial_state` and `final_state`.
    pub pool: Option<StatePool<'a>>,
    /// States in the course of sequences that are wanted, too.
    pub snapshots: Option<Snapshots<'a>>,
}

/// What of a prefill is launched. The parts are for measuring: each takes what the workspace holds, which must be what the
/// parts before it left there. A part that the plan does not have does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// `prefill_prepare`.
    Prepare,
    /// `prefill_summarise`.
    Summarise,
    /// `prefill_combine`. Not to be repeated without a [`Part::Summarise`] before it.
    Combine,
    /// `prefill_scan`.
    Scan,
}

impl Part {
    /// The stem of its kernel's source, or `prefill`.
    pub fn name(self) -> &'static str {
        match self {
            Part::Whole => "prefill",
            Part::Prepare => "prefill_prepare",
            Part::Summarise => "prefill_summarise",
            Part::Combine => "prefill_combine",
            Part::Scan => "prefill_scan",
        }
    }
}

/// A prefill of batches whose lengths the host knows: validated and uploaded once, launched any number of times.
#[derive(Debug)]
pub struct Prefill {
    context: Context,
    shape: Shape,
    kernels: Kernels,
    counts: Counts,
    /// Items, chains, and `cu_seqlens`.
    tables: Buffer<i32>,
    cu_seqlens: Vec<i32>,
    slots: PlanSlots,
}

impl Prefill {
    /// A packed batch of `tokens` rows; sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`. Rows past the last
    /// sequence belong to none.
    ///
    /// # Errors
    /// A spec, lengths or [`SEGMENTS_VARIABLE`] that are not allowed; no memory for the lengths.
    pub fn packed<L: Copy + Into<i64>>(
        context: &Context,
        spec: PrefillSpec,
        cu_seqlens: &[L],
        tokens: usize,
    ) -> Result<Self> {
        let sequences = cu_seqlens.len().saturating_sub(1);
        let shape = Shape::new(spec, Batch::Packed { tokens }, sequences, context)?;
        let checked = checked_cu_seqlens(cu_seqlens, tokens)?;
        Self::with_shape(context, shape, checked)
    }

    /// A dense batch: `batch` sequences of `tokens` rows each, tensors `[B, T, ...]`.
    ///
    /// # Errors
    /// A spec or [`SEGMENTS_VARIABLE`] that is not allowed; no memory for the lengths.
    pub fn dense(
        context: &Context,
        spec: PrefillSpec,
        batch: usize,
        tokens: usize,
    ) -> Result<Self> {
        let shape = Shape::new(spec, Batch::Dense { batch, tokens }, batch, context)?;
        let cu_seqlens: Vec<i32> = (0..=batch).map(|n| (n * tokens) as i32).collect();
        Self::with_shape(context, shape, cu_seqlens)
    }

    fn with_shape(context: &Context, shape: Shape, cu_seqlens: Vec<i32>) -> Result<Self> {
        let partition = shape.partition(&cu_seqlens)?;
        let counts = partition.counts();
        let tables = context.upload(&partition.table(&cu_seqlens))?;
        Ok(Prefill {
            context: context.clone(),
            shape,
            kernels: shape.spec.kernels(),
            counts,
            tables,
            cu_seqlens,
            slots: PlanSlots::default(),
        })
    }

    /// The slots of a pool that the sequences have: what [`StatePool::slots`] and [`StatePool::write_slots`] say for a
    /// launch, for all that follow, checked and uploaded once. Launches refuse those beyond their pool. Not for plans that
    /// a captured graph needs.
    ///
    /// # Errors
    /// Not as many slots as sequences; a slot that two sequences write, or that one reads and another writes, where it is
    /// not negative. No memory for the slots.
    pub fn set_slots(&mut self, slots: &[i32], write_slots: Option<&[i32]>) -> Result<()> {
        let sequences = self.shape.sequences;
        self.slots.pool = Some(HostSlots::new(
            &self.context,
            sequences,
            slots,
            write_slots,
        )?);
        let both = slots.iter().chain(write_slots.unwrap_or_default());
        self.slots.of_sequences = both.copied().collect();
        Ok(())
    }

    /// The states in the course of sequences that launches write: what [`Snapshots::slots`] says for a launch, for all that
    /// follow, checked and uploaded once. Not for plans that a captured graph needs.
    ///
    /// # Errors
    /// A sequence that there is not; tokens that are not whole chunks of it; a slot, or a state, twice. No memory.
    pub fn set_snapshots(&mut self, snapshots: &[Snapshot]) -> Result<()> {
        let table = snapshots::table(&self.cu_seqlens, self.chunk_entries(), snapshots)?;
        self.slots.snapshots = Some(self.context.upload(&table)?);
        self.slots.of_snapshots = table.into_iter().filter(|&slot| slot >= 0).collect();
        Ok(())
    }

    /// The snapshots after every so many tokens, a multiple of [`CHUNK`], sequence by sequence, in the slots 0, 1, 2, ...
    ///
    /// # Errors
    /// Another number of tokens.
    pub fn snapshots_every(&self, tokens: usize) -> Result<Vec<Snapshot>> {
        Ok(snapshots::every(&self.cu_seqlens, tokens)?)
    }

    /// How many entries [`Snapshots::slots`] has.
    pub fn chunk_entries(&self) -> usize {
        self.shape.slots()
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.shape.workspace(self.counts).bytes
    }

    /// Segments in all: as many as there are sequences, unless some are cut.
    pub fn segments(&self) -> usize {
        self.counts.items
    }

    /// The whole launch, then each kernel of it.
    pub fn parts(&self) -> Vec<Part> {
        let mut parts = vec![Part::Whole, Part::Prepare, Part::Scan];
        if self.counts.summaries > 0 {
            parts.insert(2, Part::Summarise);
        }
        if self.counts.chains > 0 {
            parts.insert(3, Part::Combine);
        }
        parts
    }

    /// Names of the kernels that a launch runs, in order: two, or up to four where sequences are cut.
    pub fn kernels(&self) -> Vec<&'static str> {
        let parts = self.parts().into_iter();
        parts.filter_map(|part| self.kernels.of(part)).collect()
    }

    fn tables(&self) -> Tables {
        let items: *const i32 = self.tables.address().cast_const().cast();
        let chains = items.wrapping_add(self.counts.items * plan::ITEM_WORDS);
        Tables {
            cu_seqlens: chains.wrapping_add(self.counts.chains as usize * plan::CHAIN_WORDS),
            items: items.cast(),
            chains,
            counts: self.counts,
        }
    }

    /// Enqueues the prefill: the kernels that [`Prefill::kernels`] names, nothing else.
    ///
    /// # Errors
    /// A tensor of another shape, type or context, strides that are not allowed, a workspace that is too small: then
    /// nothing was enqueued. A launch that the runtime refuses.
    pub fn launch(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        self.launch_part(stream, tensors, workspace, Part::Whole)
    }

    /// [`Prefill::launch`] of a part.
    ///
    /// # Errors
    /// As [`Prefill::launch`].
    pub fn launch_part(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
        part: Part,
    ) -> Result<()> {
        let lowered = self.lower(stream, tensors, workspace)?;
        self.context.make_current()?;
        self.enqueue(stream, &lowered, part)
    }

    /// All checks of [`Prefill::launch`].
    pub(crate) fn lower(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<Lowered> {
        check::stream(stream, &self.context)?;
        Shape::check_devices(tensors, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        let tables = self.tables();
        Ok((self.shape).lower(tensors, tables, &self.slots, workspace.address)?)
    }

    /// The rest of it, on the current device.
    pub(crate) fn enqueue(&self, stream: &Stream, lowered: &Lowered, part: Part) -> Result<()> {
        // SAFETY: views of buffers borrow them; the makers of raw views answered for theirs.
        unsafe {
            self.shape
                .enqueue(&self.context, stream, self.kernels, lowered, part)
        }
    }
}
