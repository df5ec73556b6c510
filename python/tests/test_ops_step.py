"""`drafts.layer_step`: a step of drafts, decodes, prefills and padding in one call, beside a call for each kind."""

import unittest

try:
    import torch
    from torch.library import opcheck

    from deltawave import ArgumentError, drafts, ops
except ImportError as problem:
    if problem.name != "torch" and "opcheck" not in str(problem) and "custom_op" not in str(problem):
        raise
    raise unittest.SkipTest("torch 2.4 or newer is not installed") from None

HK, HV, K, V, WIDTH, SLOTS, MOST = 1, 2, 16, 32, 4, 16, 3
CHANNELS = 2 * HK * K + HV * V
# Drafts of ragged length: one sequence has fewer than MOST tokens, one none, and the table is padded; then two rows of
# padding. After them two decodes, the second of which is padding, prefills of which one is absent, and rows of no sequence.
DRAFT_LENGTHS, DRAFT_ROWS = [3, 1, 0, 2], 8
LENGTHS, DECODES, ROWS = [1, 1, 70, 0, 5], 2, 80


def lengths(each):
    """cu_seqlens, where kernels read them on the device."""
    return ops.on_device(torch.tensor([0, *each]).cumsum(0).to(torch.int32))


def step():
    """Arguments of a step."""
    made = torch.Generator().manual_seed(5)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=made)

    rows = DRAFT_ROWS + ROWS
    return {
        "x": uniform(-1, 1, rows, CHANNELS).bfloat16(), "z": uniform(-1, 1, rows, 1, HV * V).bfloat16(),
        "a": uniform(-1, 1, rows, HV), "b": uniform(-1, 1, rows, HV),
        "conv_state": uniform(-1, 1, SLOTS, CHANNELS, WIDTH - 2 + MOST).bfloat16(), "pool": uniform(-1, 1, SLOTS, HV, K, V),
        "conv_weight": uniform(-1, 1, CHANNELS, WIDTH), "a_log": uniform(-1, 0, HV), "dt_bias": uniform(-1, 1, HV),
        "norm_weight": uniform(.5, 1.5, V), "key_heads": HK, "value_heads": HV, "key_dim": K, "value_dim": V,
        "draft_rows": DRAFT_ROWS, "draft_cu_seqlens": lengths(DRAFT_LENGTHS),
        "draft_slots": torch.tensor([[1, 5, 6], [3, 2, 0], [0, 0, 0], [4, 7, 0]], dtype=torch.int32),
        "accepted": torch.tensor([2, 1, 1, 1], dtype=torch.int32), "null_slot": 0,
        "cu_seqlens": lengths(LENGTHS), "decodes": DECODES,
        "slots": torch.tensor([8, -1, 9, 10, 11], dtype=torch.int32),
        "has_initial_state": torch.tensor([1, 1, 0, 1, 1], dtype=torch.uint8)}


def apart(given):
    """The same step by one call for the drafts and one for the others."""
    x = dict(given)
    mine = {name: x.pop(name) for name in ("draft_rows", "draft_slots", "accepted", "draft_cu_seqlens", "null_slot")}
    others = {name: x.pop(name) for name in ("cu_seqlens", "decodes", "slots", "has_initial_state")}
    rows = {name: x.pop(name) for name in ("x", "a", "b", "z")}
    end = mine.pop("draft_rows")
    first, rest = ({name: t[part] for name, t in rows.items()} for part in (slice(end), slice(end, None)))
    y = drafts.layer_drafts(**first, **x, cu_seqlens=mine.pop("draft_cu_seqlens"), **mine)
    state = x.pop("conv_state")[:, :, :WIDTH - 1]
    return torch.cat([y, ops.layer(**rest, **x, conv_state=state, **others)])


def copied(given):
    """The step with pools of its own."""
    return {**given, **{name: given[name].clone() for name in ("conv_state", "pool")}}


class Step(unittest.TestCase):
    def test_one_call_has_the_bits_of_one_for_each_kind(self):
        given = step()
        two, one, three = copied(given), copied(given), copied(given)
        wanted, found = apart(two), drafts.layer_step(**one)
        out = torch.full_like(wanted, float("nan"))
        self.assertIs(drafts.layer_step(**three, out=out), out)
        for y, x in ((found, one), (out, three)):
            self.assertTrue(torch.equal(y, wanted))
            self.assertTrue(torch.equal(x["pool"], two["pool"]) and torch.equal(x["conv_state"], two["conv_state"]))
        # Rows past the drafts, the padded decode, and rows past the prefills.
        nobody = [*range(6, 8), 9, *range(DRAFT_ROWS + 77, DRAFT_ROWS + ROWS)]
        self.assertEqual(found[nobody].count_nonzero(), 0)
        self.assertTrue((found[[0, 3, 4, 8, 10, 84]].count_nonzero(-1) > 0).all())
        # Slots 0, 10 and 12 to 15 are no sequence's, or of one without tokens.
        untouched = [0, 10, 12, 13, 14, 15]
        for name in ("pool", "conv_state"):
            self.assertTrue(torch.equal(one[name][untouched], given[name][untouched]))
        for slot in (5, 6, 4, 7, 8, 9, 11):
            self.assertFalse(torch.equal(one["pool"][slot], given["pool"][slot]), slot)

    def test_parts_may_be_absent(self):
        given = step()
        alone = {**copied(given), "draft_rows": 0, "draft_slots": torch.zeros(0, MOST, dtype=torch.int32),
                 "accepted": torch.zeros(0, dtype=torch.int32), "draft_cu_seqlens": lengths([])}
        for name in ("x", "a", "b", "z"):
            alone[name] = alone[name][DRAFT_ROWS:]
        whole = drafts.layer_step(**copied(given))
        self.assertTrue(torch.equal(drafts.layer_step(**alone), whole[DRAFT_ROWS:]))
        only = {**copied(given), "cu_seqlens": lengths([]), "decodes": 0, "slots": None, "has_initial_state": None}
        for name in ("x", "a", "b", "z"):
            only[name] = only[name][:DRAFT_ROWS]
        self.assertTrue(torch.equal(drafts.layer_step(**only), whole[:DRAFT_ROWS]))
        with self.assertRaisesRegex(ArgumentError, "draft_rows: 89; it must be 0 to 88, the rows of x"):
            drafts.layer_step(**{**copied(given), "draft_rows": 89})

    def test_torch_takes_it(self):
        x = copied(step())
        arguments = [x[name] for name in ("x", "a", "b", "conv_state", "pool", "conv_weight", "a_log", "key_heads",
                                          "value_heads", "key_dim", "value_dim", "draft_rows", "draft_slots", "accepted",
                                          "draft_cu_seqlens", "cu_seqlens", "decodes", "slots", "z")]
        opcheck(torch.ops.deltawave.layer_step.default, arguments, {"null_slot": 0}, test_utils=("test_schema", "test_faketensor"))


if __name__ == "__main__":
    unittest.main()
