"""Compares fla-core's backward chain of Gated DeltaNet, compiled by Triton, with the reverse recurrence in float64."""

import numpy as np
import triton
import triton.language as tl

from fla_chain import CHUNK, Case, fla, number, ratio, rounded
from simulator import Buffer, poisoned
from triton_launch import launched, run

# The stages of the backward, in order. The forward before it keeps the gates' sums and A.
STAGES = ("w_u", "h", "dv_local", "dhu", "dqkwg", "wy", "dg")
# Between them FLA leaves these to torch, in whose place the kernels below move the same bytes.
TORCH = ("sum_dq", "sum_dk", "sum_dg", "sum_dk2", "add_dk", "add_dg")
NAMES = ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_initial_state")
# FLA's own tests allow its gradients so much more than its outputs.
BOUNDS = {"d_q": 0.008, "d_k": 0.008, "d_v": 0.008, "d_g": 0.02, "d_beta": 0.02, "d_initial_state": 0.008}


BLOCK = 2048


@triton.jit
def sum_heads(x, y, n, GROUP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """`y [.., K]`, of `n` elements, from `x [.., GROUP, K]`: sums in f32, rounded once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = x + at // K * (GROUP * K) + at % K
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(GROUP):
        total += tl.load(first + i * K, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < n)


@triton.jit
def sum_parts(x, y, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """`y [n]` from `x [PARTS, n]`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.load(x + i * n + at, mask=at < n, other=0.0)
    tl.store(y + at, total, mask=at < n)


@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    """`x += y`, of `n` elements."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32) + tl.load(y + at, mask=at < n, other=0.0)
    tl.store(x + at, total.to(x.dtype.element_ty), mask=at < n)


def recurrence(q, k, v, g, beta, h0, d_o, d_final, lengths):
    """The gradients in float64, in the order of NAMES; shapes are those of the forward's recurrence."""
    q, k, v, g, beta, h0, d_o, d_final = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, h0, d_o, d_final))
    of, scale = np.arange(v.shape[1]) // (v.shape[1] // q.shape[1]), q.shape[2] ** -0.5
    d_q, d_k, d_v, d_g, d_beta, d_h0 = (np.zeros(x.shape) for x in (q, k, v, g, beta, h0))
    first = 0
    for n, length in enumerate(lengths):
        tokens = range(first, first + length)
        # Of each token: the state before it, decayed.
        s, before = h0[n].copy(), []
        for t in tokens:
            s *= np.exp(g[t])[:, None, None]
            before.append(s.copy())
            kt = k[t, of]
            s += kt[:, :, None] * (beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, kt)))[:, None, :]
        ds = d_final[n].copy()
        for t, decayed in zip(reversed(tokens), reversed(before)):
            kt, qt = k[t, of], q[t, of]
            error = v[t] - np.einsum("hkv,hk->hv", decayed, kt)
            update = beta[t][:, None] * error
            after = decayed + kt[:, :, None] * update[:, None, :]
            ds += scale * qt[:, :, None] * d_o[t][:, None, :]
            np.add.at(d_q[t], of, scale * np.einsum("hkv,hv->hk", after, d_o[t]))
            d_update = np.einsum("hkv,hk->hv", ds, kt)
            d_beta[t] = (d_update * error).sum(-1)
            d_v[t] = beta[t][:, None] * d_update
            np.add.at(d_k[t], of, np.einsum("hkv,hv->hk", ds, update) - np.einsum("hkv,hv->hk", decayed, d_v[t]))
            ds -= kt[:, :, None] * d_v[t][:, None, :]
            d_g[t] = (decayed * ds).sum((1, 2))
            ds *= np.exp(g[t])[:, None, None]
        d_h0[n], first = ds, first + length
    return d_q, d_k, d_v, d_g, d_beta, d_h0


