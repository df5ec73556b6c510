"""The backward of a prefill as rows: gradients of q, k, v, g, beta and the initial states, from gradients of o and of the
final states. What a training step's forward keeps is made beforehand and not timed."""

from dataclasses import dataclass

from cases import Case, D

CHUNK = 64
GATES = ("normal", "mixed", "model", "zero", "strong")


@dataclass(frozen=True)
class Backward(Case):
    operation = "backward"
    outputs = ("dq", "dk", "dv", "dg", "dbeta", "ds0")

    @property
    def name(self):
        return f"backward {self.key_heads}:{self.value_heads} {self.batch} {self.gates}"

    @property
    def io_bytes(self):
        """q, k, v and o's gradient are read, gradients of q, k and v written, in 16 bits; gates and theirs have 32."""
        return self.tokens * (2 * D * (4 * self.key_heads + 3 * self.value_heads) + 4 * 4 * self.value_heads)

    @property
    def state_bytes(self):
        """Initial states, and gradients of these and of the final ones, in f32."""
        return 3 * super().state_bytes

    def inputs(self, device="cuda", seed=7):
        """Those of a prefill, with initial states `state`, and the gradients `d_o` and `d_state`."""
        import torch
        from cases import make_inputs

        x = make_inputs(self, device, seed)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        shape = (len(self.lengths), self.value_heads, D, D)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

        x.state, x.d_state = 0.25 * normal(*shape), normal(*shape)
        x.d_o = normal(*x.v.shape).to(x.v.dtype)
        return x

    def reference(self, x):
        """The gradients in float64, by torch's autograd of the recurrence a chunk at a time."""
        import torch

        if any(n % CHUNK or n != self.lengths[0] for n in self.lengths):
            raise ValueError(f"lengths: {self.lengths}; they must be equal multiples of {CHUNK}")
        # Value heads of a few key heads at once, so that what autograd keeps fits.
        at_once = max(1, (1 << 17) // (self.tokens * self.value_heads // self.key_heads))
        parts = [heads(x, range(first, min(first + at_once, self.key_heads))) for first in range(0, self.key_heads, at_once)]
        return tuple(torch.cat(found, 1 if label == "ds0" else 2) for label, found in zip(self.outputs, zip(*parts)))


def heads(x, keys):
    """Gradients of some key heads and their value heads."""
    import torch

    case = x.case
    group = case.value_heads // case.key_heads
    values = slice(keys.start * group, keys.stop * group)
    of_key, sequences = slice(keys.start, keys.stop), len(case.lengths)
    # Inputs were made in inference mode.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [t.double().clone().requires_grad_()
                  for t in (x.q[:, :, of_key], x.k[:, :, of_key], x.v[:, :, values], x.g[:, :, values],
                            x.beta[:, :, values], x.state[:, values])]
        o, state = forward(*leaves, x.scale, sequences, group)
        upstream = [x.d_o[:, :, values].double().clone(), x.d_state[:, values].double().clone()]
        found = torch.autograd.grad([o, state], leaves, upstream)
    return [t.detach() for t in found]


def forward(q, k, v, g, beta, state, scale, sequences, group):
    """o [1, T, HV, D] and the states [N, HV, D, D] after sequences of equal lengths, without writes in place."""
    import torch

    def chunks(t, repeat=1):
        """[1, T, heads, ...] to [N, heads, chunks, CHUNK, ...]."""
        t = t[0].view(sequences, -1, CHUNK, *t.shape[2:]).repeat_interleave(repeat, 3)
        return t.movedim(3, 1)

    q, k, v, beta, total = chunks(q, group) * scale, chunks(k, group), chunks(v), chunks(beta)[..., None], chunks(g).cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    # Masked before exp as well: what grows there would have infinite gradients.
    apart = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, 0.0)
    decay = apart.exp() * lower
    since = total.exp()[..., None]
    system = torch.eye(CHUNK, dtype=v.dtype, device=v.device) + (k @ k.transpose(-1, -2) * decay * beta).tril(-1)
    right = torch.linalg.solve_triangular(system, torch.cat([beta * v, beta * since * k], -1), upper=False)
    values, keys = right.split(D, -1)
    within = q @ k.transpose(-1, -2) * decay
    q, k = q * since, (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    whole = since[..., -1:, :]
    out = []
    for c in range(v.shape[2]):
        delta = values[:, :, c] - keys[:, :, c] @ state
        out.append(q[:, :, c] @ state + within[:, :, c] @ delta)
        state = state * whole[:, :, c] + k[:, :, c] @ delta
    o = torch.stack(out, 2).movedim(1, 3)  # [N, chunks, CHUNK, HV, D]
    return o.reshape(1, -1, *o.shape[3:]), state


def all_gradients():
    """The shapes whose times others published, and every kind of gates at one of them."""
    shapes = [(16, 32, (8192,)), (16, 32, (32768,)), (16, 32, (4096,) * 8), (8, 16, (32768,)), (4, 8, (8192,)),
              (4, 8, (32768,)), (2, 4, (32768,))]
    every = [Backward("bf16", *shapes[0], gates) for gates in GATES]
    return every + [Backward("bf16", *shape, gates) for shape in shapes[1:] for gates in GATES[:2]]
