"""Compares aiter's forward chain of Gated DeltaNet with the recurrence in float64: aiter_chain.py CHECKOUT [CODE]

CHECKOUT is a checkout of https://github.com/ROCm/aiter, whose Triton kernels are compiled here. CODE has code objects of its
FlyDSL kernels, which `sim/calibration/compile.py` makes where torch and flydsl are installed.

The chain is that of `chunk_gated_delta_rule_fwd_opt_vk`, for batches of equal lengths, K = V = 128 and bf16. Its first part
has three forms: one FlyDSL kernel, or Triton's K K^T followed by a fused or a split solve. Its second part, the states, is a
kernel of Triton's or FlyDSL's.
"""

import ctypes
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

# All configurations, not the one that aiter takes without tuning.
os.environ["GATED_DELTA_RULE_TRITON_AUTOTUNE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "calibration"))

import compile as calibration  # noqa: E402
import simulator  # noqa: E402
import triton  # noqa: E402
from fla_chain import CHUNK, RATIO, RCP_LN2, Case, number, ratio, recurrence  # noqa: E402
from simulator import Buffer, poisoned  # noqa: E402
from triton_launch import Trial, run  # noqa: E402

K = V = 128
# Forms of the chain's parts, each with its stages.
PREPARE = {"FlyDSL": ("prepare",), "fused": ("kkt", "fused"), "split": ("kkt", "solve", "w_u")}
STATES = {"FlyDSL": ("h_fly",), "Triton": ("h",)}
# Value columns of a workgroup for which FlyDSL's states are compiled.
COLUMNS = (16, 32, 64)


def code_name(heads, key_heads, columns):
    """Name of the code object of FlyDSL's states, in which the final state is stored."""
    return f"fly_k5.{heads}.{key_heads}.{columns}.dense-final.co"


class Chain:
    """aiter's kernels from a checkout; with `code`, FlyDSL's too."""

    def __init__(self, checkout, code=None):
        calibration.packages(os.path.abspath(checkout))
        self.code = Path(code) if code else None

        def module(name):
            return importlib.import_module(f"{calibration.TRITON}.{name}")

        self.kkt = module("prefill.fused_cumsum_kkt").fused_chunk_local_cumsum_scaled_dot_kkt_fwd_kernel
        recompute = module("prefill.fused_solve_tril_recompute")
        self.fused, self.w_u = recompute.fused_solve_tril_recompute_w_u_kernel, recompute.recompute_w_u_head_major_kernel
        self.solve = module("utils.solve_tril").merge_16x16_to_64x64_inverse_kernel
        self.precision = recompute.FLA_TRIL_PRECISION
        self.h = module("prefill.chunk_delta_h").chunk_gated_delta_rule_fwd_kernel_h_opt_vk
        self.o = module("prefill.chunk_o").chunk_fwd_kernel_o_opt_vk

    def forms(self):
        """Forms of the first and second part that can run."""
        if not self.code:
            return [f for f in PREPARE if f != "FlyDSL"], ["Triton"]
        return list(PREPARE), list(STATES)

    def image(self, name):
        return (self.code / name).read_bytes()

    def inputs(self, case):
        assert len(set(case.lengths)) == 1 and case.kind == "bf16" and (case.K, case.V) == (K, V)
        N, T, H = len(case.lengths), case.lengths[0], case.HV
        x = SimpleNamespace(N=N, T=T, H=H, NT=-(-T // CHUNK))
        x.q, x.k, x.v = (Buffer(tensor, "bf16") for tensor in (case.q, case.k, case.v))
        x.gates, x.beta = Buffer(case.g, "fp32"), Buffer(case.beta, "fp32")
        x.h0 = Buffer(case.h0.swapaxes(2, 3), "fp32")
        x.shape = {"T": T, "H": H, "Hg": case.H, "K": K, "BT": CHUNK}
        x.lists = {"cu_seqlens": None, "sequence_ids": None, "chunk_ids": None, "INDEX_STRIDE": 1}
        x.g = poisoned((N, H, T), "fp32")
        x.w, x.u = (poisoned((N, H, T, K), "bf16") for _ in range(2))
        return x

    def prepare(self, x, form, choose):
        """The gates' sums g, w and u."""
        grid = (x.NT, x.N * x.H)
        if form == "FlyDSL":
            tensors = (x.k, x.v, x.gates, x.beta, Buffer(np.zeros(64), "i32"), x.w, x.u, x.g)
            self.launch(choose("prepare"), [("fly_prepare.co", grid)], "gdn_prepare_kernel", tensors, [4] * 8,
                        (x.T, x.H, x.shape["Hg"]))
            return
        A = poisoned((x.N, x.T, x.H, CHUNK), "fp32")
        run(self.kkt, grid, choose("kkt"), g=x.gates, k=x.k, beta=x.beta, g_cumsum_out=x.g, A_out=A, USE_EXP2=True,
            G_SCALE=RCP_LN2, **x.lists, **x.shape)
        if form == "fused":
            run(self.fused, grid, choose("fused"), A_raw=A, k=x.k, v=x.v, beta=x.beta, g=x.g, w=x.w, u=x.u, V=V,
                DOT_PRECISION=self.precision, USE_EXP2=True, LOWP_DTYPE_IS_BF16=True, **x.lists, **x.shape)
            return
        inverse = poisoned((x.N, x.T, x.H, CHUNK), "bf16")
        run(self.solve, grid, choose("solve"), A=A, Ai=inverse, T=x.T, H=x.H, BT=CHUNK, USE_TMA=False, **x.lists)
        run(self.w_u, grid, choose("w_u"), k=x.k, v=x.v, beta=x.beta, Ai=inverse, g=x.g, w=x.w, u=x.u, V=V, USE_EXP2=True,
            **x.lists, **x.shape)

    def states(self, x, form, choose):
        """v_new, the states h before the chunks, and the final states."""
        x.h = poisoned((x.N, x.NT, x.H, V, K), "bf16")
        x.v_new, x.final = poisoned((x.N, x.H, x.T, V), "bf16"), poisoned((x.N, x.H, V, K), "fp32")
        if form == "FlyDSL":
            none = Buffer(np.zeros(16), "i32")
            codes = [(code_name(x.H, x.shape["Hg"], columns), (V // columns, x.N * x.H)) for columns in COLUMNS]
            # Descriptors of tensors of rank 4, 4, 4, 4, 3, 1, 5, 4, 4, 1, 1, 1 follow the pointers; the kernel reads none.
            self.launch(choose("h_fly"), codes, "chunk_gdn_fwd_h_flydsl_opt",
                        (x.k, x.u, x.w, x.v_new, x.g, none, x.h, x.h0, x.final, none, none, none),
                        [40, 40, 40, 40, 28, 4, 52, 40, 40, 4, 4, 4], (x.T, x.T, x.N))
            return
        run(self.h, lambda a: (triton.cdiv(V, a["BV"]), x.N * x.H), choose("h"), k=x.k, v=x.u, w=x.w, v_new=x.v_new, g=x.g,
            gk=None, h=x.h, h0=x.h0, ht=x.final, state_indices=None, cu_seqlens=None, chunk_offsets=None, T_flat=x.T, V=V,
            USE_EXP2=True, **x.shape)

    def outputs(self, x, choose):
        o = poisoned((x.N * x.T, x.H, V), "bf16")
        run(self.o, lambda a: (triton.cdiv(V, a["BV"]), x.NT, x.N * x.H), choose("o"), q=x.q, k=x.k, v=x.v_new, h=x.h, g=x.g,
            o=o, scale=K**-0.5, T_flat=x.T, V=V, H_IS_FP32=False, USE_EXP2=True, **x.lists, **x.shape)
        return o

    def launch(self, choose, codes, name, tensors, descriptors, numbers):
        """Runs a kernel of FlyDSL's; `codes` are its configurations: code objects and grids."""
        values = []
        for tensor, size in zip(tensors, descriptors):
            values += [tensor.pointer, (ctypes.c_uint8 * size)()]
        values += [ctypes.c_int32(n) for n in numbers]

        def once(config):
            code, grid = config
            simulator.launch(self.image(code), name, grid, (256,), 0, values)

        if isinstance(choose, Trial):
            for index, config in enumerate(codes):
                once(config)
                choose.ran(index, config[0], None)
        else:
            once(choose(codes))

    def run(self, case, forms, choose):
        """Outputs and final states. `forms` are those of the first two parts."""
        x = self.inputs(case)
        self.prepare(x, forms[0], choose)
        self.states(x, forms[1], choose)
        o = self.outputs(x, choose)
        return o.get(), x.final.get().swapaxes(2, 3)


def main():
    chain = Chain(*sys.argv[1:])
    for lengths, heads in (([128] * 2, (16, 32)), ([100], (2, 8))):
        case = Case(lengths, heads, (K, V), "bf16", False, 1)
        expected = recurrence(case.q, case.k, case.v, case.g, case.beta, case.h0, case.lengths)
        first, second = chain.forms()
        for forms in [(form, second[0]) for form in first] + [(first[0], form) for form in second[1:]]:
            for pick in (0, 1):
                found = chain.run(case, forms, number(pick))
                errors = [ratio(f, e) for f, e in zip(found, expected)]
                print(f"  {case}, {', '.join(forms)}, configuration {pick}: o {errors[0]:.1e}, state {errors[1]:.1e}", flush=True)
                # FlyDSL cuts numbers off to bf16 instead of rounding them.
                assert max(errors) < (0.01 if "FlyDSL" in forms else RATIO)


if __name__ == "__main__":
    main()
