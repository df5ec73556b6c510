//! Backward of sequences that several ranks share, in two stages around the caller's all-gather.
//!
//! Blocks are the segments of `backward.rs`, in both directions. A rank sends N and M of its blocks, and N' with M transposed;
//! every rank folds both chains of its sequences. States are computed again, as on one GPU: nothing of the forward is kept.

use std::collections::{BTreeMap, HashMap};

use super::backward::{self, RoundPlan};
use super::plan::Partition;
use super::rounds::Round;
use super::{BackwardTensors, CHUNK, ParallelPrefill, PrefillBackward, RankLayout};
use crate::abi::{
    DWK_ITEM_CONTINUES, DWK_ITEM_FOLLOWED, dwk_prefill_backward_args, dwk_prefill_collect_args,
    dwk_prefill_item,
};
use crate::alias::Span;
use crate::batch::CuSeqlens;
use crate::check;
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels::{self, Kernel};
use crate::runtime::Stream;
use crate::tensor::Buffer;
use crate::workspace::{WORKSPACE_ALIGN, Workspace, check_memory, check_workspace};

/// Plan of the backward of one rank's part of a prefill.
///
/// ```text
/// plan.summarise_launch(stream, tensors, summary, workspace)      summaries of this rank's blocks, for both directions
/// all-gather of summary_bytes() from each rank, on the same stream  if summary_bytes() is not 0
/// plan.finish_launch(stream, tensors, gathered, workspace)         gradients
/// ```
///
/// Tensors have the rank's batch, as those of [`ParallelPrefill`]. States are per fragment: one with the first token of a
/// sequence reads its initial state and writes the gradient of it, one with the last token reads the gradient of its final
/// state; the others do neither.
///
/// Gradients have the same bits for any number of ranks and any [`RankLayout`] with the same block, one rank included. Those
/// of `A_log` and `dt_bias` are sums over the rank's tokens alone: the caller adds up those of all ranks.
#[derive(Debug)]
pub struct ParallelPrefillBackward {
    backward: PrefillBackward,
    rank: usize,
    ranks: usize,
    /// Summaries that each rank sends, of both directions.
    rank_slots: usize,
    /// Number of blocks that this rank summarises, and of summaries that it folds.
    sent: usize,
    folded: usize,
    /// Items of the blocks to summarise, then slots of the summaries to fold.
    tables: Buffer<i32>,
}

/// Blocks of a rank as the backward walks them, and the summaries that it folds.
#[derive(Clone, Debug, Default)]
pub(super) struct BackwardBlocks {
    /// Blocks to walk, the longest first; chains of sequences, in the direction of the forward.
    partition: Partition,
    /// Blocks of sequences that have others. Block i sends summary i, and in reverse summary `rank_slots - 1 - i`.
    sent: Vec<dwk_prefill_item>,
    /// Slot of each summary among those of all ranks: of the forward direction, then of the reverse one.
    order: Vec<u64>,
    /// Twice the most blocks of such sequences that a rank has.
    rank_slots: usize,
}

impl BackwardBlocks {
    pub(super) fn new(layout: &RankLayout, rank: usize) -> Self {
        let block = layout.block_tokens();
        let shared = |sequence: usize| layout.blocks(sequence) > 1;
        let mut places = HashMap::new();
        let mut most = 0;
        for of_rank in 0..layout.ranks() {
            let mut count = 0;
            for f in layout
                .fragments(of_rank)
                .iter()
                .filter(|f| shared(f.sequence))
            {
                for number in f.begin / block..(f.begin + f.tokens).div_ceil(block) {
                    places.insert((f.sequence, number), (of_rank as u64, count));
                    count += 1;
                }
            }
            most = count.max(most);
        }
        let mut out = BackwardBlocks {
            rank_slots: 2 * most as usize,
            ..Default::default()
        };
        let fragments = layout.fragments(rank);
        // First summary of each sequence that is shared.
        let mut first_of = BTreeMap::new();
        for f in fragments.iter().filter(|f| shared(f.sequence)) {
            first_of.insert(f.sequence, 0);
        }
        let slots = out.rank_slots as u64;
        let mut reverse = Vec::new();
        for (&sequence, first) in &mut first_of {
            let count = layout.blocks(sequence) - 1;
            *first = out.order.len();
            let forward = (0..count).map(|b| places[&(sequence, b)]);
            out.order.extend(forward.map(|(rank, i)| rank * slots + i));
            // Block b has summary 2 S - (first + b) of 2 S: the reverse of this list follows the other.
            let backward = (1..=count).map(|b| places[&(sequence, b)]);
            reverse.extend(backward.map(|(rank, i)| (rank + 1) * slots - 1 - i));
            if count > 1 {
                out.partition.chains.push([*first as i32, count as i32]);
            }
        }
        out.partition.summaries = out.order.len();
        out.order.extend(reverse.iter().rev());
        for (n, f) in fragments.iter().enumerate() {
            let blocks = layout.blocks(f.sequence);
            let first = first_of.get(&f.sequence).copied().unwrap_or_default();
            let chunks = f.tokens.div_ceil(CHUNK);
            // A sequence without tokens has no block, but a gradient of its initial state.
            for local in 0..f.tokens.div_ceil(block).max(1) {
                let number = f.begin / block + local;
                let first_chunk = local * layout.block_chunks();
                let count = layout.block_chunks().min(chunks - first_chunk);
                let ends = first_chunk + count == chunks;
                let mark =
                    |x: usize, mark: bool, bit: u32| (x as u32 | (u32::from(mark) * bit)) as i32;
                let item = dwk_prefill_item {
                    sequence: n as i32,
                    first_chunk: mark(first_chunk, local == 0 && number > 0, DWK_ITEM_CONTINUES),
                    chunks: mark(count, ends && number + 1 < blocks, DWK_ITEM_FOLLOWED),
                    summary: (first + number) as i32,
                };
                out.partition.items.push(item);
                if blocks > 1 {
                    out.sent.push(item);
                }
            }
        }
        let chunks_of = |item: &dwk_prefill_item| item.chunks & !(DWK_ITEM_FOLLOWED as i32);
        (out.partition.items).sort_by_key(|item| std::cmp::Reverse(chunks_of(item)));
        out
    }
}

