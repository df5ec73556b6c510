//! Prefill of sequences that several ranks share, in two stages around the caller's all-gather.

use std::ptr;

use super::lower::{self, Kernels, SentSummaries, Tables};
use super::parallel_backward::BackwardBlocks;
use super::plan::{self, Counts};
use super::ranks::{AGREEMENT_BYTES, Agreement};
use super::shape::Shape;
use super::states::PlanSlots;
use super::{Part, PrefillPath, PrefillSpec, PrefillTensors, RankLayout, Snapshot, snapshots};
use crate::abi::{DWK_ITEM_CONTINUES, DWK_ITEM_FOLLOWED, dwk_prefill_collect_args};
use crate::alias::Span;
use crate::batch::{CuSeqlens, PerSequence};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels;
use crate::model::Heads;
use crate::runtime::{Context, Stream};
use crate::tensor::{Batch, Buffer};
use crate::workspace::{WORKSPACE_ALIGN, Workspace, check_memory, check_workspace};

/// Plan of one rank's part of a prefill.
///
/// ```text
/// plan.summarise_launch(stream, tensors, summary, workspace)      summaries of this rank's blocks
/// all-gather of summary_bytes() from each rank, on the same stream  if summary_bytes() is not 0
/// plan.finish_launch(stream, tensors, gathered, order, workspace)  outputs, final states, snapshots
/// ```
///
/// The rank's batch is packed: its sequences are its fragments, in the order of [`RankLayout::fragments`]. States and slots
/// are per fragment. A fragment with the first token of a sequence reads its initial state, one with the last token writes
/// its final state; the others do neither. Slots of a pool must be the same for all fragments of a sequence, or all of them
/// negative (padding).
///
/// Outputs and states have the same bits for any number of ranks and any [`RankLayout`] with the same block, one rank
/// included. [`PrefillSpec::segments`] must be absent, since the block decides; the path is [`PrefillPath::Split`].
#[derive(Debug)]
pub struct ParallelPrefill {
    pub(super) context: Context,
    pub(super) shape: Shape,
    kernels: Kernels,
    slots: PlanSlots,
    cu_seqlens: Vec<i32>,
    counts: Counts,
    blocks: LocalBlocks,
    /// Blocks of the backward.
    pub(super) reversible: BackwardBlocks,
    rank: usize,
    ranks: usize,
    rank_slots: usize,
    agreement: Agreement,
    /// Items of scan, items of summarise, chains, `cu_seqlens`, order.
    tables: Buffer<i32>,
}

/// Blocks of a rank, and the summaries that it folds.
#[derive(Clone, Debug, Default)]
struct LocalBlocks {
    /// Sequence, first chunk, chunks and summary of each block, the longest first.
    walked: Vec<[i32; plan::ITEM_WORDS]>,
    /// Blocks that another follows, with their place among the summaries that this rank sends.
    sent: Vec<[i32; plan::ITEM_WORDS]>,
    /// First summary and number of summaries of each sequence that has more than one.
    chains: Vec<[i32; plan::CHAIN_WORDS]>,
    /// Slot of each summary among those of all ranks.
    order: Vec<i32>,
}

impl LocalBlocks {
    fn new(layout: &RankLayout, rank: usize) -> Self {
        let block = layout.block_chunks();
        let fragments = layout.fragments(rank);
        let mut out = LocalBlocks::default();
        // Summaries that each sequence needs: of all blocks up to the last that this rank needs the state after.
        let mut needed = std::collections::BTreeMap::<usize, usize>::new();
        let range = |f: &super::Fragment| {
            let end = (f.begin + f.tokens).div_ceil(layout.block_tokens());
            f.begin / layout.block_tokens()..end
        };
        for f in fragments {
            if layout.blocks(f.sequence) > 1 {
                let before_last = range(f).end.saturating_sub(1).max(1);
                let needed = needed.entry(f.sequence).or_default();
                *needed = before_last.max(*needed);
            }
        }
        let mut first_summary = std::collections::HashMap::new();
        for (&sequence, &count) in &needed {
            let first = out.order.len();
            first_summary.insert(sequence, first);
            out.order
                .extend((0..count).map(|b| layout.slot(sequence, b)));
            if count > 1 {
                out.chains.push([first as i32, count as i32]);
            }
        }
        for (n, f) in fragments.iter().enumerate() {
            let blocks = layout.blocks(f.sequence);
            let range = range(f);
            let all = f.tokens.div_ceil(super::CHUNK);
            let first = first_summary.get(&f.sequence).copied().unwrap_or(0);
            if range.is_empty() {
                out.walked.push([n as i32, 0, 0, 0]);
            }
            for b in range.clone() {
                let first_chunk = (b - range.start) * block;
                let chunks = block.min(all - first_chunk);
                let continues = b == range.start && b > 0;
                let followed = b + 1 == range.end && b + 1 < blocks;
                let marked =
                    |x: usize, mark: bool, bit: u32| (x as u32 | if mark { bit } else { 0 }) as i32;
                let item = |summary: usize| {
                    [
                        n as i32,
                        marked(first_chunk, continues, DWK_ITEM_CONTINUES),
                        marked(chunks, followed, DWK_ITEM_FOLLOWED),
                        summary as i32,
                    ]
                };
                out.walked.push(item(first + b));
                if b + 1 < blocks {
                    out.sent.push(item(out.sent.len()));
                }
            }
        }
        out.walked.sort_by_key(|item| -chunks_of(item));
        out
    }

