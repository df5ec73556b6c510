"""The backward of ops.prefill_parallel in processes of torch.distributed with gloo."""

import unittest

from . import test_parallel
from .common import np
from .test_parallel import BLOCK, HK, HV, LENGTHS, V, K, torch

if torch is not None:
    import torch.distributed as dist

    from deltawave import ops

    from .differentiable import gates as gates_of
    from .differentiable import gated_delta_rule, unit

STARTS = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
WEIGHTS = ("a_log", "dt_bias")
# Fragments of five ranks: one has none, one has a sequence's end and another one's begin, in this order.
FRAGMENTS = [[], [(3, 128, 22), (0, 0, 64), (1, 0, 0)], [(0, 64, 128), (2, 0, 64)], [(0, 320, 10), (3, 0, 128)], [(0, 192, 128)]]


def inputs(gates):
    """Rows of all sequences, states, weights and other arguments of a case, and the gradients that come in."""
    rows, states = test_parallel.inputs()
    made = torch.Generator().manual_seed(5)
    rows["q"], rows["k"] = (unit(rows[n].float()).bfloat16() for n in "qk")
    weights, more = {}, {}
    if gates == "raw":
        del rows["g"], rows["beta"]
        rows["a"], rows["b"] = (torch.randn(sum(LENGTHS), HV, generator=made).bfloat16() for _ in "ab")
        weights = {"a_log": torch.tensor([-3.0, 0.5]), "dt_bias": torch.tensor([-2.0, 0.1])}
        # A layout of states with the last two dimensions exchanged, and a sequence that does not read its state.
        states = states.transpose(2, 3).contiguous()
        more = {"state_layout": "value_major", "qk_l2norm": True}
    elif gates == "zero":
        rows["g"] = torch.zeros_like(rows["g"])
    elif gates == "mixed":
        rows["g"] = rows["g"] * torch.tensor([1e-2, 30.0])
    d_o = torch.randn(sum(LENGTHS), HV, V, generator=made).bfloat16()
    d_final = torch.randn(states.shape, generator=made)
    has = torch.tensor([1, 1, 1, 0 if gates == "raw" else 1], dtype=torch.uint8)
    return rows, states, has, weights, more, d_o, d_final