impl ParallelPrefillBackward {
    /// The backward of `prefill`. It needs a workspace and summaries of its own sizes.
    ///
    /// # Errors
    /// More blocks or tokens than a launch may have; no memory for the tables.
    pub fn of(prefill: &ParallelPrefill) -> Result<Self> {
        let (context, shape) = (&prefill.context, prefill.shape);
        let (rank, ranks) = prefill.rank_of();
        let blocks = &prefill.reversible;
        let slots = blocks.rank_slots as u64 * ranks as u64;
        let groups = blocks.order.len() as u64 * shape.spec.heads.value as u64;
        let round = Round::whole(shape.sequences, shape.batch.rows());
        let cu_seqlens = prefill.cu_seqlens();
        let partition = &blocks.partition;
        let round = RoundPlan::of_partition(context, shape, round, partition, cu_seqlens)?;
        let summarised =
            blocks.sent.len() as u64 * shape.spec.heads.value as u64 * round.matrices();
        check::ensure(
            slots <= i32::MAX as u64 && groups < 1 << 24 && summarised < 1 << 23,
            || {
                let was = format!("{} summaries of {ranks} ranks", blocks.rank_slots);
                let allowed = "fewer blocks: a launch must have fewer than 2^32 threads";
                ArgumentError::new("block", ArgumentKind::Shape, was, allowed)
            },
        )?;
        let items = blocks.sent.iter();
        let mut words: Vec<i32> = items
            .flat_map(|i| [i.sequence, i.first_chunk, i.chunks, i.summary])
            .collect();
        words.extend(blocks.order.iter().map(|&slot| slot as i32));
        Ok(ParallelPrefillBackward {
            backward: PrefillBackward::of_rounds(context, shape, vec![round], 0)?,
            rank,
            ranks,
            rank_slots: blocks.rank_slots,
            sent: blocks.sent.len(),
            folded: blocks.order.len(),
            tables: context.upload(&words)?,
        })
    }