    fn counts(&self) -> Counts {
        Counts {
            items: self.walked.len(),
            summaries: self.order.len(),
            pieces: 1,
            chains: self.chains.len() as u32,
            longest_chunks: self.walked.first().map_or(0, chunks_of) as u32,
            even: false,
            short: 0,
        }
    }

    fn table(&self, cu_seqlens: &[i32]) -> Vec<i32> {
        let mut words = self.walked.as_flattened().to_vec();
        words.extend(self.sent.as_flattened());
        words.extend(self.chains.as_flattened());
        words.extend(cu_seqlens);
        words.extend(&self.order);
        words
    }
}

fn chunks_of(item: &[i32; plan::ITEM_WORDS]) -> i32 {
    item[2] & !(DWK_ITEM_FOLLOWED as i32)
}

impl ParallelPrefill {
    /// Part of `rank` in a layout, in a batch of `tokens` rows; rows past the last fragment belong to no sequence.
    ///
    /// # Errors
    /// A rank that the layout does not have; fewer rows than the fragments' tokens; a spec that is not allowed, or that
    /// names segments or a path other than [`PrefillPath::Split`]; no memory for the tables.
    pub fn new(
        context: &Context,
        spec: PrefillSpec,
        layout: &RankLayout,
        rank: usize,
        tokens: usize,
    ) -> Result<Self> {
        check::ensure(rank < layout.ranks(), || {
            let allowed = format!("the layout has {} ranks", layout.ranks());
            ArgumentError::new("rank", ArgumentKind::Value, rank, allowed)
        })?;
        check::ensure(spec.segments.is_none(), || {
            let was = spec.segments.unwrap_or_default();
            let allowed = "it must be absent: the layout's block says how sequences are cut";
            ArgumentError::new("segments", ArgumentKind::Value, was, allowed)
        })?;
        (spec.save).refuse("it must be nothing: a prefill over ranks saves no context")?;
        let path = matches!(spec.path, PrefillPath::Auto | PrefillPath::Split);
        check::ensure(path, || {
            let was = spec.path.name();
            let allowed = "a prefill over ranks has the split path: it must be auto or split";
            ArgumentError::new("path", ArgumentKind::Value, was, allowed)
        })?;
        let fragments = layout.fragments(rank);
        let local: usize = fragments.iter().map(|f| f.tokens).sum();
        check::ensure(local <= tokens, || {
            let allowed = format!("at least {local}, the tokens of rank {rank}");
            ArgumentError::new("tokens", ArgumentKind::Shape, tokens, allowed)
        })?;
        let spec = PrefillSpec {
            path: PrefillPath::Split,
            ..spec
        };
        let shape = Shape::split(spec, Batch::Packed { tokens }, fragments.len(), context)?;
        let mut cu_seqlens = vec![0];
        for f in fragments {
            // Checked: the sum is at most `tokens`, of which there are fewer than 2^31.
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + f.tokens as i32);
        }
        let blocks = LocalBlocks::new(layout, rank);
        let counts = blocks.counts();
        shape.check_grids(counts)?;
        let collected = counts.summaries as u64 * spec.heads.value as u64;
        check::ensure(collected < 1 << 24, || {
            let was = format!("{} summaries", counts.summaries);
            let allowed = "a launch must have fewer than 2^32 threads: a larger block";
            ArgumentError::new("block", ArgumentKind::Shape, was, allowed)
        })?;
        Ok(ParallelPrefill {
            context: context.clone(),
            kernels: shape.spec.kernels(),
            shape,
            slots: PlanSlots::default(),
            tables: context.upload(&blocks.table(&cu_seqlens))?,
            cu_seqlens,
            counts,
            blocks,
            reversible: BackwardBlocks::new(layout, rank),
            rank,
            ranks: layout.ranks(),
            rank_slots: layout.rank_slots(),
            agreement: Agreement::new(layout, &spec),
        })
    }

    /// Bytes of the summaries of one rank: equal on all ranks. 0: there is nothing to gather, on any rank. Of a rank with
    /// fewer blocks than others, the rest of the bytes is sent as it is, and nobody reads it.
    pub fn summary_bytes(&self) -> usize {
        self.state_bytes(self.rank_slots) + self.flag_bytes()
    }

    /// Bytes of the summaries of all ranks, rank by rank.
    pub fn gathered_bytes(&self) -> usize {
        self.ranks * self.summary_bytes()
    }

    /// This rank, and the number of ranks.
    pub fn rank_of(&self) -> (usize, usize) {
        (self.rank, self.ranks)
    }

    /// Layout and spec of this rank as bytes, to be compared by all ranks once before the first launch: gather them from all
    /// ranks, and call [`ParallelPrefill::check_agreement`].
    pub fn agreement(&self) -> [u8; AGREEMENT_BYTES] {
        self.agreement.bytes()
    }

    /// Compares the [`ParallelPrefill::agreement`] of all ranks, rank by rank.
    ///
    /// # Errors
    /// [`Error::Ranks`](crate::Error::Ranks), which names what differs and the first such rank; not as many bytes as ranks need.
    pub fn check_agreement(&self, all: &[u8]) -> Result<()> {
        self.agreement.check(self.rank, all)
    }

    /// Bytes of workspace. Both stages need the same workspace, unchanged between them.
    pub fn workspace_bytes(&self) -> usize {
        self.shape.workspace(self.counts).bytes
    }

    /// First row of each fragment of the batch, then the end of the last.
    pub fn cu_seqlens(&self) -> &[i32] {
        &self.cu_seqlens
    }

    /// Slots of the summaries that this rank folds, sequence by sequence: slot s is summary s % n of rank s / n, where n is
    /// [`RankLayout::rank_slots`]. [`ParallelPrefill::finish_launch`] takes another order of as many.
    pub fn order(&self) -> &[i32] {
        &self.blocks.order
    }

    /// Sets the snapshots of all following launches, as [`Prefill::set_snapshots`](super::Prefill::set_snapshots):
    /// sequences are fragments, and tokens count from a fragment's begin.
    ///
    /// # Errors
    /// As [`Prefill::set_snapshots`](super::Prefill::set_snapshots).
    pub fn set_snapshots(&mut self, snapshots: &[Snapshot]) -> Result<()> {
        let table = snapshots::table(&self.cu_seqlens, self.chunk_entries(), snapshots)?;
        self.slots.snapshots = Some(self.context.upload(&table)?);
        self.slots.snapshot_slots = table.into_iter().filter(|&slot| slot >= 0).collect();
        Ok(())
    }

    /// Number of entries of [`Snapshots::slots`](super::Snapshots::slots).
    pub fn chunk_entries(&self) -> usize {
        self.shape.chunk_entries()
    }

    /// Names of the kernels of the first stage and of the second.
    pub fn kernels(&self) -> [Vec<&'static str>; 2] {
        let name = |part| self.kernels.name_of(part);
        let first = [
            name(Part::Prepare),
            name(Part::Summarise).filter(|_| !self.blocks.sent.is_empty()),
        ];
        let second = [
            Some(kernels::prefill_collect().name()).filter(|_| self.counts.summaries > 0),
            name(Part::Combine)
                .filter(|_| self.counts.chains > 0 && !self.shape.scan_chains(self.counts)),
            name(Part::Scan).filter(|_| self.counts.items > 0),
        ];
        [
            first.into_iter().flatten().collect(),
            second.into_iter().flatten().collect(),
        ]
    }

    fn state_bytes(&self, summaries: usize) -> usize {
        self.shape.summary_bytes(summaries)
    }

    fn flag_bytes(&self) -> usize {
        let bytes = self.rank_slots * self.shape.spec.heads.value * size_of::<i32>();
        bytes.next_multiple_of(WORKSPACE_ALIGN)
    }

    fn words_at(&self, offset: usize) -> *const i32 {
        let words: *const i32 = self.tables.address().cast_const().cast();
        words.wrapping_add(offset)
    }

    /// Offsets of the tables after the items of scan, in words: items of summarise, chains, `cu_seqlens`, order.
    fn offsets(&self) -> [usize; 4] {
        let sent = self.blocks.walked.len() * plan::ITEM_WORDS;
        let chains = sent + self.blocks.sent.len() * plan::ITEM_WORDS;
        let cu_seqlens = chains + self.blocks.chains.len() * plan::CHAIN_WORDS;
        [sent, chains, cu_seqlens, cu_seqlens + self.cu_seqlens.len()]
    }

    fn lower(
        &self,
        tensors: &PrefillTensors<'_>,
        workspace: &Workspace<'_>,
    ) -> Result<lower::LaunchArguments> {
        CuSeqlens::refuse(&tensors.cu_seqlens)?;
        Shape::check_devices(tensors, &self.context)?;
        let [_, chains, cu_seqlens, _] = self.offsets();
        let tables = Tables {
            cu_seqlens: self.words_at(cu_seqlens),
            items: self.words_at(0).cast(),
            chains: self.words_at(chains),
            short: ptr::null(),
            counts: self.counts,
        };
        let address = workspace.address();
        Ok(self.shape.lower(tensors, tables, &self.slots, address)?)
    }

    /// Enqueues the first stage: writes the summaries of this rank's blocks. Tensors and workspace must stay as they are
    /// until the second stage is complete. A rank without tokens launches, too, if it has rows to clear.
    ///
    /// # Errors
    /// As [`Prefill::launch`](super::Prefill::launch); a summary that is too small.
    pub fn summarise_launch(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        summary: Workspace<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        check::stream(stream, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        check_memory("summary", &summary, self.summary_bytes(), &self.context)?;
        let mut lowered = self.lower(tensors, &workspace)?;
        let states = summary.address();
        self.shape.send(
            &mut lowered,
            &SentSummaries {
                items: self.words_at(self.offsets()[0]).cast(),
                count: self.blocks.sent.len(),
                longest_chunks: self.counts.longest_chunks,
                states,
                forgotten: states.wrapping_byte_add(self.state_bytes(self.rank_slots)),
            },
        );
        let own = summary.span_of("summary");
        lower::check_overlaps(tensors, workspace.span(), own, [Span::NONE; 2])?;
        self.context.make_current()?;
        let _turn = stream.turn();
        self.enqueue(stream, &lowered, &[Part::Prepare, Part::Summarise])
    }

    /// Enqueues the second stage: states before this rank's blocks, then outputs, final states and snapshots. `gathered`:
    /// [`ParallelPrefill::summary_bytes`] of each rank, in the order of ranks; it is only read. `order`: replaces
    /// [`ParallelPrefill::order`].
    ///
    /// # Errors
    /// As [`Prefill::launch`](super::Prefill::launch); gathered summaries that are too small, an order of another length.
    pub fn finish_launch(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        gathered: Workspace<'_>,
        order: Option<PerSequence<'_, i32>>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        check::stream(stream, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        check_memory("gathered", &gathered, self.gathered_bytes(), &self.context)?;
        let lowered = self.lower(tensors, &workspace)?;
        let collect = self.collect(&gathered, order.as_ref(), &lowered)?;
        let inputs = [
            gathered.span_of("gathered"),
            Span::numbers("order", order.as_ref()),
        ];
        lower::check_overlaps(tensors, workspace.span(), Span::NONE, inputs)?;
        self.context.make_current()?;
        let _turn = stream.turn();
        if self.counts.summaries > 0 {
            let kernel = kernels::prefill_collect();
            let threads = self.context.target().threads(kernel.role());
            let groups = (self.counts.summaries * self.shape.spec.heads.value) as u32;
            // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
            unsafe { (self.context).launch(stream, kernel, groups, threads, &collect)? };
        }
        self.enqueue(stream, &lowered, &[Part::Combine, Part::Scan])
    }

    fn collect(
        &self,
        gathered: &Workspace<'_>,
        order: Option<&PerSequence<'_, i32>>,
        lowered: &lower::LaunchArguments,
    ) -> Checked<dwk_prefill_collect_args> {
        let order = match order {
            None => self.words_at(self.offsets()[3]),
            Some(order) => {
                check::device("order", order.owner(), &self.context)?;
                order.checked("order", self.blocks.order.len())?
            }
        };
        let Heads { value, .. } = self.shape.spec.heads;
        let (states, forgotten) = lowered.summaries();
        Ok(dwk_prefill_collect_args {
            gathered: gathered.address(),
            order,
            states,
            forgotten,
            rank_bytes: self.summary_bytes() as i64,
            ranks: self.ranks as i32,
            rank_slots: self.rank_slots as i32,
            value_heads: value as i32,
            words: (self.state_bytes(1) / value / size_of::<f32>()) as i32,
        })
    }

    fn enqueue(
        &self,
        stream: &Stream,
        lowered: &lower::LaunchArguments,
        parts: &[Part],
    ) -> Result<()> {
        for &part in parts {
            // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
            unsafe {
                (self.shape).enqueue(&self.context, stream, self.kernels, lowered, part)?;
            }
        }
        Ok(())
    }
}