def gradients(case, d_o, d_final, choose):
    """Runs the kernels as `chunk_gated_delta_rule_bwd` does; the gradients in the order of NAMES.

    Torch does the sums over the value heads of a key head and over parts of the keys, and adds two kernels' shares of dk
    and dg.
    """
    x = case.factors(True, choose)
    case.states(x, choose, None)
    kind, rows, NT, BH = case.kind, case.rows, case.NT, case.B * case.HV
    H, HV, K, V = case.H, case.HV, case.K, case.V
    # FLA's sizes for devices with as little LDS as gfx942 has.
    BK, BV = (min(max(triton.next_power_of_2(n), 16), 32) for n in (K, V))
    tiles = {"V": V, "BK": BK, "BV": BV, **x.shape}
    key_parts, scale = triton.cdiv(K, BK), K**-0.5
    d_o, d_final = Buffer(d_o, kind), Buffer(d_final, "fp32")

    dv = poisoned(case.v.shape, kind)
    run(fla["common.chunk_o"].chunk_bwd_kernel_dv_local, (NT, BH), choose("dv_local"), q=x.q, k=x.k, g=x.g, g_gamma=None,
        A=None, do=d_o, dv=dv, scale=scale, **x.lists, **tiles)

    dh, dh0, du = poisoned(x.h.shape, kind), poisoned(case.h0.shape, "fp32"), poisoned(case.v.shape, kind)
    run(fla["common.chunk_delta_h"].chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64,
        lambda a: (triton.cdiv(V, a["BV"]) * case.N * HV,), choose("dhu"), q=x.q, k=x.k, w=x.w, g=x.g, gk=None,
        dht=d_final, dh0=dh0, do=d_o, dh=dh, dv=dv, dv2=du, cu_seqlens=case.cu_seqlens, chunk_offsets=case.chunk_offsets,
        scale=scale, V=V, STATE_V_FIRST=False, **x.shape)

    dq, dk, dw = (poisoned((rows, HV, K), kind) for _ in range(3))
    dg = poisoned((key_parts, rows, HV), "fp32")
    run(fla["common.chunk_o"].chunk_bwd_kernel_dqkwg, (key_parts * NT, BH), choose("dqkwg"), q=x.q, k=x.k, v=x.v_new,
        g=x.g, g_gamma=None, h=x.h, do=d_o, dh=dh, dq=dq, dk=dk, dw=dw, dv=du, dg=dg, scale=scale, B=case.B,
        STATE_V_FIRST=False, **x.lists, **tiles)

    def of_key_heads(stage, values):
        if H == HV:
            return values
        total = poisoned((rows, H, K), kind)
        n = rows * H * K
        run(sum_heads, (triton.cdiv(n, BLOCK),), choose(stage), x=values, y=total, n=n, GROUP=HV // H, K=K, BLOCK=BLOCK)
        return total

    def added(stage, x, y):
        n = int(np.prod(x.shape))
        run(add, (triton.cdiv(n, BLOCK),), choose(stage), x=x, y=y, n=n, BLOCK=BLOCK)
        return x

    dq, dk = of_key_heads("sum_dq", dq), of_key_heads("sum_dk", dk)
    gates = poisoned((rows, HV), "fp32")
    run(sum_parts, (triton.cdiv(rows * HV, BLOCK),), choose("sum_dg"), x=dg, y=gates, n=rows * HV, PARTS=key_parts,
        BLOCK=BLOCK)

    dk2, dv = poisoned((rows, HV, K), kind), poisoned(case.v.shape, kind)
    dbeta, dg2 = poisoned((rows, HV), case.beta_kind), poisoned((rows, HV), "fp32")
    run(fla["gated_delta_rule.wy_fast"].prepare_wy_repr_bwd_kernel, (NT, BH), choose("wy"), k=x.k, v=x.v, beta=x.beta,
        g=x.g, A=x.A, dw=dw, du=du, dk=dk2, dv=dv, db=dbeta, dg=dg2, **x.lists, **tiles)
    dk = added("add_dk", dk, of_key_heads("sum_dk2", dk2))
    gates, dg = added("add_dg", gates, dg2), poisoned((rows, HV), "fp32")
    run(fla["utils.cumsum"].chunk_local_cumsum_scalar_kernel, (BH * NT,), choose("dg"), s=gates, o=dg, scale=None,
        T=case.T, B=case.B, H=HV, BT=CHUNK, REVERSE=True, **x.lists)
    return tuple(buffer.get() for buffer in (dq, dk, dv, dg, dbeta, dh0))


def drawn(case, seed):
    """Gradients of outputs and of final states."""
    r = np.random.default_rng(seed)
    return rounded(r.normal(size=case.v.shape), case.kind), r.normal(size=case.h0.shape).astype(np.float32)


# Cases, and the configurations that they run with.
CASES = [
    (Case([128] * 2, (1, 2), (128, 128), "bf16", False, 1), (0, 1)),
    (Case([1, 63, 64, 65, 100], (2, 4), (128, 128), "bf16", True, 2), (0, 4)),
    (Case([70, 15, 128, 3], (2, 2), (64, 64), "fp16", True, 4, gates=0.1), (1,)),
    (Case([90] * 2, (1, 2), (96, 192), "bf16", False, 5, gates=0.3), (0,)),
]


def main():
    for seed, (case, picks) in enumerate(CASES):
        d_o, d_final = drawn(case, 100 + seed)
        expected = recurrence(case.q, case.k, case.v, case.g, case.beta, case.h0, d_o, d_final, case.lengths)
        for pick in picks:
            found = gradients(case, d_o, d_final, number(pick))
            errors = {name: ratio(f, e) for name, f, e in zip(NAMES, found, expected)}
            shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            print(f"  {case}, configuration {pick}: {shown}", flush=True)
            far = [name for name, error in errors.items() if not error < BOUNDS[name]]
            assert not far, f"above its bound: {far}"
    seconds = sum(s for _, _, s in launched)
    print(f"  {len(launched)} launches of {len({n for n, _, _ in launched})} kernels in {seconds:.1f} s")


if __name__ == "__main__":
    main()