    /// Bytes of the summaries of one rank: equal on all ranks. 0: there is nothing to gather, on any rank. Of a rank with
    /// fewer blocks than others, the rest of the bytes is sent as it is, and nobody reads it.
    pub fn summary_bytes(&self) -> usize {
        let flags = self.rank_slots * self.backward.shape.spec.heads.value * size_of::<i32>();
        self.state_bytes() + flags.next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Bytes of the summaries of all ranks, rank by rank.
    pub fn gathered_bytes(&self) -> usize {
        self.ranks * self.summary_bytes()
    }

    /// This rank, and the number of ranks.
    pub fn rank_of(&self) -> (usize, usize) {
        (self.rank, self.ranks)
    }

    /// Bytes of workspace. Both stages need the same workspace, unchanged between them.
    pub fn workspace_bytes(&self) -> usize {
        self.backward.workspace_bytes()
    }

    /// Names of the kernels of the first stage and of the second. `raw_gates`: whether gates are
    /// [`Gating::Raw`](crate::gates::Gating::Raw).
    pub fn kernels(&self, raw_gates: bool) -> [Vec<&'static str>; 2] {
        let [prepare, summarise, walk, gradients, sums] = self.backward.kernels.map(Kernel::name);
        let round = &self.backward.rounds[0];
        let combine = round.counts.chains > 0;
        let collect = kernels::prefill_collect().name();
        let list = |names: &[(&'static str, bool)]| {
            let wanted = names.iter().filter(|(_, runs)| *runs);
            wanted.map(|(name, _)| *name).collect()
        };
        let items = round.counts.items > 0;
        [
            list(&[(prepare, round.grids()[0] > 0), (summarise, self.sent > 0)]),
            list(&[
                (collect, self.folded > 0),
                (self.backward.combine.name(), combine),
                (walk, items),
                (gradients, true),
                (sums, raw_gates),
            ]),
        ]
    }

    fn state_bytes(&self) -> usize {
        self.backward.shape.summary_bytes(self.rank_slots)
    }

    /// Enqueues the first stage: writes the summaries of this rank's blocks. Tensors and workspace must stay as they are
    /// until the second stage is complete. A rank without tokens launches, too.
    ///
    /// # Errors
    /// As [`PrefillBackward::launch`]; a summary that is too small.
    pub fn summarise_launch(
        &self,
        stream: &Stream,
        tensors: &BackwardTensors<'_>,
        summary: Workspace<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let plan = &self.backward;
        check::stream(stream, &plan.context)?;
        check_workspace(&workspace, plan.workspace_bytes(), &plan.context)?;
        check_memory("summary", &summary, self.summary_bytes(), &plan.context)?;
        let (_, x) = self.lowered(tensors, &workspace)?;
        let scratch = [workspace.span(), summary.span_of("summary")];
        backward::check_overlaps(tensors, scratch, Span::NONE)?;
        let states = summary.address();
        let sent = dwk_prefill_backward_args {
            items: self.tables.address().cast_const().cast(),
            boundaries: states.cast(),
            forgotten: states.wrapping_byte_add(self.state_bytes()).cast(),
            summaries: self.sent as i32,
            mirror: self.rank_slots as i32 - 1,
            blocks: 1,
            ..x
        };
        let round = &plan.rounds[0];
        let [prepare, summarise, ..] = plan.kernels;
        let groups = self.sent as u64 * plan.shape.spec.heads.value as u64 * round.matrices();
        plan.context.make_current()?;
        let _turn = stream.turn();
        plan.enqueue(stream, prepare, round.grids()[0], &x)?;
        plan.enqueue(stream, summarise, groups, &sent)
    }

    /// Enqueues the second stage: states before this rank's blocks and their gradients after them, then all gradients.
    /// `gathered`: [`ParallelPrefillBackward::summary_bytes`] of each rank, in the order of ranks; it is only read.
    ///
    /// # Errors
    /// As [`PrefillBackward::launch`]; gathered summaries that are too small.
    pub fn finish_launch(
        &self,
        stream: &Stream,
        tensors: &BackwardTensors<'_>,
        gathered: Workspace<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let plan = &self.backward;
        check::stream(stream, &plan.context)?;
        check_workspace(&workspace, plan.workspace_bytes(), &plan.context)?;
        check_memory("gathered", &gathered, self.gathered_bytes(), &plan.context)?;
        let (whole, x) = self.lowered(tensors, &workspace)?;
        let scratch = [workspace.span(), Span::NONE];
        backward::check_overlaps(tensors, scratch, gathered.span_of("gathered"))?;
        plan.context.make_current()?;
        let _turn = stream.turn();
        let value = plan.shape.spec.heads.value;
        if self.folded > 0 {
            let items: *const dwk_prefill_item = self.tables.address().cast_const().cast();
            let collect = dwk_prefill_collect_args {
                gathered: gathered.address(),
                order: items.wrapping_add(self.sent).cast(),
                states: x.boundaries,
                forgotten: x.forgotten,
                rank_bytes: self.summary_bytes() as i64,
                ranks: self.ranks as i32,
                rank_slots: self.rank_slots as i32,
                value_heads: value as i32,
                words: (plan.shape.summary_bytes(1) / value / size_of::<f32>()) as i32,
            };
            let kernel = kernels::prefill_collect();
            let threads = plan.context.target().threads(kernel.role());
            let groups = (self.folded * value) as u32;
            // SAFETY: the workspace has the summaries; callers vouch for what they gathered.
            unsafe { (plan.context).launch(stream, kernel, groups, threads, &collect)? };
        }
        let round = &plan.rounds[0];
        plan.launch_combine(stream, round, &x, round.tables(None).chains)?;
        let [_, _, _, gradients, _] = plan.kernels;
        let [_, _, _, chunks, _] = round.grids();
        plan.enqueue_walk(stream, round, &x)?;
        plan.enqueue(stream, gradients, chunks, &x)?;
        plan.enqueue_sums(stream, &whole, &plan.memory(workspace.address()))
    }

    /// Arguments of the whole batch, and those of the kernels that walk it.
    fn lowered(
        &self,
        tensors: &BackwardTensors<'_>,
        workspace: &Workspace<'_>,
    ) -> Result<(dwk_prefill_backward_args, dwk_prefill_backward_args)> {
        let plan = &self.backward;
        CuSeqlens::refuse(&tensors.cu_seqlens)?;
        backward::check_devices(tensors, &plan.context)?;
        let whole = plan.lower(tensors)?;
        let (round, memory) = (&plan.rounds[0], plan.memory(workspace.address()));
        let x = round.arguments(&whole, round.tables(None), &memory, std::ptr::null());
        Ok((whole, x))
    }
}
