//! Overlap check of a launch's arguments: compares every output with every input and every other output.
//!
//! Byte ranges are compared first. Views with overlapping ranges, such as q and k side by side in rows of one buffer,
//! are then compared exactly, dimension by dimension. A comparison of more than [`MOST_STEPS`] steps counts as an
//! overlap. Views with equal row and head strides need far fewer.

use crate::batch::{CuSeqlens, PerSequence};
use crate::check::Checked;
use crate::error::{ArgumentError, ArgumentKind};
use crate::tensor::{Element, Tensor};

/// Most pairs of positions that one comparison looks at.
const MOST_STEPS: u32 = 128;
/// Most dimensions of a view.
const MOST_DIMS: usize = 5;
/// Limit of addresses that are compared exactly, so that sums of a few of them fit in 64 bits.
const ADDRESS_LIMIT: usize = 1 << 61;

/// A view with elements that need not be adjacent.
trait Strided {
    /// Shape, strides in elements, and bytes per element.
    fn layout(&self) -> (&[usize], &[usize], usize);
}

impl<const R: usize> Strided for Tensor<'_, R> {
    fn layout(&self) -> (&[usize], &[usize], usize) {
        const { assert!(R <= MOST_DIMS) };
        (&self.shape, &self.strides, self.dtype.size())
    }
}

/// Memory of an argument, with its name. An argument that is absent or has no elements has no bytes and overlaps
/// nothing.
#[derive(Clone, Copy)]
pub(crate) struct Span<'a> {
    name: &'static str,
    begin: usize,
    end: usize,
    /// Absent: the argument owns all bytes of the range.
    view: Option<&'a dyn Strided>,
}

impl<'a> Span<'a> {
    /// A span without memory.
    pub(crate) const NONE: Self = Span {
        name: "",
        begin: 0,
        end: 0,
        view: None,
    };

    /// A tensor.
    #[inline]
    pub(crate) fn of<const R: usize>(name: &'static str, t: &'a Tensor<'_, R>) -> Self {
        let (begin, mut last, mut empty) = (t.address.addr(), 0usize, false);
        for (&n, &stride) in t.shape.iter().zip(&t.strides) {
            empty |= n == 0;
            last = last.saturating_add(n.wrapping_sub(1).saturating_mul(stride));
        }
        if empty || begin == 0 {
            return Span::NONE;
        }
        let bytes = last.saturating_add(1).saturating_mul(t.dtype.size());
        Span {
            name,
            begin,
            end: begin.saturating_add(bytes),
            view: Some(t),
        }
    }

    /// A tensor that may be absent.
    #[inline]
    pub(crate) fn maybe<const R: usize>(name: &'static str, t: Option<&'a Tensor<'_, R>>) -> Self {
        t.map_or(Span::NONE, |t| Span::of(name, t))
    }

    /// A range of `bytes` bytes at `address`.
    #[inline]
    pub(crate) fn bytes(name: &'static str, address: usize, bytes: usize) -> Self {
        if address == 0 || bytes == 0 {
            return Span::NONE;
        }
        Span {
            name,
            begin: address,
            end: address.saturating_add(bytes),
            view: None,
        }
    }

    /// Numbers per sequence, which may be absent.
    #[inline]
    pub(crate) fn numbers<T: Element>(
        name: &'static str,
        numbers: Option<&PerSequence<'_, T>>,
    ) -> Self {
        let (address, bytes) = numbers.map_or((0, 0), PerSequence::memory);
        Span::bytes(name, address, bytes)
    }

    /// Lengths, which may be absent.
    #[inline]
    pub(crate) fn lengths(cu_seqlens: Option<&CuSeqlens<'_>>) -> Self {
        let (address, bytes) = match cu_seqlens {
            None => (0, 0),
            Some(CuSeqlens::I32(x)) => x.memory(),
            Some(CuSeqlens::I64(x)) => x.memory(),
        };
        Span::bytes("cu_seqlens", address, bytes)
    }

    #[inline]
    fn ranges_meet(&self, other: &Span<'_>) -> bool {
        (self.begin < other.end) & (other.begin < self.end)
    }

    /// Positions of its bytes, relative to the first.
    fn places(&self) -> Places {
        let (shape, strides, size) =
            (self.view)
                .map(|view| view.layout())
                .unwrap_or((&[], &[], self.end - self.begin));
        Places::new(shape, strides, size)
    }

    /// Whether both have the same elements, in the same order.
    fn is_same(&self, other: &Span<'_>) -> bool {
        let ordered = |span: &Span<'_>| {
            let (shape, strides, size) = span.view?.layout();
            Some((Ordered::new(shape, strides), size))
        };
        self.begin == other.begin
            && matches!((ordered(self), ordered(other)), (Some(a), Some(b)) if a == b)
    }
}

