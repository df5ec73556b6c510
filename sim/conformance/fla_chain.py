"""Compares fla-core's forward chain of Gated DeltaNet, compiled by Triton, with the recurrence in float64."""

import importlib
import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import triton

import torch_stub
from simulator import Buffer, from_bf16, bf16, poisoned
from triton_launch import launched, run

torch_stub.install("torch", "transformers")
# FLA asks torch for the size of LDS, gets no answer, and warns.
warnings.filterwarnings("ignore", module="fla")

CHUNK = 64
# The bound of FLA's own tests on rms(error) / rms(reference).
RATIO = 0.005
RCP_LN2 = 1.4426950216

fla = {name: importlib.import_module(f"fla.ops.{name}") for name in (
    "utils.cumsum", "utils.solve_tril", "gated_delta_rule.chunk_fwd", "gated_delta_rule.wy_fast",
    "common.chunk_delta_h", "common.chunk_o", "common.chunk_scaled_dot_kkt", "gated_delta_rule.fused_recurrent")}


def rounded(x, kind):
    """`x` rounded to an element type."""
    x = np.asarray(x, np.float32)
    return from_bf16(bf16(x)) if kind == "bf16" else x.astype(Buffer.CARRIERS[kind]).astype(np.float32)


def recurrence(q, k, v, g, beta, h0, lengths):
    """Outputs and final states in float64; q, k [T, H, K], v [T, HV, V], g, beta [T, HV], h0 [N, HV, K, V]."""
    q, k, v, g, beta, h0 = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, h0))
    heads = np.arange(v.shape[1]) // (v.shape[1] // q.shape[1])
    o, final, first = np.empty(v.shape), np.empty(h0.shape), 0
    for n, length in enumerate(lengths):
        s = h0[n].copy()
        for t in range(first, first + length):
            kt, qt = k[t, heads], q[t, heads]
            s *= np.exp(g[t])[:, None, None]
            d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, kt))
            s += kt[:, :, None] * d[:, None, :]
            o[t] = np.einsum("hkv,hk->hv", s, qt) * q.shape[2] ** -0.5
        final[n], first = s, first + length
    return o, final


