"""Compares kernels that were written for this test and compiled by Triton with NumPy."""

import sys

import numpy as np
import triton
import triton.language as tl

from simulator import Buffer, poisoned
from triton_launch import run

RANDOM = np.random.default_rng(7)


@triton.jit
def softmax_kernel(y, x, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    v = tl.exp(v - tl.max(v, axis=0))
    tl.store(y + row * columns + at, v / tl.sum(v, axis=0), mask=at < columns)


@triton.jit
def layer_norm_kernel(y, x, weight, bias, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v, axis=0) / columns
    d = tl.where(inside, v - mean, 0.0)
    scale = tl.rsqrt(tl.sum(d * d, axis=0) / columns + eps)
    w = tl.load(weight + at, mask=inside, other=0.0)
    b = tl.load(bias + at, mask=inside, other=0.0)
    tl.store(y + row * columns + at, (d * scale * w + b).to(y.dtype.element_ty), mask=inside)


@triton.jit
def matmul_kernel(c, a, b, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        left = tl.load(a + m[:, None] * K + (start + k)[None, :], mask=(m < M)[:, None] & inside[None, :], other=0.0)
        right = tl.load(b + (start + k)[:, None] * N + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(c + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def reduce_kernel(total, least, most, where, x, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, mask=at < n, other=0.0)
    tl.store(total + row, tl.sum(v, axis=0))
    tl.store(least + row, tl.min(tl.where(at < n, v, float("inf")), axis=0))
    high = tl.where(at < n, v, -float("inf"))
    tl.store(most + row, tl.max(high, axis=0))
    tl.store(where + row, tl.argmax(high, axis=0))


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def scan_kernel(sums, products, x, y, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(sums + at, tl.associative_scan(tl.load(x + at), 0, add))
    tl.store(products + at, tl.cumprod(tl.load(y + at), axis=1))


@triton.jit
def sort_kernel(y, x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.sort(tl.load(x + at)))


@triton.jit
def atomics_kernel(counts, sums, most, least, bits, swaps, x, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0)
    bin = v % BINS
    tl.atomic_add(counts + bin, 1, mask=inside)
    tl.atomic_add(sums + bin, v.to(tl.float32), mask=inside)
    tl.atomic_max(most + bin, v, mask=inside)
    tl.atomic_min(least + bin, v, mask=inside)
    tl.atomic_or(bits + bin, (1 << (v % 31)), mask=inside)
    # A lock-free running maximum.
    tl.atomic_cas(swaps + at, v, v + 1)


@triton.jit
def half_atomics_kernel(half, x, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0)
    tl.atomic_add(half + v % BINS, (v % 2).to(half.dtype.element_ty), mask=inside)


@triton.jit
def wide_kernel(quotient, remainder, high, roots, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0)
    b = tl.load(y + at, mask=inside, other=1)
    tl.store(quotient + at, a // b, mask=inside)
    tl.store(remainder + at, a % b, mask=inside)
    tl.store(high + at, tl.umulhi(a.to(tl.uint32), b.to(tl.uint32)).to(tl.int32), mask=inside)
    tl.store(roots + at, tl.sqrt(tl.abs(a).to(tl.float64)) + 1.0 / b.to(tl.float64), mask=inside)


def close(name, found, expected, ratio):
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(np.square(expected)))
    assert np.isfinite(found).all() and error <= ratio, f"{name}: relative error {error:.2e}, at most {ratio:.0e}"
    print(f"  {name:<32} relative error {error:.1e}")


def equal(name, found, expected):
    assert np.array_equal(found, expected), f"{name}: {np.argwhere(found != expected)[:4].tolist()} differ"
    print(f"  {name:<32} equal")


def softmax():
    for rows, columns, warps in ((5, 1000, 4), (3, 64, 1), (2, 4096, 8)):
        x = RANDOM.normal(size=(rows, columns)).astype(np.float32) * 4
        y = poisoned(x.shape, "fp32")
        run(softmax_kernel, (rows,), y=y, x=Buffer(x, "fp32"), columns=columns,
            BLOCK=triton.next_power_of_2(columns), num_warps=warps)
        e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
        close(f"softmax {rows}x{columns}", y.get(), e / e.sum(axis=1, keepdims=True), 2e-6)


def layer_norm():
    for kind, ratio in (("fp32", 1e-6), ("fp16", 4e-4), ("bf16", 3e-3)):
        x, w, b = (RANDOM.normal(size=s).astype(np.float32) for s in ((7, 777), 777, 777))
        y, source = poisoned(x.shape, kind), Buffer(x, kind)
        run(layer_norm_kernel, (7,), y=y, x=source, weight=Buffer(w, "fp32"), bias=Buffer(b, "fp32"), columns=777,
            eps=1e-5, BLOCK=1024, num_warps=4)
        v = source.get().astype(np.float64)
        expected = (v - v.mean(1, keepdims=True)) / np.sqrt(v.var(1, keepdims=True) + 1e-5) * w + b
        close(f"layer norm {kind}", y.get().astype(np.float64), expected, ratio)


def matmul():
    shapes = ((128, 128, 128, 64, 64, 32, 4, 2), (100, 72, 90, 32, 32, 32, 2, 1), (256, 64, 512, 128, 64, 64, 8, 2),
              (64, 64, 64, 16, 16, 16, 1, 2))
    # tf32 becomes xf32 here, which keeps ten bits of the fraction.
    for kind, precision, ratio in (("bf16", "ieee", 1e-6), ("fp16", "ieee", 1e-6), ("fp32", "ieee", 1e-6),
                                   ("fp32", "tf32", 1e-3), ("fp8e4b8", "ieee", 1e-6), ("i8", None, 0)):
        for M, N, K, BM, BN, BK, warps, stages in shapes:
            if kind == "i8":
                a, b = (RANDOM.integers(-128, 128, size=s) for s in ((M, K), (K, N)))
                left, right = a, b
            elif kind == "fp8e4b8":
                left, right = (RANDOM.integers(0, 256, size=s).astype(np.uint8) for s in ((M, K), (K, N)))
                left[left == 0x80], right[right == 0x80] = 0, 0
                a, b = fnuz(left), fnuz(right)
            else:
                left, right = (RANDOM.normal(size=s).astype(np.float32) for s in ((M, K), (K, N)))
                a, b = (Buffer(v, kind).get() for v in (left, right))
            kernel, extra = (matmul_kernel, {"PRECISION": precision}) if precision else (matmul_i8_kernel, {})
            c = poisoned((M, N), "fp32" if precision else "i32")
            run(kernel, (triton.cdiv(M, BM), triton.cdiv(N, BN)), c=c, a=Buffer(left, kind), b=Buffer(right, kind),
                M=M, N=N, K=K, BM=BM, BN=BN, BK=max(BK, 32 if kind in ("i8", "fp8e4b8") else 16), num_warps=warps,
                num_stages=stages, **extra)
            expected = a.astype(np.float64) @ b.astype(np.float64)
            close(f"matmul {kind} {precision or ''} {M}x{N}x{K}", c.get(), expected, ratio)


@triton.jit
def matmul_i8_kernel(c, a, b, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.int32)
    for start in range(0, K, BK):
        inside = start + k < K
        left = tl.load(a + m[:, None] * K + (start + k)[None, :], mask=(m < M)[:, None] & inside[None, :], other=0)
        right = tl.load(b + (start + k)[:, None] * N + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    tl.store(c + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


def fnuz(bits):
    """E4M3 in its FNUZ form: exponent bias 8, one NaN, no negative zero."""
    bits = bits.astype(np.int32)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 11), mantissa * 2.0**-10)
    return np.where(bits & 128, -value, value)


def reduction():
    for rows, n, block, warps in ((9, 1000, 1024, 4), (3, 50, 64, 1), (2, 8192, 8192, 8)):
        x = RANDOM.integers(-99999, 99999, size=(rows, n)).astype(np.float32)
        outputs = {name: poisoned(rows, "fp32") for name in ("total", "least", "most")}
        where = poisoned(rows, "i32")
        run(reduce_kernel, (rows,), x=Buffer(x, "fp32"), n=n, BLOCK=block, where=where, num_warps=warps, **outputs)
        close(f"sum of {n}", outputs["total"].get(), x.sum(1, dtype=np.float64), 1e-5)
        equal(f"least of {n}", outputs["least"].get(), x.min(1))
        equal(f"most of {n}", outputs["most"].get(), x.max(1))
        equal(f"index of the most of {n}", where.get(), x.argmax(1))


def scan():
    for block, width, warps in ((256, 4, 4), (64, 64, 2), (1024, 1, 1)):
        x = RANDOM.integers(-1000, 1000, size=(block, width)).astype(np.int32)
        y = (1 + RANDOM.normal(size=(block, width)) / 50).astype(np.float32)
        sums, products = poisoned(x.shape, "i32"), poisoned(y.shape, "fp32")
        run(scan_kernel, (1,), sums=sums, products=products, x=Buffer(x, "i32"), y=Buffer(y, "fp32"), BLOCK=block,
            WIDTH=width, num_warps=warps)
        equal(f"running sums {block}x{width}", sums.get(), x.cumsum(0))
        close(f"running products {block}x{width}", products.get(), y.astype(np.float64).cumprod(1), 1e-5)


def sort():
    for block, warps in ((64, 1), (1024, 4)):
        x = RANDOM.integers(-(2**31), 2**31, size=block).astype(np.int32)
        y = poisoned(block, "i32")
        run(sort_kernel, (1,), y=y, x=Buffer(x, "i32"), BLOCK=block, num_warps=warps)
        equal(f"sort {block}", y.get(), np.sort(x))


def atomics():
    n, bins = 5000, 17
    x = RANDOM.integers(0, 1000, size=n).astype(np.int32)
    zeros = np.zeros(bins, np.int32)
    counts, most, bits = (Buffer(zeros, "i32") for _ in range(3))
    least, sums = Buffer(zeros + 2**30, "i32"), Buffer(zeros, "fp32")
    blocks = triton.cdiv(n, 256)
    swaps = Buffer(np.pad(x, (0, blocks * 256 - n)), "i32")
    run(atomics_kernel, (blocks,), counts=counts, sums=sums, most=most, least=least, bits=bits, swaps=swaps,
        x=Buffer(x, "i32"), n=n, BINS=bins, BLOCK=256, num_warps=4)
    at = [x[x % bins == i] for i in range(bins)]
    equal("atomic counts", counts.get(), np.array([len(v) for v in at]))
    equal("atomic f32 sums", sums.get(), np.array([v.sum() for v in at], np.float32))
    equal("atomic maxima", most.get(), np.array([v.max() for v in at]))
    equal("atomic minima", least.get(), np.array([v.min() for v in at]))
    equal("atomic bits", bits.get(), np.array([np.bitwise_or.reduce(1 << (v % 31)) for v in at]))
    equal("compare and swap", swaps.get()[:n], x + 1)


def half_atomics():
    n, bins = 5000, 17
    x = RANDOM.integers(0, 1000, size=n).astype(np.int32)
    for kind in ("fp16", "bf16"):
        # 16-bit atomics touch the whole dword: one element more, so that the last one lies inside.
        half = Buffer(np.zeros(bins + 1, np.float32), kind)
        run(half_atomics_kernel, (triton.cdiv(n, 256),), half=half, x=Buffer(x, "i32"), n=n, BINS=bins, BLOCK=256,
            num_warps=4)
        expected = np.array([(x[x % bins == i] % 2).sum() for i in range(bins)])
        equal(f"atomic {kind} sums", half.get()[:bins].astype(np.int64), expected)


def integers():
    n = 3000
    x = RANDOM.integers(-(2**31), 2**31, size=n).astype(np.int32)
    y = RANDOM.integers(1, 2**31, size=n).astype(np.int32) >> RANDOM.integers(0, 31, size=n)
    y = np.maximum(y, 1).astype(np.int32)
    q, r, h, f = (poisoned(n, k) for k in ("i32", "i32", "i32", "fp64"))
    run(wide_kernel, (triton.cdiv(n, 512),), quotient=q, remainder=r, high=h, roots=f, x=Buffer(x, "i32"),
        y=Buffer(y, "i32"), n=n, BLOCK=512, num_warps=4)
    X, Y = x.astype(np.int64), y.astype(np.int64)
    truncated = np.sign(X) * (np.abs(X) // Y)
    equal("quotients", q.get(), truncated)
    equal("remainders", r.get(), X - truncated * Y)
    wide = (x.view(np.uint32).astype(np.uint64) * y.view(np.uint32).astype(np.uint64)) >> np.uint64(32)
    equal("high halves of products", h.get().view(np.uint32), wide.astype(np.uint32))
    close("f64 square roots, quotients", f.get(), np.sqrt(np.abs(X).astype(np.float64)) + 1.0 / Y, 3e-16)


if __name__ == "__main__":
    tests = (softmax, layer_norm, matmul, reduction, scan, sort, atomics, integers)
    for test in (half_atomics,) if "half-atomics" in sys.argv else tests:
        test()