/// Checks that no output shares a byte with an input or another output.
///
/// `same`: pairs (output, argument) that may be identical: the same elements in the same order. Partial overlap is
/// refused.
#[inline]
pub(crate) fn check<const OUTPUTS: usize, const INPUTS: usize>(
    outputs: &[Span<'_>; OUTPUTS],
    inputs: &[Span<'_>; INPUTS],
    same: &[(&'static str, &'static str)],
) -> Checked<()> {
    // Arrays of a known size and no branch in the loops: this runs in every launch.
    let mut meet = false;
    for (i, output) in outputs.iter().enumerate() {
        for other in &outputs[i + 1..] {
            meet |= output.ranges_meet(other);
        }
        for input in inputs {
            meet |= output.ranges_meet(input);
        }
    }
    if meet {
        return check_closely(outputs, inputs, same);
    }
    Ok(())
}

#[cold]
fn check_closely(
    outputs: &[Span<'_>],
    inputs: &[Span<'_>],
    same: &[(&'static str, &'static str)],
) -> Checked<()> {
    for (i, output) in outputs.iter().enumerate() {
        for other in outputs[i + 1..].iter().chain(inputs) {
            let may_be_same = || same.contains(&(output.name, other.name));
            if output.ranges_meet(other)
                && !(may_be_same() && output.is_same(other))
                && overlap(output, other)
            {
                return Err(refuse(output, other, may_be_same()));
            }
        }
    }
    Ok(())
}

fn refuse(output: &Span<'_>, other: &Span<'_>, may_be_same: bool) -> ArgumentError {
    let (begin, end) = (output.begin.max(other.begin), output.end.min(other.end));
    // The C library parses the other argument's name from between these words.
    let was = format!(
        "it overlaps {}, between addresses {begin:#x} and {end:#x}",
        other.name
    );
    let allowed = match may_be_same {
        true => {
            "an output must have memory of its own, or be all of that: the same address, shape, strides and type"
        }
        false => "an output must have memory of its own",
    };
    ArgumentError::new(output.name, ArgumentKind::Overlap, was, allowed)
}

/// Whether the two share a byte, or whether deciding it takes too many steps.
fn overlap(a: &Span<'_>, b: &Span<'_>) -> bool {
    if a.end.max(b.end) >= ADDRESS_LIMIT {
        return true;
    }
    let mut steps = MOST_STEPS;
    let ahead = b.begin as i64 - a.begin as i64;
    meet(&mut steps, &a.places(), &b.places(), ahead)
}

/// Runs of adjacent bytes, repeated along dimensions. A dimension is a number of repetitions and their distance in
/// bytes; the largest distance comes first.
#[derive(Clone, Copy)]
struct Places {
    dims: [(i64, i64); MOST_DIMS + 1],
    rank: usize,
    run: i64,
}

impl Places {
    fn new(shape: &[usize], strides: &[usize], size: usize) -> Self {
        let mut out = Places {
            dims: [(1, 0); MOST_DIMS + 1],
            rank: 0,
            run: size as i64,
        };
        // Where a dimension has more than one element, sizes and strides are below `ADDRESS_LIMIT`.
        for (&n, &stride) in shape.iter().zip(strides) {
            if n > 1 && stride > 0 {
                out.dims[out.rank] = (n as i64, (stride * size) as i64);
                out.rank += 1;
            }
        }
        out.dims[..out.rank].sort_unstable_by_key(|&(_, distance)| std::cmp::Reverse(distance));
        // Merges repetitions without gaps into one run.
        while let Some(&(n, distance)) = out.dims[..out.rank].last()
            && distance <= out.run
        {
            out.run += (n - 1) * distance;
            out.rank -= 1;
        }
        out
    }

    fn largest(&self) -> i64 {
        if self.rank == 0 { 0 } else { self.dims[0].1 }
    }

    /// Bytes from the first byte to past the last.
    fn extent(&self) -> i64 {
        let dims = self.dims[..self.rank].iter();
        self.run + dims.map(|(n, distance)| (n - 1) * distance).sum::<i64>()
    }

    /// Number of repetitions at `distance`, and the repeated positions. `distance` is at least all of its own
    /// distances.
    fn at(&self, distance: i64) -> (i64, Places) {
        let mut inner = *self;
        let (n, own) = self.dims[0];
        if self.rank == 0 || own == 0 {
            return (1, inner);
        }
        if own == distance {
            inner.dims.copy_within(1.., 0);
            inner.rank -= 1;
            return (n, inner);
        }
        // Rows of a batch may be numbered through, or per sequence.
        let per = distance / own;
        if distance % own == 0 && n > per && n % per == 0 {
            inner.dims[0].0 = per;
            return (n / per, inner);
        }
        (1, inner)
    }
}

/// Whether a and b share a byte; b begins `ahead` bytes after a.
fn meet(steps: &mut u32, a: &Places, b: &Places, ahead: i64) -> bool {
    let distance = a.largest().max(b.largest());
    if distance == 0 {
        return ahead < a.run && -ahead < b.run;
    }
    let ((a_count, a), (b_count, b)) = (a.at(distance), b.at(distance));
    // Repetition j of b lies `ahead + (j - i) distance` bytes after repetition i of a. Only `j - i` matters, and only a
    // few of its values can overlap.
    let first = (-ahead - b.extent()).div_euclid(distance) + 1;
    let end = -(ahead - a.extent()).div_euclid(distance);
    for apart in first.max(1 - a_count)..end.min(b_count) {
        if *steps == 0 {
            return true;
        }
        *steps -= 1;
        if meet(steps, &a, &b, ahead + apart * distance) {
            return true;
        }
    }
    false
}

/// Dimensions from the innermost outwards, merged where one continues the other.
#[derive(PartialEq, Eq)]
struct Ordered {
    dims: [(usize, usize); MOST_DIMS],
    rank: usize,
}

impl Ordered {
    fn new(shape: &[usize], strides: &[usize]) -> Self {
        let mut out = Ordered {
            dims: [(1, 0); MOST_DIMS],
            rank: 0,
        };
        for (&n, &stride) in shape.iter().zip(strides).rev() {
            if n == 1 {
                continue;
            }
            match out.dims[..out.rank].last_mut() {
                Some((before, of)) if before.checked_mul(*of) == Some(stride) => *before *= n,
                _ => {
                    out.dims[out.rank] = (n, stride);
                    out.rank += 1;
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::ptr::without_provenance;

    use proptest::prelude::*;

    use super::*;
    use crate::types::Dtype;

    fn tensor<const R: usize>(
        at: usize,
        dtype: Dtype,
        shape: [usize; R],
        strides: [usize; R],
    ) -> Tensor<'static, R> {
        // SAFETY: the address is never dereferenced.
        unsafe { Tensor::from_raw(without_provenance(at), dtype, shape, strides) }
    }

    /// Addresses of all bytes.
    fn bytes<const R: usize>(t: &Tensor<'_, R>) -> HashSet<usize> {
        let mut places = vec![t.address.addr()];
        for (&n, &stride) in t.shape.iter().zip(&t.strides) {
            let step = stride * t.dtype.size();
            places = (0..n)
                .flat_map(|i| places.iter().map(move |at| at + i * step))
                .collect();
        }
        let size = t.dtype.size();
        places.iter().flat_map(|at| *at..at + size).collect()
    }

    fn refused<const R: usize, const S: usize>(a: &Tensor<'_, R>, b: &Tensor<'_, S>) -> bool {
        check(&[Span::of("a", a)], &[Span::of("b", b)], &[]).is_err()
    }

    fn any_dtype() -> impl Strategy<Value = Dtype> {
        prop_oneof![Just(Dtype::Bf16), Just(Dtype::F32)]
    }

    fn any_view() -> impl Strategy<Value = Tensor<'static, 4>> {
        let dims = prop::array::uniform4((0usize..5, 0usize..40));
        (100usize..400, any_dtype(), dims).prop_map(|(at, dtype, dims)| {
            let strides = dims.map(|(_, stride)| stride);
            tensor(at, dtype, dims.map(|(n, _)| n), strides)
        })
    }

    /// Column ranges of rows with one row distance and one head distance, in bytes.
    fn any_columns(row: usize, head: usize) -> impl Strategy<Value = Tensor<'static, 3>> {
        (any_dtype(), 1usize..6, 1usize..4, 0usize..100, 0usize..3).prop_flat_map(
            move |(dtype, rows, heads, percent, of_row)| {
                let size = dtype.size();
                let first = percent * head / 100 / size * size;
                let most = (head - first) / size;
                (1..=most.max(1)).prop_map(move |columns| {
                    let at = 1 << 12 | (of_row * row + first);
                    let strides = [row / size, head / size, 1];
                    tensor(at, dtype, [rows, heads, columns], strides)
                })
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// No overlap is missed, and views that are far apart are accepted.
        #[test]
        fn any_two_views(a in any_view(), b in any_view()) {
            let apart = bytes(&a).is_disjoint(&bytes(&b));
            prop_assert!(apart || refused(&a, &b));
            let ranges = Span::of("a", &a).ranges_meet(&Span::of("b", &b));
            prop_assert!(ranges || !refused(&a, &b));
        }

        /// Views that share rows are compared exactly.
        #[test]
        fn views_of_one_row(a in any_columns(160, 40), b in any_columns(160, 40)) {
            prop_assert_eq!(bytes(&a).is_disjoint(&bytes(&b)), !refused(&a, &b));
        }
    }

    #[test]
    fn sequences_are_rows_too() {
        // [B, T, H, D] beside [B T, H, D], in rows of 64 elements.
        let dense = tensor(4096, Dtype::Bf16, [8, 4, 2, 16], [256, 64, 16, 1]);
        let packed = |column: usize| {
            let at = 4096 + 2 * column;
            tensor(at, Dtype::Bf16, [32, 2, 16], [64, 16, 1])
        };
        assert!(!refused(&dense, &packed(32)));
        assert!(refused(&dense, &packed(31)));
        // Slots of two pools in one page, of different types.
        let conv = tensor(4096, Dtype::Bf16, [9, 3, 64], [2048, 64, 1]);
        let pool = |at: usize| tensor(4096 + at, Dtype::F32, [9, 2, 16, 16], [1024, 256, 16, 1]);
        assert!(!refused(&conv, &pool(384)));
        assert!(refused(&conv, &pool(380)));
    }

    #[test]
    fn the_same_view_is_told_from_others() {
        let v = tensor(4096, Dtype::Bf16, [6, 2, 16], [64, 16, 1]);
        let same = |o: Span<'_>| check(&[o], &[Span::of("v", &v)], &[("o", "v")]).is_ok();
        let bf16 = Dtype::Bf16;
        let rows = |at, dtype, shape, strides| {
            let o: Tensor<'_, 3> = tensor(at, dtype, shape, strides);
            same(Span::of("o", &o))
        };
        assert!(rows(4096, bf16, [6, 2, 16], [64, 16, 1]));
        // The same memory, described by another shape.
        let dense = tensor(4096, bf16, [2, 3, 2, 16], [192, 64, 16, 1]);
        assert!(same(Span::of("o", &dense)));
        assert!(rows(4096, bf16, [6, 1, 32], [64, 7, 1]));
        assert!(!rows(4096, bf16, [5, 2, 16], [64, 16, 1]));
        assert!(!rows(4096, bf16, [2, 6, 16], [16, 64, 1]));
        assert!(!rows(4098, bf16, [6, 2, 16], [64, 16, 1]));
        assert!(!rows(4096, Dtype::F32, [6, 2, 16], [64, 16, 1]));
    }

    #[test]
    fn nothing_overflows_and_nothing_meets_what_is_not_there() {
        let huge = tensor(4096, Dtype::F32, [1 << 40, 1 << 40], [1 << 39, 1 << 39]);
        let small = tensor(1 << 20, Dtype::F32, [4], [1]);
        assert!(refused(&huge, &small));
        assert!(refused(
            &tensor(4096, Dtype::F32, [2], [usize::MAX]),
            &small
        ));
        assert!(!refused(
            &tensor(1 << 20, Dtype::F32, [4, 0], [1, 1]),
            &small
        ));
        assert!(!refused(&tensor(0, Dtype::F32, [1 << 30], [1]), &small));
        let none = Span::bytes("none", 1 << 20, 0);
        assert!(check(&[none], &[Span::of("b", &small)], &[]).is_ok());
        // Too many steps for an exact comparison.
        let fine = tensor(1 << 20, Dtype::Bf16, [1000, 1000], [5000, 3]);
        let coarse = tensor((1 << 20) + 2, Dtype::Bf16, [1000, 1000], [3, 5003]);
        assert!(refused(&fine, &coarse));
    }

    #[test]
    fn the_error_names_both() {
        let (o, q) = (
            tensor(4096, Dtype::Bf16, [8], [1]),
            tensor(4100, Dtype::Bf16, [8], [1]),
        );
        let outcome = check(&[Span::of("o", &o)], &[Span::of("q", &q)], &[("o", "q")]);
        let error = outcome.unwrap_err();
        assert_eq!(
            (error.argument.as_str(), error.kind),
            ("o", ArgumentKind::Overlap)
        );
        assert_eq!(
            error.to_string(),
            "o: it overlaps q, between addresses 0x1004 and 0x1010; an output must have memory of its own, or be all of \
             that: the same address, shape, strides and type"
        );
    }
}