class Case:
    """One problem: sequences packed one after the other (`varlen`) or as a batch of equal lengths."""

    def __init__(self, lengths, heads, dims, kind, varlen, seed, gates=1.0, v_first=False):
        self.lengths, (self.H, self.HV), (self.K, self.V) = lengths, heads, dims
        self.kind, self.varlen, self.v_first = kind, varlen, v_first
        self.N, T = len(lengths), sum(lengths)
        self.B, self.T = (1, T) if varlen else (self.N, lengths[0])
        r = np.random.default_rng(seed)
        self.q, k = (rounded(r.normal(size=(T, self.H, self.K)), kind) for _ in range(2))
        self.k = rounded(k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6), kind)
        self.q = rounded(self.q / np.sqrt((self.q * self.q).sum(-1, keepdims=True) + 1e-6), kind)
        self.v = rounded(r.normal(size=(T, self.HV, self.V)), kind)
        self.beta = rounded(1 / (1 + np.exp(-r.normal(size=(T, self.HV)))), kind)
        self.g = (-np.log1p(np.exp(-r.normal(size=(T, self.HV)))) * gates).astype(np.float32)
        self.h0 = r.normal(size=(self.N, self.HV, self.K, self.V)).astype(np.float32)
        self.beta_kind = kind
        self.pack()

    def pack(self):
        """Offsets of the sequences and their chunks."""
        lengths, self.rows = self.lengths, sum(self.lengths)
        if self.varlen:
            ends = np.cumsum([0, *lengths])
            chunks = [-(-n // CHUNK) for n in lengths]
            self.cu_seqlens = Buffer(ends, "i64")
            self.chunk_indices = Buffer([(n, i) for n, c in enumerate(chunks) for i in range(c)], "i64")
            self.chunk_offsets = Buffer(np.cumsum([0, *chunks]), "i64")
            self.NT = sum(chunks)
        else:
            self.cu_seqlens = self.chunk_indices = self.chunk_offsets = None
            self.NT = -(-self.T // CHUNK)

    def __str__(self):
        shape = ("lengths " + ",".join(map(str, self.lengths))) if self.varlen else f"{self.N} x {self.T}"
        return f"{shape}, heads {self.H}/{self.HV}, dims {self.K}x{self.V}, {self.kind}" + ", state V first" * self.v_first

    def factors(self, fused, choose):
        """Inputs on the device, and what the forward keeps for the backward: the gates' sums g, and A.

        `choose(stage)` says how to pick a configuration.
        """
        shape = {"T": self.T, "H": self.H, "HV": self.HV, "K": self.K, "BT": CHUNK}
        lists = {"cu_seqlens": self.cu_seqlens, "chunk_indices": self.chunk_indices}
        x = SimpleNamespace(shape=shape, lists=lists)
        x.q, x.k, x.v = (Buffer(tensor, self.kind) for tensor in (self.q, self.k, self.v))
        x.beta = Buffer(self.beta, self.beta_kind)
        raw = Buffer(self.g, "fp32")
        x.h0 = Buffer(self.h0.swapaxes(2, 3) if self.v_first else self.h0, "fp32")
        rows, NT, BH = self.rows, self.NT, self.B * self.HV

        x.g = poisoned((rows, self.HV), "fp32")
        run(fla["utils.cumsum"].chunk_local_cumsum_scalar_kernel, (BH * NT,), choose("cumsum"), s=raw, o=x.g,
            scale=RCP_LN2, T=self.T, B=self.B, H=self.HV, BT=CHUNK, REVERSE=False, **lists)

        # The kernels leave blocks above the diagonal as they are.
        x.A = Buffer(np.zeros((rows, self.HV, CHUNK)), self.kind)
        if fused:
            run(fla["gated_delta_rule.chunk_fwd"].chunk_gated_delta_rule_fwd_kkt_solve_kernel, (NT, BH),
                choose("kkt_solve"), k=x.k, g=x.g, beta=x.beta, A=x.A, BC=16, **lists, **shape)
        else:
            products = poisoned((rows, self.HV, CHUNK), "fp32")
            run(fla["common.chunk_scaled_dot_kkt"].chunk_scaled_dot_kkt_fwd_kernel, (NT, BH), choose("kkt"),
                k=x.k, g=x.g, beta=x.beta, A=products, **lists, **shape)
            run(fla["utils.solve_tril"].merge_16x16_to_64x64_inverse_kernel, (NT, BH), choose("solve"), A=products,
                Ai=x.A, T=self.T, H=self.HV, BT=CHUNK, USE_TMA=False, **lists)
        return x

    def states(self, x, choose, final):
        """Adds w, the states h of the chunks and v_new to the factors; `final` is the buffer of final states, or None."""
        u = poisoned(self.v.shape, self.kind)
        x.w = poisoned((self.rows, self.HV, self.K), self.kind)
        run(fla["gated_delta_rule.wy_fast"].recompute_w_u_fwd_kernel, (self.NT, self.B * self.HV), choose("w_u"), k=x.k,
            v=x.v, beta=x.beta, w=x.w, u=u, A=x.A, g=x.g, V=self.V, BK=64, BV=64, **x.lists, **x.shape)

        chunks = self.NT if self.varlen else self.N * self.NT
        x.h, x.v_new = poisoned((chunks, self.HV, self.K, self.V), self.kind), poisoned(self.v.shape, self.kind)
        run(fla["common.chunk_delta_h"].chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
            lambda a: (triton.cdiv(self.V, a["BV"]) * self.N * self.HV,), choose("h"), k=x.k, v=u, w=x.w, v_new=x.v_new,
            g=x.g, gk=None, h=x.h, h0=x.h0, ht=final, cu_seqlens=self.cu_seqlens, chunk_offsets=self.chunk_offsets,
            V=self.V, STATE_V_FIRST=self.v_first, **x.shape)

    def chain(self, fused, choose):
        """Runs the kernels as `chunk_gated_delta_rule_fwd` does; `choose(stage)` says how to pick a configuration."""
        x = self.factors(fused, choose)
        state = (self.N, self.HV, self.V, self.K) if self.v_first else (self.N, self.HV, self.K, self.V)
        final = poisoned(state, "fp32")
        self.states(x, choose, final)
        o = poisoned(self.v.shape, self.kind)
        run(fla["common.chunk_o"].chunk_fwd_kernel_o, lambda a: (triton.cdiv(self.V, a["BV"]) * self.NT, self.B * self.HV),
            choose("o"), q=x.q, k=x.k, v=x.v_new, h=x.h, g=x.g, g_gamma=None, o=o, scale=self.K**-0.5, V=self.V,
            STATE_V_FIRST=self.v_first, **x.lists, **x.shape)
        final = final.get()
        return o.get(), final.swapaxes(2, 3) if self.v_first else final

    def recurrent(self):
        """Runs the kernel that walks token by token, as for decoding, with the norms inside."""
        q, k, v, beta = (Buffer(x, self.kind) for x in (self.q, self.k, self.v, self.beta))
        o, final = poisoned(self.v.shape, self.kind), poisoned(self.h0.shape, "fp32")
        columns = min(8, triton.next_power_of_2(self.V))
        run(fla["gated_delta_rule.fused_recurrent"].fused_recurrent_gated_delta_rule_fwd_kernel,
            (triton.cdiv(self.V, columns) * self.N * self.HV,), q=q, k=k, v=v, g=Buffer(self.g, "fp32"), gk=None,
            gv=None, beta=beta, A_log=None, dt_bias=None, o=o, h0=Buffer(self.h0, "fp32"), ht=final,
            cu_seqlens=self.cu_seqlens, scale=self.K**-0.5, T=self.T, H=self.H, HV=self.HV, K=self.K, V=self.V,
            BK=triton.next_power_of_2(self.K), BV=columns, IS_BETA_HEADWISE=True, USE_QK_L2NORM_IN_KERNEL=True,
            APPLY_BETA_SIGMOID=False, ALLOW_NEG_EIGVAL=False, STATE_V_FIRST=False, num_warps=1, num_stages=3)
        return o.get(), final.get()


def number(pick):
    """Chooses configurations by their number, modulo how many there are."""
    def choose(stage):
        return lambda configs: configs[(pick + (stage == "o")) % len(configs)]
    return choose


def ratio(found, expected):
    assert not np.isnan(found).any(), "NaN"
    return np.sqrt(np.mean((found - expected) ** 2)) / (np.sqrt(np.mean(expected**2)) + 1e-8)


# Cases, and the configurations that they run with.
CASES = [
    (Case([128] * 2, (1, 2), (128, 128), "bf16", False, 1), (0, 1, 2)),
    (Case([1, 63, 64, 65, 100], (2, 4), (128, 128), "bf16", True, 2), (0, 1, 3)),
    (Case([200] * 1, (1, 3), (64, 128), "fp16", False, 3), (0,)),
    (Case([70, 15, 128, 3], (2, 2), (64, 64), "fp16", True, 4, gates=0.1), (1,)),
    (Case([90] * 2, (1, 2), (96, 192), "bf16", False, 5, gates=0.3), (0,)),
    (Case([129, 17], (1, 2), (128, 128), "bf16", True, 6, gates=0.2, v_first=True), (1,)),
    (Case([65, 64], (1, 2), (256, 256), "bf16", True, 7), (1,)),
]


def check(case, form, found, expected):
    errors = [ratio(f, e) for f, e in zip(found, expected)]
    print(f"  {case}, {form}: o {errors[0]:.1e}, state {errors[1]:.1e}", flush=True)
    assert max(errors) < RATIO, f"the bound is {RATIO}"


def main():
    for case, picks in CASES:
        expected = recurrence(case.q, case.k, case.v, case.g, case.beta, case.h0, case.lengths)
        for fused, pick in itertools.product((True, False), picks):
            form = f"{'fused solve' if fused else 'kkt, solve'}, configuration {pick}"
            check(case, form, case.chain(fused, number(pick)), expected)
        if not case.v_first:
            check(case, "recurrent", case.recurrent(), expected)
    seconds = sum(s for _, _, s in launched)
    print(f"  {len(launched)} launches of {len({n for n, _, _ in launched})} kernels in {seconds:.1f} s")


if __name__ == "__main__":
    main()