def process(rank, ranks, kind, folder):
    """A rank: its rows, fragments and gradients go to a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    kind, gates = kind.split()
    rows, states, has, weights, more, d_o, d_final = inputs(gates)
    kind = FRAGMENTS if kind == "fragments" else kind
    fragments = ops.rank_fragments(LENGTHS, ranks, rank, HV, kind, BLOCK)
    own = [i for n, begin, count in fragments for i in range(STARTS[n] + begin, STARTS[n] + begin + count)]
    sequences = [n for n, _, _ in fragments]
    leaves = {name: x[own].requires_grad_() for name, x in rows.items()}
    leaves.update({name: x.clone().requires_grad_() for name, x in weights.items()})
    # States and gradients that must not be read are NaN.
    initial, d_last = states[sequences], d_final[sequences]
    for i, (n, begin, count) in enumerate(fragments):
        if begin:
            initial[i] = torch.nan
        if begin + count < LENGTHS[n]:
            d_last[i] = torch.nan
    leaves["initial_state"] = initial.requires_grad_()
    results = []
    for _ in range(2):
        o, final = ops.prefill_parallel(**leaves, has_initial_state=has[sequences], **more, lengths=LENGTHS, kind=kind,
                                        block=BLOCK)
        results.append(torch.autograd.grad([o, final], list(leaves.values()), [d_o[own], d_last]))
    same = all(torch.equal(x, y) for x, y in zip(*results))
    # A rank that gets no gradient of its own takes part, too; and results without gradients have the same bits.
    unused, _ = ops.prefill_parallel(**leaves, has_initial_state=has[sequences], **more, lengths=LENGTHS, kind=kind, block=BLOCK)
    part = torch.autograd.grad((unused * (rank == 0)).sum(), leaves["v"])[0]
    with torch.no_grad():
        plain = ops.prefill_parallel(**leaves, has_initial_state=has[sequences], **more, lengths=LENGTHS, kind=kind, block=BLOCK)
    same = same and torch.equal(plain[0], o) and torch.equal(plain[1], final) and bool(part.isfinite().all())
    torch.save((own, fragments, same, {n: d.clone() for n, d in zip(leaves, results[0])}), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Gradients(test_parallel.InProcesses):
    def ranks(self, ranks, kind, gates):
        """Gradients by name: of all rows and all sequences, summed over ranks for weights."""
        rows, states, _, weights, *_ = inputs(gates)
        whole = {name: torch.full_like(x, torch.nan) for name, x in {**rows, "initial_state": states}.items()}
        whole.update({name: torch.zeros_like(x) for name, x in weights.items()})
        for own, fragments, same, found in self.files("process", ranks, f"{kind} {gates}", "test_parallel_backward"):
            self.assertTrue(same)
            for name in rows:
                whole[name][own] = found[name]
            for name in weights:
                whole[name] += found[name]
            for i, (n, begin, _) in enumerate(fragments):
                if begin:
                    self.assertTrue((found["initial_state"][i] == 0).all())
                else:
                    whole["initial_state"][n] = found["initial_state"][i]
        return whole

    def exact(self, gates):
        """Gradients in double precision by a recurrence over tokens, and those of one process without ranks."""
        rows, states, has, weights, more, d_o, d_final = inputs(gates)
        named = {**rows, **weights, "initial_state": states}
        alone = {name: x.clone().requires_grad_() for name, x in named.items()}
        o, final = ops.prefill(**alone, has_initial_state=has, cu_seqlens=torch.tensor(STARTS), **more)
        one = dict(zip(alone, torch.autograd.grad([o, final], list(alone.values()), [d_o, d_final])))
        x = {name: t.double().requires_grad_() for name, t in named.items()}
        g, beta = (x.get("g"), x.get("beta")) if gates != "raw" else gates_of(x["a"], x["b"], x["a_log"], x["dt_bias"])
        q, k = (unit(x[n]) if gates == "raw" else x[n] for n in "qk")
        o, final = gated_delta_rule(*(t[None] for t in (q, k, x["v"], g, beta)), x["initial_state"] * has[:, None, None, None],
                                    STARTS, state_v_first=gates == "raw")
        return one, dict(zip(x, torch.autograd.grad([o[0], final], list(x.values()), [d_o.double(), d_final.double()])))

    def check(self, gates, cases):
        one, exact = self.exact(gates)
        alone = self.ranks(1, "contiguous", gates)
        for name, wanted in exact.items():
            error, plain = (float((x[name].double() - wanted).norm() / wanted.norm()) for x in (alone, one))
            # A gradient of two weights has few elements, and its error scatters.
            self.assertLess(error, max(1.25 * plain, 6e-3 if name in WEIGHTS else 3e-3), f"{gates}, {name}: {plain} in one process")
        for ranks, kind in cases:
            found = self.ranks(ranks, kind, gates)
            for name, wanted in alone.items():
                if name in WEIGHTS:  # sums over the tokens of a rank, then over ranks
                    self.assertLess(float((found[name] - wanted).norm() / wanted.norm()), 1e-5, name)
                else:
                    self.assertTrue(torch.equal(found[name], wanted), f"{name}, {gates}, {ranks} ranks, {kind}")

    def test_given_gates(self):
        self.check("normal", ((2, "contiguous"), (4, "zigzag"), (5, "fragments")))

    def test_raw_gates_and_states_by_value(self):
        self.check("raw", ((2, "zigzag"), (3, "packed")))

    def test_gates_that_forget_and_gates_that_do_not(self):
        self.check("mixed", ((3, "contiguous"),))
        self.check("zero", ((2, "contiguous"), (5, "fragments")))


if __name__ == "__main__":
    unittest.main()
